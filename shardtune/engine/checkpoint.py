"""Saves trained weights, optimizers and schedules in a folder that any layout of an engine can load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardtune.checkpoint.atomic import sync_tree
from shardtune.checkpoint.dcp import load_tensors, save_tensors
from shardtune.checkpoint.optimizer import load_optimizer_tensors, optimizer_tensors
from shardtune.data.durable import sync_folder
from shardtune.engine.attributes import Attributes
from shardtune.engine.offload import optimizers_of
from shardtune.errors import CheckpointError
from shardtune.parallel.fsdp2 import Weights

MODEL, OPTIMIZERS, ATTRIBUTES, STATE = "model", "optimizers", "attributes", "engine.json"


def save_state(folder: Path, module: nn.Module, weights: Weights, attributes: Attributes) -> None:
    """Write the trained weights, buffers, optimizers, schedules and the user's attributes; every rank calls it.

    Frozen weights beside trained ones are left out: they are loaded from the module's source of weights.
    """
    save_tensors(folder / MODEL, _kept(weights))
    described: dict[str, dict[str, object]] = {"optimizers": {}, "schedules": {}}
    for name, optimizer in optimizers_of(module).items():
        moments, described["optimizers"][name] = optimizer_tensors(optimizer, _names(weights), weights)
        save_tensors(folder / OPTIMIZERS / name, moments)
    for name, schedule in _schedules(module).items():
        described["schedules"][name] = schedule.state_dict()
    described["attributes"] = {**attributes.save(folder / ATTRIBUTES)}
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{STATE}.partial"
        partial.write_text(json.dumps(described, default=_number))
        sync_tree(folder)
        partial.replace(folder / STATE)  # last: it marks the folder as complete
        sync_folder(folder)
    if dist.is_initialized():
        dist.barrier()


def is_saved_state(folder: Path) -> bool:
    """Whether a folder is one that `save_state` wrote."""
    return (folder / STATE).is_file()


def load_state(folder: Path, module: nn.Module, weights: Weights, attributes: Attributes) -> None:
    """Load what `save_state` wrote, on any number of ranks; every rank calls it.

    Raises:
        CheckpointError: it does not exist, or belongs to another module or other optimizers.
    """
    try:
        described = json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"there is no saved state: {error}",
            where=str(folder),
            remedy="give a folder that engine.save() or save_pretrained() wrote",
        ) from error
    optimizers = optimizers_of(module)
    if described["optimizers"].keys() != optimizers.keys():
        raise CheckpointError(
            f"it has the optimizers {sorted(described['optimizers'])}, the module {sorted(optimizers)}",
            where=str(folder),
            remedy="make the same optimizers, under the same names, in on_weights_materialized",
        )
    tensors = _kept(weights)
    load_tensors(folder / MODEL, tensors)
    weights.take({**weights.tensors(), **tensors} if len(tensors) < len(weights.tensors()) else tensors)
    for name, optimizer in optimizers.items():
        load_optimizer_tensors(
            folder / OPTIMIZERS / name, optimizer, _names(weights), described["optimizers"][name], weights
        )
    for name, schedule in _schedules(module).items():
        if name in described["schedules"]:
            schedule.load_state_dict(described["schedules"][name])
    attributes.load(folder / ATTRIBUTES, described.get("attributes", {}))


def _kept(weights: Weights) -> dict[str, torch.Tensor]:
    trained = weights.trainable()
    return {
        name: tensor
        for name, tensor in weights.tensors().items()
        if not trained or name in trained or name not in weights.parameters
    }


def _names(weights: Weights) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in weights.parameters.items()}


def _schedules(module: nn.Module) -> dict[str, torch.optim.lr_scheduler.LRScheduler]:
    return {
        name: value for name, value in vars(module).items() if isinstance(value, torch.optim.lr_scheduler.LRScheduler)
    }


def _number(value: object) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    raise CheckpointError(
        f"the state of a schedule holds a {type(value).__name__}, which cannot be saved",
        where="engine.save()",
        remedy="keep it out of the module's attributes, or use a schedule of numbers",
    )
