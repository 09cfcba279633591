"""Attributes that a user's class sets on its module (counters, histories, averages of weights): saved with the weights.

They are stored as JSON and tensors, never pickled. What cannot be stored so, or differs between ranks, is named once.
Schedules, wherever they are, are objects with a state here. Optimizers are stored elsewhere, and keep their places.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardtune.checkpoint.dcp import load_tensors, save_tensors
from shardtune.engine.extra_state import extra_states
from shardtune.errors import CheckpointError
from shardtune.parallel.ranks import Ranks

logger = logging.getLogger(__name__)

Described = dict[str, Any]
"""A value as JSON: `value`, `items` of a list or tuple, `pairs` of a dict, `state` of an object, a `tensor`, or the
place of an `optimizer`."""
LIBRARY = ("_shardtune", "_output_capturing_hooks_installed", "_compiled_call", "_cache")
"""Beginnings of the names of attributes that are not the user's."""
SCALARS = (bool, int, float, str, type(None))


@runtime_checkable
class _Stateful(Protocol):
    """An object that gives its state as a dict, and takes it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class _CannotStore(Exception):
    """The type of a value that is neither JSON nor a tensor."""


class Attributes:
    """The attributes of a module that have been set, or changed, since this object was made.

    Args:
        module: before its `on_weights_materialized`.
        ranks: of the engine.
        is_part: whether a tensor is of this rank's part of a weight, in a shape of its own.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, is_part: Callable[[torch.Tensor], bool]) -> None:
        self._module, self._ranks, self._is_part = module, ranks, is_part
        self._torch = vars(nn.Module()).keys()
        self._before = dict(vars(module))
        self._values = {name: copy.deepcopy(value) for name, value in vars(module).items() if _is_plain(value)}
        self._reported: set[str] = set()
        self._states: list[tuple[_Stateful, dict[str, Any]]] = []

    def _own(self) -> dict[str, object]:
        found: dict[str, object] = dict(extra_states(self._module))
        found |= {
            name: value
            for name, value in vars(self._module).items()
            if name not in self._torch
            and not name.startswith(LIBRARY)
            and not isinstance(value, nn.Module | torch.optim.Optimizer)
            and not (inspect.isroutine(value) or inspect.isclass(value))
            and self._is_changed(name, value)
        }
        return found

    def _is_changed(self, name: str, value: object) -> bool:
        if name in self._values:
            return not _is_plain(value) or value != self._values[name]
        return self._before.get(name) is not value or _has_state(value)

    def save(self, folder: Path) -> dict[str, Described]:
        """Write the tensors; returns all else. Every rank calls it."""
        described: dict[str, Described] = {}
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        left: dict[str, str] = {}
        for name, value in self._own().items():
            found: dict[str, torch.Tensor] = {}
            try:
                described[name], tensors[name] = _describe(value, name, found), found
            except _CannotStore as kind:
                left[name] = f"a {kind}"
        marks = self._ranks.gather({name: _mark(described[name], tensors[name]) for name in described})
        for name in {name for mine in marks for name in mine}:
            if any(mine.get(name) != marks[0].get(name) for mine in marks):
                left[name] = "differs between ranks"
                described.pop(name, None)
        self._report(left)
        save_tensors(folder, {key: tensor for name in described for key, tensor in tensors[name].items()})
        return described

    def _report(self, left: Mapping[str, str]) -> None:
        fresh = {name: why for name, why in left.items() if name not in self._reported}
        self._reported |= fresh.keys()
        if fresh and self._ranks.is_main:
            logger.warning(
                "engine.save() leaves out %s: numbers, text, tensors, and lists and dicts of them are saved, alike on "
                "all ranks; make the rest in on_weights_materialized",
                ", ".join(f"self.{name} ({why})" for name, why in fresh.items()),
            )

    def load(self, folder: Path, described: Mapping[str, Described]) -> None:
        """Set the attributes as they were saved, and others as they were at first; every rank calls it.

        Raises:
            CheckpointError: the module has no tensor to load one into that is sharded, or ranks have parts of one that
                was saved whole.
        """
        targets: dict[str, torch.Tensor] = {}
        self._states.clear()
        extra = extra_states(self._module)
        now = {**vars(self._module), **extra}
        found = {name: self._restore(each, now.get(name), name, targets) for name, each in described.items()}
        if targets:
            load_tensors(folder, targets)
        for name in self._own().keys() & self._values.keys() - described.keys():
            setattr(self._module, name, copy.deepcopy(self._values[name]))
        for name, value in found.items():
            if name not in extra:
                setattr(self._module, name, value)
        for holder, state in self._states:
            holder.load_state_dict(state)

    def _restore(self, each: Described, current: object, place: str, targets: dict[str, torch.Tensor]) -> Any:
        """A value, whose tensors `targets` fill: those that the module has, so that other objects keep them."""
        if "optimizer" in each:
            return current
        if "tensor" in each:
            target = self._target(each, current, place)
            targets[each["tensor"]] = target.detach()
            return target
        if "pairs" in each:
            inner = current if isinstance(current, dict) else {}
            pairs = {key: self._restore(value, inner.get(key), place, targets) for key, value in each["pairs"]}
            if isinstance(current, dict):
                current.clear()
                current.update(pairs)
                return current
            return pairs
        if "items" in each:
            before = list(current) if isinstance(current, list | tuple) else []
            before += [None] * (len(each["items"]) - len(before))
            items = [
                self._restore(value, old, place, targets) for value, old in zip(each["items"], before, strict=False)
            ]
            return tuple(items) if each["tuple"] else items
        if "state" in each:
            if not isinstance(current, _Stateful):
                raise self._lacks(place, "the state of an object")
            self._states.append((current, self._restore(each["state"], current.state_dict(), place, targets)))
            return current
        return each["value"]

    def _target(self, each: Described, current: object, place: str) -> torch.Tensor:
        shape, dtype = tuple(each["shape"]), getattr(torch, each["dtype"])
        if isinstance(current, torch.Tensor) and self._is_part(current):
            self._check_part(current, shape, place)
        if isinstance(current, torch.Tensor) and tuple(current.shape) == shape and current.dtype == dtype:
            return current
        if each["sharded"]:
            raise self._lacks(place, f"a sharded tensor {list(shape)}")
        return torch.empty(shape, dtype=dtype, device=self._ranks.device)

    def _check_part(self, part: torch.Tensor, saved: tuple[int, ...], place: str) -> None:
        """Refuse to put a whole tensor in the place of what ranks have parts of, alike on all ranks."""
        shapes = self._ranks.gather(tuple(part.shape))
        if any(shape != saved for shape in shapes):
            raise CheckpointError(
                f"self.{place} was saved as a whole, {list(saved)}, and here it is a copy of this rank's part of a "
                f"weight ({', '.join(map(str, map(list, shapes)))} on the ranks): fsdp1 divides weights in pieces that "
                "no saved copy is divided in",
                where="engine.load()",
                remedy='load it with executor="fsdp2" or "ddp", or on one rank',
            )

    def _lacks(self, place: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"self.{place} was saved with {what}, and the module has none to load it into",
            where="engine.load()",
            remedy="make it in on_weights_materialized, as it was before",
        )


def _is_plain(value: object) -> bool:
    """Whether a value is JSON's, so that it can be copied and compared."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))  # pyright: ignore[reportArgumentType]
    if type(value) is dict:
        return all(isinstance(key, SCALARS) and _is_plain(item) for key, item in value.items())
    return isinstance(value, SCALARS)


def _has_state(value: object) -> bool:
    """Whether a value can have been changed in its place: a tensor, an object with a state, or what holds one."""
    if isinstance(value, torch.Tensor):
        return not value.is_meta
    if isinstance(value, Mapping):
        return any(map(_has_state, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_state, value))
    return isinstance(value, _Stateful) and not isinstance(value, nn.Module | type)


def _describe(value: object, place: str, tensors: dict[str, torch.Tensor]) -> Described:
    if isinstance(value, SCALARS):
        return {"value": value}
    if isinstance(value, torch.optim.Optimizer):
        return {"optimizer": True}
    if isinstance(value, torch.Tensor):
        tensors[place] = value.detach()
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": place, "shape": [*value.shape], "dtype": dtype, "sharded": isinstance(value, DTensor)}
    if type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        items = [_describe(item, f"{place}.{number}", tensors) for number, item in enumerate(value)]
        return {"items": items, "tuple": isinstance(value, tuple)}
    if isinstance(value, dict) and all(isinstance(key, SCALARS) for key in value):
        return {"pairs": [[key, _describe(item, f"{place}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, _Stateful):
        return {"state": _describe(value.state_dict(), place, tensors)}
    raise _CannotStore(type(value).__name__)


def _mark(described: Described, tensors: Mapping[str, torch.Tensor]) -> str:
    """Equal on all ranks that would save the same; of a sharded tensor each has another part."""
    found = hashlib.sha256(json.dumps(described).encode())
    for tensor in tensors.values():
        if not isinstance(tensor, DTensor):
            found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
