"""The tensors in what a module returns, through which gradients come back to its sharded weights.

Sharding has to see each of them. FSDP looks into dicts, lists, tuples and dataclasses alone; a class of a user's may be
anything: `class Output: def __init__(self, loss, logits)`, a distribution of torch, an object inside another one.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

GROUPS = (list, tuple, set, frozenset, deque)
NOT_ENTERED = (str, bytes, int, float, type, ModuleType, nn.Module)
"""Values without tensors of an output; modules hold weights instead."""


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors with a gradient in a module's inputs or outputs."""
    return [tensor for tensor, _ in _walk(value, set(), hidden=False)]


def hidden_tensors(value: object) -> list[torch.Tensor]:
    """Those that FSDP2 does not find by itself."""
    return [tensor for tensor, hidden in _walk(value, set(), hidden=False) if hidden]


def _walk(value: object, seen: set[int], hidden: bool) -> Iterator[tuple[torch.Tensor, bool]]:
    if value is None or isinstance(value, NOT_ENTERED) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value, hidden
        return
    if isinstance(value, Mapping):
        inside, hidden_inside = list(value.values()), hidden or not isinstance(value, dict)
    elif isinstance(value, GROUPS):
        inside, hidden_inside = list(value), hidden or not isinstance(value, list | tuple)
    elif dataclasses.is_dataclass(value):
        inside, hidden_inside = [getattr(value, field.name) for field in dataclasses.fields(value)], hidden
    else:
        inside, hidden_inside = [], hidden
    for item in inside:
        yield from _walk(item, seen, hidden_inside)
    for item in _attributes(value):
        yield from _walk(item, seen, hidden=True)


def _attributes(value: object) -> Iterator[object]:
    """The values of an object's attributes, those in `__slots__` included."""
    state: Any = object.__getstate__(value)
    for attributes in state if isinstance(state, tuple) else (state,):
        if attributes is not None:
            yield from attributes.values()
