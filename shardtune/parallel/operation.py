"""What an operation of torch does with its operands: changes, fills, reads them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

_TENSOR: Any = torch.Tensor
SET_DATA = _TENSOR.data.__set__
GET_DATA = _TENSOR.data.__get__
GET_GRAD = _TENSOR.grad.__get__
DETACH = _TENSOR.detach
TRANSPOSED = (_TENSOR.T.__get__, _TENSOR.mT.__get__)

DRAWS = frozenset(
    ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_")
)
"""Functions that fill a tensor with random numbers."""
INITS = frozenset(function for name, function in inspect.getmembers(nn.init, inspect.isfunction) if name.endswith("_"))


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """A function of torch, by what it does with its operands.

    Attributes:
        call: the function.
        name: of the function, for example "mul_".
        is_derivative: whether it computes gradients of what has been computed.
        changes: whether it changes its first operand.
        keeps_parts: whether it works on what this rank has: it changes a weight in place, or computes gradients.
        draws: whether it fills its first operand with random numbers.
        is_init: whether it is one of `torch.nn.init`, whose operations inside are not seen one by one.
        sets_data: whether it is `parameter.data = …`.
        is_read: whether it reads an attribute (`x.grad`, `x.data`), or is `detach`; transposes compute.
    """

    call: Callable[..., Any]
    name: str
    is_derivative: bool
    changes: bool
    keeps_parts: bool
    draws: bool
    is_init: bool
    sets_data: bool
    is_read: bool

    @staticmethod
    def of(func: Any) -> Operation:
        """Of a function that a `TorchFunctionMode` gets, looked up among those met before."""
        return _operation(func)


@lru_cache(4096)
def _operation(func: Any) -> Operation:
    name = str(func.__name__)
    is_init = func in INITS
    in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return Operation(
        call=func,
        name=name,
        is_derivative=name in ("grad", "backward"),
        changes=name == "__setitem__"
        or (in_place and name not in ("requires_grad_", "__int__", "__index__", "__invert__")),
        keeps_parts=in_place or name in ("__set__", "__setitem__", "grad", "backward"),
        draws=is_init or name in DRAWS,
        is_init=is_init,
        sets_data=func == SET_DATA,
        is_read=name == "detach" or (name == "__get__" and func not in TRANSPOSED),
    )


def operands(args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
    """The tensors among the arguments of an operation, those in lists included."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


def returned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for the caller of a method, as an operation: modes give a weight whole, and refuse a rank's part."""
    return handle_torch_function(returned, (tensor,), tensor) if has_torch_function((tensor,)) else tensor
