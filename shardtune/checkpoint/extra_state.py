"""State of a module beside its parameters and buffers, by torch's `get_extra_state` and `set_extra_state`, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shardtune.errors import CheckpointError, ModelError


def extra_state(model: nn.Module) -> dict[str, Any]:
    """What modules return from `get_extra_state`, by module name; without those that return None.

    Raises:
        ModelError: it is no JSON value, which would come back as another one.
    """
    found = {name: module.get_extra_state() for name, module in _with_state(model)}
    found = {name: value for name, value in found.items() if value is not None}
    for name, value in found.items():
        if not _is_json(value):
            raise ModelError(
                f"get_extra_state of {name or 'the model'} ({type(model.get_submodule(name)).__name__}) returned a "
                f"{type(value).__name__} that is not the same as JSON, as which checkpoints hold it",
                where=name or type(model).__name__,
                remedy="return dictionaries with names, lists, numbers and texts; keep tensors in buffers "
                "(register_buffer)",
            )
    return found


def set_extra_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Pass modules what `extra_state` returned.

    Raises:
        CheckpointError: the model has no such module.
    """
    modules = dict(_with_state(model))
    for name, value in state.items():
        if name not in modules:
            raise CheckpointError(
                f"the checkpoint has extra state of the module {name!r}, which the model has not",
                where=name,
                remedy="load it with the class that wrote it, with get_extra_state and set_extra_state",
            )
        modules[name].set_extra_state(value)


def _with_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def _is_json(value: object) -> bool:
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError, RecursionError):
        return False
