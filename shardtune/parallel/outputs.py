"""The tensors in what a module returns, through which gradients come back to its sharded weights.

Sharding has to see each of them. FSDP looks into dicts, lists, tuples and dataclasses alone; a class of a user's may be
anything: `class Output: def __init__(self, loss, logits)`, a distribution of torch, an object inside another one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardtune.parallel.torch_private.operations import tree_map
from shardtune.parallel.torch_private.tensors import base_of

GROUPS = (list, tuple, set, frozenset, deque)
NOT_ENTERED = (str, bytes, int, float, type, ModuleType, nn.Module)
"""Values without tensors of an output; modules hold weights instead."""


def tensors_in(
    value: object, *, hidden: bool = False, bases: bool = False, constants: bool = False
) -> list[torch.Tensor]:
    """The tensors with a gradient in a module's inputs or outputs, in their order.

    Args:
        value: what the module takes or returns.
        hidden: only those that FSDP2 does not find by itself.
        bases: those, too, that these or others are views of (`out.flatten()`, a `Linear` with a bias): a later change
            of a view in place (`out *= mask`) takes the gradient past the view itself and its hooks.
        constants: those without a gradient, too.
    """
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    waiting: list[tuple[object, bool]] = [(value, False)]
    while waiting:
        item, is_hidden = waiting.pop()
        if item is None or isinstance(item, NOT_ENTERED) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found += [item] if (constants or item.requires_grad) and (is_hidden or not hidden) else []
            base = base_of(item) if bases else None
            found += [base] if base is not None and base.grad_fn is not None else []
            continue
        inside: list[object] = []
        hides = is_hidden
        if isinstance(item, Mapping):
            inside, hides = list(item.values()), is_hidden or not isinstance(item, dict)
        elif isinstance(item, GROUPS):
            inside, hides = list(item), is_hidden or not isinstance(item, list | tuple)
        elif dataclasses.is_dataclass(item):
            inside = [getattr(item, field.name) for field in dataclasses.fields(item)]
        state: Any = object.__getstate__(item)  # its attributes, those in `__slots__` included
        attributes = [values for values in (state if isinstance(state, tuple) else (state,)) if values is not None]
        others = [attribute for values in attributes for attribute in values.values()]
        waiting += [(one, True) for one in reversed(others)]
        waiting += [(one, hides) for one in reversed(inside)]
    return found


def with_tensors(value: object, others: Mapping[int, torch.Tensor]) -> object:
    """What a module returns, with other tensors in the places of some; an object that holds one is copied.

    Args:
        value: what the module returns.
        others: by the id of the tensor that each replaces.
    """
    copies: dict[int, object] = {}

    def replaced(item: object) -> object:
        if isinstance(item, torch.Tensor):
            return others.get(id(item), item)
        if item is None or isinstance(item, (*NOT_ENTERED, set, frozenset)):
            return item
        if id(item) in copies:
            return copies[id(item)]
        if all(id(tensor) not in others for tensor in tensors_in(item, constants=True)):
            return item
        copies[id(item)] = made = copy.copy(item)
        state: Any = object.__getstate__(item)
        for values in state if isinstance(state, tuple) else (state,):
            for name, attribute in (values or {}).items():
                object.__setattr__(made, name, tree_map(replaced, attribute))
        return made

    return tree_map(replaced, value)
