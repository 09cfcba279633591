"""Pickling between the caller and its ranks: by value what the other side cannot import."""

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
    """Serialise a value for `unpack` in any process with the same packages."""
    buffer = io.BytesIO()
    cloudpickle.CloudPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def pack_for_twin(value: object) -> bytes:
    """The same for a process that runs the same script, where classes are found by name."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # not importable there, for example functions inside functions
        return pack(value)


def unpack(packed: bytes) -> Any:
    """Deserialise a value; only for data from this engine's ranks or caller."""
    return pickle.loads(packed)


def detached(value: T, *, copy: bool) -> T:
    """A method's result in the form the caller receives: whole tensors without a graph, in host memory.

    Every rank calls it, as a sharded tensor is gathered from all.

    Args:
        copy: also copy what is in host memory already, so that the caller's does not change with the module's.
    """

    def taken(leaf: object) -> object:
        if isinstance(leaf, DTensor):
            leaf = leaf.full_tensor()
        return leaf.detach().to("cpu", copy=copy) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(taken, value)
