"""Tensors: their memory, versions and hooks, and the parts of DTensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard


def changes_in_place(tensor: torch.Tensor) -> int:
    """How many times a tensor has been changed in place; the public names only raise where that matters."""
    return tensor._version


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been changed in place; of one that was made in inference mode this is not counted."""
    return 0 if tensor.is_inference() else tensor._version


def read_whole_numbers() -> None:
    """Let `float`, `item` and conditions give the number of a whole DTensor; torch gives that of this rank's part.

    A norm or a sum of a sharded weight is a part on each rank until it is added up. All ranks have to read it.
    """
    read = torch.ops.aten._local_scalar_dense.default
    DTensor._op_dispatcher._custom_op_handlers[read] = _whole_number


def _whole_number(_op: object, args: tuple[DTensor], _kwargs: object) -> object:
    with torch.no_grad():
        return args[0].full_tensor().item()


def num_gradient_hooks(tensor: torch.Tensor) -> int:
    """How often `register_hook` and `register_post_accumulate_grad_hook` were called on a tensor."""
    return num_value_hooks(tensor) + len(tensor._post_accumulate_grad_hooks or ())


def num_value_hooks(tensor: torch.Tensor) -> int:
    """How often `register_hook` was called on a tensor."""
    return len(tensor._backward_hooks or ())


StridedShard = _StridedShard
"""The placement of a dimension that is cut among tensor ranks first and among shards after; no `Shard`."""


def storage_identity(storage: torch.UntypedStorage) -> int:
    """Equal for the same memory, which several Python objects may stand for; `data_ptr` is 0 on the meta device."""
    return storage._cdata


base_of: Callable[[torch.Tensor], torch.Tensor | None] = cast(Any, torch.Tensor)._base.__get__
"""The tensor that another is a view of, if it is one."""


def local_part(tensor: DTensor) -> torch.Tensor:
    """The tensor itself that this rank has; `to_local` gives a view, and another one with gradients."""
    return tensor._local_tensor


def quieten_redistribution() -> None:
    """No warning where a part of a part is gathered in two steps: that is seldom (exports, probes), and meant."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that transforms of `torch.func` wrap, which alone has memory; there is no public way to it."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor
