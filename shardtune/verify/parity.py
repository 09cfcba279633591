"""Checks of training against plain PyTorch: on two ranks, and along every axis that a run may vary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from safetensors.torch import load_file
from torch import nn

from shardtune.errors import ShardtuneError
from shardtune.models.activation_checkpointing import checkpoint_unit
from shardtune.models.language_model import LanguageModel
from shardtune.parallel.meta_init import named_tensors
from shardtune.parallel.unit_calls import CALL_ALL
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.verify.case import STEPS
from shardtune.verify.kit import MOMENTUM, NO_PROCESSES, ONE_ROW, PARITY, TRAINING, CannotStart, Kit
from shardtune.verify.reference import rounding_as_bf16, train_plainly
from shardtune.verify.result import Failed, Skipped
from shardtune.verify.structure import ties
from shardtune.verify.trial import CLOSE, Trajectory, apart, copies, distance, run

ROUNDED = 1e-4
"""The relative difference allowed between fp32 losses whose sums have another order."""
HALF_RUNS = 3
HALF_TIMES, HALF_LEAST = 4.0, 0.01
"""The relative difference allowed between losses in bf16 and in fp64: so many times the measured spread, or the least.
The spread is the largest over that many runs."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One feature of a run that plain PyTorch lacks.

    Attributes:
        name: in messages.
        changes: to the recipe.
        close: the relative difference allowed from plain PyTorch's losses.
        meaning: its effect, for messages.
        remedy: where to look if it diverges.
    """

    name: str
    changes: Mapping[str, object]
    close: float
    meaning: str
    remedy: str


NEW_LINE = "\n"
WHOLE = {"actor.micro_batch_size": 1000}
ALONE = Axis(
    "loss",
    WHOLE,
    CLOSE,
    "a step as one micro-batch",
    "something other than the weights changes between steps: state that the adapter keeps, or buffers that loss reads",
)
ACCUMULATION = Axis(
    "accumulation",
    ONE_ROW,
    CLOSE,
    "micro-batches of one row",
    "the loss of a batch is no sum over its rows: see the check sums",
)
PACKING = Axis(
    "packing",
    WHOLE,
    CLOSE,
    "the rows of a step end to end",
    "rows see each other, or positions continue from one to the next: see the check padding",
)
CHECKPOINTING = Axis(
    "checkpointing",
    WHOLE,
    CLOSE,
    "activations computed a second time",
    "a layer gives something else when it is computed again: it counts calls, fills a cache (use_cache=False), keeps "
    "state, or draws outside torch",
)
PRECISION = Axis(
    "precision",
    {**WHOLE, "actor.model.precision": "bf16"},
    HALF_LEAST,
    "bf16 computation",
    "see whether sums and norms over long rows are taken in bf16: .float() before them",
)
SHARDING = Axis(
    "sharding",
    ONE_ROW,
    CLOSE,
    "two ranks, one with a filler in place of a row",
    "a unit is not called as a module, or weights are read outside of its forward: declare unit_classes",
)


def check_parity(kit: Kit) -> str:
    """A few steps give the losses and weights of a plain PyTorch loop, whatever is turned on."""
    trial = kit.deterministic_trial()
    # The worker of the trial has not been trained; its model is a plain module with the initial weights, and has them
    # again after each run. A copy would not do: a function that a constructor made may hold the model that it is of.
    model = trial.worker.inner_model.eval()
    initial = copies(_tensors(model))
    optim = kit.case.variant(PARITY).actor.optim
    steps = [{int(row): trial.samples[int(row)] for row in rows} for rows in trial.step_rows(STEPS)]

    def train() -> Trajectory:
        with trial.draws():
            found = train_plainly(
                trial.adapter,
                model,
                steps,
                trial.weigh,
                seed=kit.case.recipe.runner.seed,
                lr=optim.lr,
                momentum=MOMENTUM,
                decay=optim.weight_decay,
            )
        _give_back(model, initial)
        return found

    plain = train()
    agreeing: list[str] = []
    diverging: list[tuple[Axis, str, str]] = []
    left_out: list[str] = []
    for axis in _axes(kit):
        try:
            found = _run_of(kit, axis)
        except CannotStart as error:
            left_out.append(f"{axis.name} ({error.args[0]})")
            continue
        except (Failed, ShardtuneError) as error:
            message, remedy = error.what, error.remedy or axis.remedy
        except Exception as error:
            message = f"it fails: {type(error).__name__}: {str(error).strip().partition(NEW_LINE)[0]}"
            remedy = f"fix what the message names, or else: {axis.remedy}"
        else:
            close = axis.close if axis is not PRECISION else _half_spread(train, model, plain)
            message, remedy = _compare(plain, found, replace(axis, close=close)), axis.remedy
        if message is None:
            agreeing.append(axis.name)
        else:
            diverging.append((axis, message, remedy))
    if diverging:
        axis, message, remedy = diverging[0]
        others = [other.name for other, *_ in diverging[1:]]
        raise Failed(
            f"{axis.name} ({axis.meaning}) is the first that diverges from plain PyTorch: {message}. "
            f"Agreeing: {', '.join(agreeing) or 'none'}" + (f"; diverging too: {', '.join(others)}" if others else ""),
            where=f"{type(trial.adapter).__name__}, {axis.name}",
            remedy=remedy,
        )
    result = f"{STEPS} steps as in plain PyTorch, with {', '.join(agreeing)}"
    return result + (f"; not tried: {', '.join(left_out)}" if left_out else "")


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def _give_back(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give a model these values again, and no gradients."""
    model.zero_grad()
    for name, tensor in _tensors(model).items():
        if name in values and tensor.shape == values[name].shape:
            tensor.copy_(values[name])


def _half_spread(train: Callable[[], Trajectory], model: nn.Module, plain: Trajectory) -> float:
    """The difference allowed in bf16, from runs in fp64 whose weights and activations have bf16's rounding errors."""
    spread = 0.0
    for seed in range(HALF_RUNS):
        with rounding_as_bf16(model, seed):
            rounded = train()
        spread = max([spread, *(apart(*pair) for pair in zip(plain.losses, rounded.losses, strict=True))])
    return max(HALF_LEAST, HALF_TIMES * spread)


def _axes(kit: Kit) -> Iterator[Axis]:
    """Each axis with the others off as far as possible, in the order in which they build on each other."""
    adapter = kit.trial.adapter
    language = isinstance(adapter, LanguageModel)
    if not language:
        yield ALONE
    yield ACCUMULATION
    if language and adapter.rows_share_forwards:
        yield PACKING
    yield CHECKPOINTING
    if kit.processes:
        yield SHARDING
    yield PRECISION


def _run_of(kit: Kit, axis: Axis) -> Trajectory:
    if axis is SHARDING:
        ranks = kit.ranks.result()
        worker = kit.worker(PARITY)
        worker.load_checkpoint(kit.ranks.folder / "checkpoint")
        return Trajectory(ranks["losses"], ranks["norms"], named_tensors(worker.inner_model))
    worker = kit.worker({**PARITY, **axis.changes})
    worker.model.eval()
    if axis is CHECKPOINTING:
        _checkpoint_units(worker)
        _check_own_checkpointing(kit)
    with kit.trial.draws():
        return run(worker, STEPS)


def _check_own_checkpointing(kit: Kit) -> None:
    """The adapter's own activation checkpointing, in training mode; transformers checkpoints only there."""
    plain = kit.first_run
    found = run(kit.worker({**TRAINING, "actor.model.gradient_checkpointing": True}), STEPS)
    for number, (expected, got) in enumerate(zip(plain.losses, found.losses, strict=True)):
        if apart(expected, got) > ROUNDED:
            raise Failed(
                f"with actor.model.gradient_checkpointing the loss in step {number} is {got:.8g}, "
                f"without {expected:.8g}",
                where=f"{type(kit.trial.adapter).__name__}.set_execution",
                remedy=CHECKPOINTING.remedy,
            )


def _checkpoint_units(worker: SFTWorker) -> None:
    """Recompute the activations of each unit in the backward pass."""
    units = worker.adapter.shard_units(worker.inner_model)[0]
    if not units:
        raise CannotStart("no units")
    for unit in units:
        checkpoint_unit(unit, True)


def _compare(plain: Trajectory, found: Trajectory, axis: Axis) -> str | None:
    """The first difference between a run and the plain one; None where there is none."""
    for number, (expected, got) in enumerate(zip(plain.losses, found.losses, strict=True)):
        if apart(expected, got) > axis.close:
            return f"in step {number} its loss is {got:.8g}, plain PyTorch's {expected:.8g}"
    if axis.close > CLOSE:
        return None
    for number, (expected, got) in enumerate(zip(plain.norms, found.norms, strict=True)):
        if apart(expected, got) > axis.close:
            return f"in step {number} its gradient has norm {got:.8g}, plain PyTorch's {expected:.8g}"
    tensors = {name: plain.tensors[name] for name in found.tensors if name in plain.tensors}
    far, worst = distance(tensors, found.tensors)
    return f"its weights are {far:.3g} apart, most at {worst}" if far > axis.close else None


def _check_unit_calls(kit: Kit) -> None:
    """Every forward calls the same units in the same order; ranks would otherwise wait for each other forever."""
    trial = kit.trial
    expected = trial.unit_calls(trial.loaded([0]))
    others = [(f"row {row}", [row]) for row in range(1, trial.num_rows)]
    if trial.adapter.rows_share_forwards:
        others.append((f"all {trial.num_rows} rows together", list(range(trial.num_rows))))
    for what, rows in (*others, ("the filler", [])):
        called = trial.unit_calls(trial.loaded(rows))
        if called == expected:
            continue
        name = next((one or other for one, other in zip_longest(expected, called) if one != other), "")
        mine, its = (", ".join(names) or "none" for names in (expected, called))
        failure = Failed(
            f"a forward of row 0 calls the units {mine}; one of {what} {its}, and ranks that call different "
            "units wait for each other",
            where=f"{type(trial.adapter).__name__}.loss: {name}",
            remedy=CALL_ALL,
        )
        kit.ranks.give_up(failure)
        raise failure


def check_shards(kit: Kit) -> str:
    """Two ranks give the gradients and losses of one."""
    _check_unit_calls(kit)
    if not kit.processes:
        raise Skipped(NO_PROCESSES)
    trial = kit.deterministic_trial()
    folder = kit.ranks.folder
    ranks = kit.ranks.result()
    worker = kit.worker({**PARITY, **ONE_ROW})
    built = ties(worker.inner_model)
    if ranks["ties"] != built:
        lost = next((group for group in built if group not in ranks["ties"]), ranks["ties"])
        raise Failed(
            f"{lost} share one parameter on one rank, and not once the model is sharded",
            where="build(), unit_classes",
            remedy="let units not split a shared parameter: leave the modules that share it out of unit_classes",
        )
    rows = trial.step_rows(1)[0]
    alone = trial.measure([trial.batch([int(row)]) for row in rows]).gradients
    shared = load_file(folder / "gradients.safetensors")
    far, worst = distance(alone, shared)
    if far > CLOSE:
        raise Failed(
            f"the first step's gradient on two ranks is {far:.3g} of its size away from that on one, most at {worst}",
            where=worst,
            remedy=SHARDING.remedy,
        )
    worker.model.eval()
    with trial.draws():
        one = run(worker, STEPS)
    _same_losses(one.losses, ranks["losses"])
    loaded = kit.worker(PARITY)
    loaded.load_checkpoint(folder / "checkpoint")
    far, worst = distance(one.tensors, named_tensors(loaded.inner_model))
    if far > CLOSE:
        raise Failed(
            f"what two ranks saved, loaded on one, differs from one rank's weights by {far:.3g}, most at {worst}",
            where=worst,
            remedy="let a checkpoint hold everything: parameters and persistent buffers",
        )
    notes = f"; {'; '.join(ranks['notes'])}" if ranks["notes"] else ""
    return f"{STEPS} steps on two ranks as on one: losses, gradients, weights{notes}"


def _same_losses(one: Sequence[float], other: Sequence[float]) -> None:
    for number, (alone, shared) in enumerate(zip(one, other, strict=True)):
        if apart(alone, shared) > CLOSE:
            raise Failed(
                f"in step {number} two ranks have the loss {shared:.8g}, one has {alone:.8g}",
                where="loss",
                remedy=SHARDING.remedy,
            )
