"""Check of low-rank adapters: attached, trained, saved, loaded in PEFT's format, and merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from shardtune.config import LoraConfig
from shardtune.errors import ShardtuneError, counted
from shardtune.parallel.buffers import same_values
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.exported_recipe import over_directory
from shardtune.training.worker.run_context import RunContext
from shardtune.verify.kit import PARITY, CannotStart, Kit
from shardtune.verify.result import Failed, Skipped
from shardtune.verify.structure import check_buffer_forms
from shardtune.verify.trial import CLOSE, Trial, apart, copies, run, silent

STEPS = 2
"""The first step changes only the factor that starts as zero; the second changes both."""
MOST_STEPS = 8
"""Of a model with layers that start as zero, each of which passes gradients on only once it has moved."""
KEPT = (
    *("target_modules", "target_parameters", "modules_to_save", "use_rslora", "use_dora"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
)
"""The LoRA keys that are taken from the recipe; `r` and `alpha` are the kit's, so that they differ."""
SECTION = "actor.model.lora"


def check_lora(kit: Kit) -> str:
    """A low-rank adapter trains, is saved and loaded, and merges into weights that give the same losses."""
    changes = {**PARITY, "actor.model.is_lora": True, SECTION: _settings(kit.case.lora)}
    try:
        worker = kit.worker(changes)
    except CannotStart as error:
        if str(error.args[1] or "").startswith(SECTION):
            raise Skipped(str(error.args[0])) from error
        raise
    buffers = copies(dict(worker.inner_model.named_buffers()))
    _train(worker)
    check_buffer_forms(worker.inner_model, buffers)
    moved = [n for n, buffer in worker.inner_model.named_buffers() if not same_values(buffer, buffers[n])]
    folder = kit.case.folder / "lora"
    here = Trial(worker).row_losses()
    worker.save_checkpoint(folder / "checkpoint", STEPS)
    again = kit.worker(changes)
    again.load_checkpoint(folder / "checkpoint")
    _same(here, Trial(again).row_losses(), "loaded from a checkpoint", exactly=True)
    if moved:
        raise Skipped(
            f"training moves the buffer {moved[0]}, which is no part of a low-rank adapter as PEFT saves and loads it "
            "(nn.GroupNorm and nn.LayerNorm have no such statistics)"
        )
    worker.export(folder / "adapter", "fp64")
    worker.export(folder / "merged", "fp64", merge=True)
    _same(here, _reopened(worker, folder / "adapter"), "loaded from the adapter that was written", exactly=False)
    _same(here, _merged(kit, folder / "merged"), "merged into its base", exactly=False)
    number = sum(parameter.numel() for parameter in worker.weights.trainable().values())
    return f"{counted(number, 'parameter')}: the same losses from a checkpoint, from PEFT's directory, and merged"


def _settings(own: Mapping[str, object]) -> dict[str, object]:
    return {**LoraConfig().model_dump(), **{key: own[key] for key in KEPT}, "r": 4, "alpha": 6.0}


def _train(worker: SFTWorker) -> None:
    """Train some steps; every trained tensor must change, and no frozen one."""
    before = copies(worker.weights.parameters)
    trained = worker.weights.trainable()
    done = 0
    while done < MOST_STEPS:
        run(worker, STEPS)
        done += STEPS
        if not any(torch.equal(trained[name].detach(), before[name]) for name in trained):
            break
    for name, parameter in worker.weights.parameters.items():
        moved = not torch.equal(parameter.detach(), before[name])
        if moved != (name in trained) and (moved or not worker.adapter.may_be_idle(name)):
            how = "trained, and stays as it was" if name in trained else "frozen, and moves all the same"
            raise Failed(
                f"{name} is {how} in {done} steps",
                where=f"{type(worker.adapter).__name__}.loss: {name}",
                remedy="call the adapted layers as modules, and not functions on their weights; what is computed under "
                "torch.no_grad() is not trained: freeze it in build by requires_grad_(False), and LoRA leaves it out"
                if name in trained
                else "let nothing but the optimizer write to parameters",
            )


def _reopened(worker: SFTWorker, directory: Path) -> list[dict[str, str]]:
    other = worker.reopened(directory)
    other.setup_evaluation(context=RunContext(weights_directory=directory))
    return Trial(other).row_losses()


def _merged(kit: Kit, directory: Path) -> list[dict[str, str]]:
    """The losses of the base model with the adapter merged into it."""
    try:
        other = SFTWorker(over_directory(kit.case.variant(PARITY), directory), report=silent)
        other.setup_evaluation(context=RunContext(weights_directory=directory))
    except ShardtuneError as error:
        raise Failed(
            f"the merged weights cannot be loaded: {error.what}",
            where=error.where or str(directory),
            remedy=error.remedy or "let the model's own names hold all its weights",
        ) from error
    return Trial(other).row_losses()


def _same(here: Sequence[Mapping[str, str]], there: Sequence[Mapping[str, str]], how: str, *, exactly: bool) -> None:
    for row, (mine, its) in enumerate(zip(here, there, strict=True)):
        for term, value in mine.items():
            one, other = float.fromhex(value), float.fromhex(its[term])
            if one != other if exactly else apart(one, other) > CLOSE:
                raise Failed(
                    f"{how}, the model gives row {row} the loss {other:.9g} (term {term!r}), in training {one:.9g}",
                    where="loss, build()",
                    remedy="call the adapted layers as modules, and keep no copy of their weights elsewhere",
                )
