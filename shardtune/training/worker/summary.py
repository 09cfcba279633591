"""What the first screen of a run shows of a worker's model, ranks, data and steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardtune.config import Recipe
from shardtune.data.loader.protocol import Loader, MicroBatch
from shardtune.data.loader.step_loader import StepLoader
from shardtune.errors import counted
from shardtune.models.lora.attach import trainable_patterns
from shardtune.parallel.ranks import Ranks
from shardtune.training.run_summary import RunSummary
from shardtune.training.worker.data_position import DataPosition
from shardtune.training.worker.model_state import ModelState


def summarise(
    recipe: Recipe,
    ranks: Ranks,
    state: ModelState,
    position: DataPosition,
    loader: Loader[MicroBatch],
    evaluations: Mapping[str, tuple[Iterable[object], Mapping[str, object]]],
) -> RunSummary:
    """The summary of a worker after its set-up.

    Args:
        recipe: of the run.
        ranks: of the run.
        state: the model.
        position: of training in its data.
        loader: of the training data.
        evaluations: by the name of the set, the loader and what it announces.
    """
    parameters, shapes, notes = dict(state.inner.named_parameters()), state.weights.shapes, list[str]()
    if recipe.runner.deterministic:
        notes.append("deterministic kernels: bitwise repeatable, and on CUDA slower than those left out")
    horizon = position.horizon
    if horizon < recipe.runner.max_steps:
        limit = position.limit(horizon)
        steps = counted(horizon, "step")
        notes.append(f"training ends after {steps} by {limit}; runner.max_epochs: -1 sets no such limit")
    warmup = recipe.actor.optim.lr_warmup_steps
    if warmup > horizon:
        short = f"the warm-up takes {counted(warmup, 'step')}, and training ends after {horizon:,}"
        notes.append(f"{short}: optim.lr is not reached")
    share = recipe.actor.optim.lr_warmup_steps_ratio
    if share and horizon > 0 and not round(share * horizon):
        notes.append(f"optim.lr_warmup_steps_ratio: {share:g} of {horizon:,} steps is none: there is no warm-up")
    is_counted = not isinstance(loader, StepLoader) or loader.is_counted
    all_trained = all(parameter.requires_grad for parameter in parameters.values())
    return RunSummary(
        model=type(state.inner).__name__.removeprefix("FSDP"),
        parameters=sum(state.sizes().values()),
        trainable=sum(shapes[name].numel() for name in state.weights.trainable()),
        dtypes=state.dtypes,
        ranks=_ranks(ranks),
        attention="",
        rows=loader.num_samples if is_counted else None,
        tokens=None,
        targets=0.0,
        steps_per_epoch=loader.num_steps(0) if is_counted else None,
        total_steps=position.horizon,
        evaluation={name: _announced(info) for name, (_, info) in evaluations.items()},
        notes=notes,
        trained=[] if all_trained else trainable_patterns(parameters, shapes),
    )


def _announced(info: Mapping[str, object]) -> int | None:
    size = info.get("num_samples")
    return size if isinstance(size, int) else None


def _ranks(ranks: Ranks) -> str:
    """The ranks, their devices and their layout."""
    layout = f" ({ranks.layout})" if ranks.world_size > 1 else ""
    return f"{ranks.world_size} on {ranks.device.type}{layout}"
