"""What travels between the caller and its ranks: pickled by value where the other side cannot import it."""

from __future__ import annotations

import io
import pickle
from typing import Any, TypeVar

import cloudpickle
import torch
from torch.distributed.tensor import DTensor

from shardtune.parallel.torch_private import tree_map

T = TypeVar("T")


def pack(value: object) -> bytes:
    """Bytes of which `unpack` makes the value again, in any process that has the same packages."""
    buffer = io.BytesIO()
    cloudpickle.CloudPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def pack_for_twin(value: object) -> bytes:
    """The same for a process that runs the same script: its classes are found there by name, and are the same."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # what has no name there: functions inside functions, say
        return pack(value)


def unpack(packed: bytes) -> Any:
    """The value; to be used on what came from one's own ranks or caller alone."""
    return pickle.loads(packed)


def detached(value: T, *, copy: bool) -> T:
    """A method's result as it is handed to the caller: tensors whole, without a graph, in host memory.

    Every rank calls it, as a sharded tensor is gathered from all.

    Args:
        copy: also copy what is in host memory already, so that the caller's does not change with the module's.
    """

    def taken(leaf: object) -> object:
        if isinstance(leaf, DTensor):
            leaf = leaf.full_tensor()
        return leaf.detach().to("cpu", copy=copy) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(taken, value)
