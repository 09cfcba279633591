"""The state of training in a folder: weights and optimizer state as tensors, everything else as JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shardtune.checkpoint.dcp import PendingSave, async_save_tensors, load_tensors, save_tensors, write_error
from shardtune.checkpoint.optimizer import Names, load_optimizer_tensors, optimizer_bytes, optimizer_tensors
from shardtune.errors import CheckpointError
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights

MODEL, OPTIMIZER, AVERAGE = "model", "optimizer", "average"
STATE_FILE = "worker.json"


def save_training(
    folder: Path,
    weights: Weights,
    optimizer: Optimizer,
    state: Mapping[str, object],
    *,
    ranks: Ranks,
    average: Mapping[str, torch.Tensor] | None = None,
    background: Sequence[dist.ProcessGroup | None] | None = None,
) -> list[PendingSave]:
    """Write weights, optimizer and `state` into a folder; every rank calls it.

    Args:
        folder: created here.
        weights: of the model.
        optimizer: of these weights.
        state: JSON values.
        ranks: of the run; rank 0 writes `state`.
        average: of the weights, in the layout of checkpoints, where one is kept.
        background: process groups that nothing else uses, one for each of weights, optimizer and average: return once
            the tensors are copied; the caller waits for the returned saves. None: return when everything is on the
            disk.

    Raises:
        CheckpointError: the disk is full or cannot be written; on every rank.
    """
    tensors = weights.checkpointed()
    moments, description = optimizer_tensors(optimizer, _names(weights), weights)
    _write_state(folder, {**state, "optimizer": description}, ranks)
    if background is None:
        save_tensors(folder / MODEL, tensors)
        save_tensors(folder / OPTIMIZER, moments)
        if average is not None:
            save_tensors(folder / AVERAGE, dict(average))
        return []
    parts = {MODEL: tensors, OPTIMIZER: moments}
    if average is not None:
        parts[AVERAGE] = dict(average)
    # All write at the same time, so none may use another's connections.
    return [
        async_save_tensors(folder / name, part, process_group=group)
        for (name, part), group in zip(parts.items(), background, strict=True)
    ]


def _write_state(folder: Path, state: Mapping[str, object], ranks: Ranks) -> None:
    failed: CheckpointError | None = None
    if ranks.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / STATE_FILE).write_text(json.dumps(state))
        except OSError as problem:
            failed = write_error(folder, problem)
    failed = ranks.broadcast(failed)
    if failed is not None:
        raise failed


def load_training(
    folder: Path, weights: Weights, optimizer: Optimizer, *, from_recipe: Collection[str], without_moments: bool = False
) -> dict[str, Any]:
    """Load weights and optimizer state from a folder that `save_training` wrote, on any number of ranks.

    Args:
        folder: of the checkpoint.
        weights: of the model.
        optimizer: of these weights.
        from_recipe: settings of its groups that stay as they are; the same as the checkpoint's unless the user allowed
            a change.
        without_moments: leave the optimizer as it is.

    Returns:
        The state that was saved with them.
    """
    state = load_weights_only(folder, weights)
    if without_moments:
        return state
    load_optimizer_tensors(
        folder / OPTIMIZER, optimizer, _names(weights), state["optimizer"], weights, keep=from_recipe
    )
    return state


def load_weights_only(folder: Path, weights: Weights) -> dict[str, Any]:
    """Load only the weights of a checkpoint, which may have been trained in half precision; returns its JSON state."""
    state = read_training_state(folder)
    tensors = weights.checkpointed()
    load_tensors(folder / MODEL, tensors, widen=True)
    weights.take(tensors)
    return state


def has_average(folder: Path) -> bool:
    """Whether a checkpoint has averaged weights."""
    return (folder / AVERAGE).is_dir()


def load_average(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill tensors in the layout of checkpoints with the averaged weights of a checkpoint; all ranks call it.

    Raises:
        CheckpointError: it has none, or those of another model.
    """
    if not has_average(folder):
        raise CheckpointError(
            "the checkpoint has no averaged weights: it was written without actor.optim.ema_decay",
            where=str(folder),
            remedy="leave actor.optim.ema_decay out, or set actor.optim.ema_use: false to evaluate or export",
        )
    load_tensors(folder / AVERAGE, tensors)


def read_training_state(folder: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        return json.loads((folder / STATE_FILE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's state cannot be read: {error}",
            where=str(folder / STATE_FILE),
            remedy="continue from another checkpoint",
        ) from error


def model_bytes(weights: Weights) -> int:
    """The size of the weights on all ranks together."""
    return weights.checkpointed_bytes()


def training_bytes(weights: Weights, optimizer: Optimizer) -> int:
    """The size of a checkpoint on all ranks together, before it is written."""
    moments = optimizer_bytes(optimizer, _names(weights), weights.shapes)
    if not moments:  # before the first step: two moments per weight, as in Adam
        moments = 2 * sum(weights.shapes[n].numel() * p.element_size() for n, p in weights.trainable().items())
    return model_bytes(weights) + moments


def _names(weights: Weights) -> Names:
    """Of all parameters: those of the optimizer may be frozen at the moment."""
    return {parameter: name for name, parameter in weights.parameters.items()}
