"""Checks of whole runs: the same twice, resumed, loaded elsewhere, in half precision."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from shardtune.batch import Sample
from shardtune.config import Recipe
from shardtune.errors import counted
from shardtune.models.adapter import Adapter
from shardtune.verify.case import STEPS
from shardtune.verify.kit import NO_PROCESSES, PARITY, TRAINING, Kit
from shardtune.verify.result import Failed, Skipped
from shardtune.verify.rows import kept_rows
from shardtune.verify.trial import Trajectory, Trial, run, same, shown

HALFWAY = STEPS // 2
ENCODING = (
    "let the sample depend on row and options alone: no vocabulary that grows as rows are seen, no counter, no hash() "
    "of text (another one in every process); what is drawn at random belongs in loss, as rows are encoded once and kept"
)
DETERMINISM = (
    "let everything that loss reads come from the batch and the model: draw by batch.randn_like, batch.rand_like (or "
    "with torch, which is seeded before each forward), keep nothing on the adapter between calls"
)


def check_encode(kit: Kit) -> str:
    """The same row gives the same sample, twice and whatever was encoded before it, and stays as it was."""
    name = type(kit.adapter()).__name__
    encoder = kit.adapter().encoder(with_prompts=False)
    try:
        copied = pickle.loads(pickle.dumps(encoder))
    except Exception as error:
        raise Failed(
            f"what encodes rows cannot be sent to another process: {type(error).__name__}: {error}",
            where=f"{name}.encoder",
            remedy="keep out of it what cannot be pickled (open files, lambdas, locks); or do not write encoder()",
        ) from error
    others = [copied.encode(copy.deepcopy(row)) for row in reversed(kit.case.rows)]
    for number, (row, other) in enumerate(zip(kit.case.rows, reversed(others), strict=True)):
        before = copy.deepcopy(row)
        first = encoder.encode(row)
        changed = row != before
        again = encoder.encode(row)
        if changed:
            raise Failed(
                f"encode changes the row it is given (row {number})",
                where=f"{name}.encode",
                remedy="work on a copy: dict(row)",
            )
        for how, sample in (("a second time", again), ("by a copy of the encoder, the last row first", other)):
            field = difference(first, sample)
            if field is not None:
                raise Failed(
                    f"row {number} is encoded otherwise {how}: {field}",
                    where=f"{name}.encode",
                    remedy=ENCODING,
                )
        weights, anew = encoder.weights(first), encoder.weights(again)
        if weights != anew:
            raise Failed(
                f"row {number} weighs {dict(weights)} and then {dict(anew)}",
                where=f"{name}.weights",
                remedy="let weights depend on the sample alone",
            )
    return f"{counted(len(kit.case.rows), 'row')}, the same twice and in another order"


def difference(one: Sample, other: Sample) -> str | None:
    """The first part in which two samples differ; None where they do not."""
    arrays = {"input_ids": one.input_ids, "loss_weights": one.loss_weights, **one.fields}
    others = {"input_ids": other.input_ids, "loss_weights": other.loss_weights, **other.fields}
    if arrays.keys() != others.keys():
        return f"it has the fields {', '.join(sorted(others))}, not {', '.join(sorted(arrays))}"
    for name, array in arrays.items():
        mine, its = np.asarray(array), np.asarray(others[name])
        if (mine.dtype, mine.shape) != (its.dtype, its.shape):
            return f"{name} is {its.dtype} {list(its.shape)}, not {mine.dtype} {list(mine.shape)}"
        if mine.tobytes() != its.tobytes():
            return f"{int((mine != its).sum())} of the {mine.size} values of {name} differ"
    return None


def check_repeat(kit: Kit) -> str:
    """The same micro-batch has the same loss twice, and a second run equals the first bit for bit."""
    trial = kit.trial
    for rows in trial.forwards(range(min(4, trial.num_rows))):
        batch = trial.batch(rows)
        with torch.no_grad():
            values = [{t: loss.total.item() for t, loss in trial.losses(batch).items()} for _ in range(3)]
        for again in values[1:]:
            if not same(values[0], again):
                raise Failed(
                    f"the same micro-batch with the same seed gives {shown(values[0])} and then {shown(again)}",
                    where=f"{type(trial.adapter).__name__}.loss",
                    remedy=DETERMINISM,
                )
    again = run(kit.worker(TRAINING), STEPS)
    _same_runs(kit, kit.first_run, again, "a second run")
    return f"{STEPS} steps twice: the same bits"


def check_resume(kit: Kit) -> str:
    """A run that is saved halfway and resumed in another worker equals an uninterrupted one."""
    folder = kit.case.folder / "resume"
    worker = kit.worker(TRAINING)
    begun = run(worker, HALFWAY)
    worker.save_checkpoint(folder, HALFWAY)
    other = kit.worker(TRAINING)
    other.load_checkpoint(folder)
    rest = run(other, STEPS - HALFWAY)
    joined = Trajectory([*begun.losses, *rest.losses], [*begun.norms, *rest.norms], rest.tensors)
    _same_runs(kit, kit.first_run, joined, f"a run resumed after {HALFWAY} steps")
    return f"{HALFWAY} + {STEPS - HALFWAY} steps as {STEPS}: the same bits"


def _same_runs(kit: Kit, one: Trajectory, other: Trajectory, what: str) -> None:
    name = type(kit.trial.adapter).__name__
    for number, (first, again) in enumerate(zip(one.losses, other.losses, strict=True)):
        if first != again:
            raise Failed(
                f"{what} has the loss {again:.9g} in step {number}, the first run {first:.9g}",
                where=f"{name}.loss",
                remedy=DETERMINISM,
            )
    for tensor, value in one.tensors.items():
        if not torch.equal(value.nan_to_num(), other.tensors[tensor].nan_to_num()):
            raise Failed(
                f"{what} ends with another {tensor}, though the losses agree",
                where=f"{name}: {tensor}",
                remedy=DETERMINISM,
            )


def check_reload(kit: Kit) -> str:
    """A saved model gives the same losses, and rows the same samples, in a fresh process."""
    if not kit.processes:
        raise Skipped(NO_PROCESSES)
    folder = kit.case.folder / "reload"
    worker = kit.worker(PARITY)
    run(worker, HALFWAY)
    worker.save_checkpoint(folder / "checkpoint", HALFWAY)
    worker.export(folder / "final", "fp64")
    here = Trial(worker).row_losses()
    there = kit.fresh.load(worker.recipe, folder / "checkpoint", folder / "final")
    _same_samples(kit, there["samples"])
    for what, losses in there["losses"].items():
        for row, (mine, its) in enumerate(zip(here, losses, strict=True)):
            term = next((term for term in mine if mine[term] != its.get(term)), None)
            if term is not None:
                raise Failed(
                    f"row {row} has the loss {float.fromhex(mine[term]):.9g} here and {float.fromhex(its[term]):.9g} "
                    f"in a fresh process that loaded the {what}",
                    where=f"{type(worker.adapter).__name__}: build, loss",
                    remedy="keep all that the loss depends on in parameters, persistent buffers and options; nothing "
                    "in module globals, on the adapter, or in what loss or build compute while training",
                )
    rows = counted(len(here), "row")
    return f"{rows}, the same losses bit for bit in a fresh process, from checkpoint and exported model"


def _same_samples(kit: Kit, there: Sequence[str]) -> None:
    adapter = kit.adapter()
    here = digests(adapter, kit.case.recipe)
    number = next((n for n, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1]), None)
    if number is not None:
        raise Failed(
            f"row {number} is encoded otherwise in a fresh process, which takes the last row first",
            where=f"{type(adapter).__name__}.encode",
            remedy=ENCODING,
        )


def digests(adapter: Adapter, recipe: Recipe, *, backwards: bool = False) -> list[str]:
    """A fingerprint of each encoded row of the recipe; `backwards` encodes the last row first."""
    encoder, rows = adapter.encoder(with_prompts=False), kept_rows(Path(str(recipe.data.train_data_paths)))
    order = range(len(rows))[::-1] if backwards else range(len(rows))
    found = {row: _digest(encoder.encode(rows[row])) for row in order}
    return [found[row] for row in range(len(rows))]


def _digest(sample: Sample) -> str:
    made = blake2b(digest_size=16)
    for name, array in sorted({"": sample.input_ids, "weights": sample.loss_weights, **sample.fields}.items()):
        values = np.asarray(array)
        made.update(f"{name} {values.dtype} {values.shape}".encode())
        made.update(values.tobytes())
    return made.hexdigest()


def check_bf16(kit: Kit) -> str:
    """bf16 computation runs, and the loss is summed in a wider dtype."""
    worker = kit.worker({"actor.model.precision": "bf16"})
    trial = Trial(worker)
    rows = trial.forwards(range(trial.num_rows))
    for term, loss in trial.losses(trial.batch(rows[0])).items():
        if loss.total.dtype not in (torch.float32, torch.float64):
            raise Failed(
                f"the total of the term {term!r} is {loss.total.dtype} where the model computes in bf16; its digits "
                "would be lost in sums",
                where=f"{type(trial.adapter).__name__}.loss",
                remedy="compute the loss of .float() outputs, and sum it in fp32",
            )
    worker.model.train()
    half = run(worker, HALFWAY)
    _check_finite(trial, half.losses[0])
    return f"loss {half.losses[0]:.4g} in bf16, {kit.first_run.losses[0]:.4g} in fp32"


def _check_finite(trial: Trial, loss: float) -> None:
    if not math.isfinite(loss):
        raise Failed(
            f"the first step's loss is {loss} in bf16",
            where=f"{type(trial.adapter).__name__}.loss",
            remedy="compute logarithms, exponentials and divisions in fp32, of .float() outputs",
        )
