"""Saves trained weights, optimizers and schedules in a folder that any layout of an engine can load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
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
PART, PARTS = "part", ("a", "b")
"""The key of the folder that the tensors of a save are in, and its names, of which saves take turns."""


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
    part = Together(None).by_first(lambda: _new_part(folder))
    save_tensors(folder / part / MODEL, _kept(weights, trained))
    described: dict[str, object] = {PART: part}
    optimizers: dict[str, object] = {}
    for name, optimizer in optimizers_of(module).items():
        moments, optimizers[name] = optimizer_tensors(optimizer, _names(weights), weights)
        save_tensors(folder / part / OPTIMIZERS / name, moments)
    schedules = _schedules(module)
    described |= {"optimizers": optimizers, "schedules": dict.fromkeys(schedules)}
    described["classes"] = _classes(optimizers_of(module) | schedules)
    described["attributes"] = {**attributes.save(folder / part / ATTRIBUTES)}
    Together(None).by_first(lambda: _complete(folder, part, described))


def _new_part(folder: Path) -> str:
    """Make room for the tensors of a save beside those of the last one, which stay until it is complete."""
    part = next(name for name in PARTS if name != _described(folder).get(PART))
    shutil.rmtree(folder / part, ignore_errors=True)  # of a save that was interrupted
    return part


def _complete(folder: Path, part: str, described: Mapping[str, object]) -> None:
    """Let a folder be what was saved in one of its parts, and remove the tensors of the save before."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{STATE}.partial"
    partial.write_text(json.dumps(described))
    sync_tree(folder)
    before = _described(folder)
    partial.replace(folder / STATE)  # from here on it is this save
    sync_folder(folder)
    if before:
        parts = [before[PART]] if PART in before else [MODEL, OPTIMIZERS, ATTRIBUTES]  # of an earlier version
        for name in parts:
            shutil.rmtree(folder / name, ignore_errors=True)


def _described(folder: Path) -> dict[str, Any]:
    """What a saved state has besides tensors; nothing where there is none that can be read."""
    try:
        return json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        return {}


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
    tensors_in = folder / described.get(PART, "")
    optimizers = optimizers_of(module)
    if described["optimizers"].keys() != optimizers.keys():
        raise CheckpointError(
            f"it has the optimizers {sorted(described['optimizers'])}, the module {sorted(optimizers)}",
            where=str(folder),
            remedy="make the same optimizers, under the same names, in on_weights_materialized",
        )
    schedules = _schedules(module)
    if described["schedules"].keys() != schedules.keys():
        raise CheckpointError(
            f"it has the schedules {sorted(described['schedules'])}, the module {sorted(schedules)}",
            where=str(folder),
            remedy="make the same schedules, under the same names, in on_weights_materialized",
        )
    _check_classes(folder, described.get("classes", {}), _classes(optimizers | schedules))
    everything = weights.tensors()
    stored = Together(None).by_first(lambda: stored_names(tensors_in / MODEL))
    tensors = _kept(weights, trained) | {name: everything[name] for name in stored if name in everything}
    load_tensors(tensors_in / MODEL, tensors)
    weights.take({**everything, **tensors})
    for name, optimizer in optimizers.items():
        load_optimizer_tensors(
            tensors_in / OPTIMIZERS / name, optimizer, _names(weights), described["optimizers"][name], weights
        )
    attributes.load(tensors_in / ATTRIBUTES, described.get("attributes", {}))
    return {name for name in stored if name in weights.parameters}


def _kept(weights: Weights, trained: Collection[str]) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in weights.tensors().items()
        if not trained or name in trained or name not in weights.parameters
    }


def _names(weights: Weights) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in weights.parameters.items()}


def _schedules(module: nn.Module) -> dict[str, torch.optim.lr_scheduler.LRScheduler]:
    """The schedules that are attributes of a module, by name; their states are saved as those of other objects."""
    kind = torch.optim.lr_scheduler.LRScheduler
    return {name: value for name, value in vars(module).items() if isinstance(value, kind)}


def _classes(found: Mapping[str, object]) -> dict[str, str]:
    return {name: type(value).__name__ for name, value in found.items()}


def _check_classes(folder: Path, saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Refuse the states of other classes, which would bring their rates and moments; earlier versions named none."""
    for name in own.keys() & saved.keys():
        if saved[name] != own[name]:
            raise CheckpointError(
                f"self.{name} was of the class {saved[name]} and is of {own[name]}, for which its state is not",
                where=str(folder),
                remedy="make one of the same class in on_weights_materialized; for weights alone, load a directory "
                "that engine.save_pretrained() wrote",
            )
