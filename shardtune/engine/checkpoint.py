"""Saves trained weights, optimizers and schedules in a folder that any layout of an engine can load."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardtune.checkpoint.atomic import sync_tree
from shardtune.checkpoint.dcp import load_tensors, save_tensors, stored_names
from shardtune.checkpoint.optimizer import load_optimizer_tensors, optimizer_tensors
from shardtune.checkpoint.tensor_reader import Together
from shardtune.data.durable import sync_folder
from shardtune.engine.attributes import Attributes
from shardtune.engine.offload import optimizers_of
from shardtune.errors import CheckpointError
from shardtune.parallel.weights import Weights

MODEL, OPTIMIZERS, ATTRIBUTES, STATE = "model", "optimizers", "attributes", "engine.json"


def trained_names(module: nn.Module, weights: Weights) -> set[str]:
    """The names of the parameters that are trained now, and of those for which an optimizer has a state already."""
    states = {parameter for optimizer in optimizers_of(module).values() for parameter in optimizer.state}
    return {name for name, parameter in weights.parameters.items() if parameter in states} | weights.trainable().keys()


def save_state(
    folder: Path, module: nn.Module, weights: Weights, attributes: Attributes, trained: Collection[str]
) -> None:
    """Write the trained weights, buffers, optimizers, schedules and the user's attributes; every rank calls it.

    Weights that were never trained are left out beside others: they are loaded from the module's source of weights.

    Args:
        folder: to write into.
        module: with the optimizers.
        weights: of the module.
        attributes: the user's.
        trained: names of the parameters that are trained, or have been.
    """
    save_tensors(folder / MODEL, _kept(weights, trained))
    described: dict[str, Mapping[str, object]] = {}
    optimizers: dict[str, object] = {}
    for name, optimizer in optimizers_of(module).items():
        moments, optimizers[name] = optimizer_tensors(optimizer, _names(weights), weights)
        save_tensors(folder / OPTIMIZERS / name, moments)
    described |= {"optimizers": optimizers, "schedules": dict.fromkeys(_schedules(module))}
    described["attributes"] = {**attributes.save(folder / ATTRIBUTES)}
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{STATE}.partial"
        partial.write_text(json.dumps(described))
        sync_tree(folder)
        partial.replace(folder / STATE)  # last: it marks the folder as complete
        sync_folder(folder)
    if dist.is_initialized():
        dist.barrier()


def is_saved_state(folder: Path) -> bool:
    """Whether a folder is one that `save_state` wrote."""
    return (folder / STATE).is_file()


def load_state(
    folder: Path, module: nn.Module, weights: Weights, attributes: Attributes, trained: Collection[str]
) -> set[str]:
    """Load what `save_state` wrote, on any number of ranks; every rank calls it.

    Args:
        folder: to read.
        module: with the optimizers.
        weights: of the module.
        attributes: the user's.
        trained: as of `save_state`; the folder has to have these.

    Returns:
        The names of the parameters in the folder.

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
    if described["schedules"].keys() != _schedules(module):
        raise CheckpointError(
            f"it has the schedules {sorted(described['schedules'])}, the module {sorted(_schedules(module))}",
            where=str(folder),
            remedy="make the same schedules, under the same names, in on_weights_materialized",
        )
    everything = weights.tensors()
    stored = Together(None).by_first(lambda: stored_names(folder / MODEL))
    tensors = _kept(weights, trained) | {name: everything[name] for name in stored if name in everything}
    load_tensors(folder / MODEL, tensors)
    weights.take({**everything, **tensors})
    for name, optimizer in optimizers.items():
        load_optimizer_tensors(
            folder / OPTIMIZERS / name, optimizer, _names(weights), described["optimizers"][name], weights
        )
    attributes.load(folder / ATTRIBUTES, described.get("attributes", {}))
    return {name for name in stored if name in weights.parameters}


def _kept(weights: Weights, trained: Collection[str]) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in weights.tensors().items()
        if not trained or name in trained or name not in weights.parameters
    }


def _names(weights: Weights) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in weights.parameters.items()}


def _schedules(module: nn.Module) -> set[str]:
    """The names of the schedules that are attributes of a module; their states are saved as those of other objects."""
    return {name for name, value in vars(module).items() if isinstance(value, torch.optim.lr_scheduler.LRScheduler)}
