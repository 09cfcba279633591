"""Computes a half-precision model in fp32 for a while, to find differences that are less than half precision rounds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.distributed import DistError
from torch.overrides import TorchFunctionMode

from shardtune.errors import lost_a_peer
from shardtune.parallel.half_products import HALF
from shardtune.parallel.torch_private.fsdp2 import casts_inputs
from shardtune.parallel.torch_private.operations import CALLED_THROUGH, tree_map_only

T = TypeVar("T")
_inside = ContextVar("inside", default=False)
_TENSOR: Any = torch.Tensor
_TO_HALF = (_TENSOR.half, _TENSOR.bfloat16)
_OF_ATTRIBUTES = frozenset(("__get__", "__set__", "__delete__"))
_SHARDING = "torch.distributed."
"""Modules that gather weights."""


@contextmanager
def computing_in_fp32() -> Iterator[None]:
    """Inside, a model's operations take fp32 where its weights are in half precision, and round nothing to that.

    Weights are converted at each operation that reads them, so that no second model is held. Gathering them is left as
    it is, and code that is compiled is called as it was written. For forwards without gradients.
    """
    before = _inside.set(True)
    try:
        with torch.compiler.set_stance("force_eager"), _InFp32():
            yield
    finally:
        _inside.reset(before)


def computes_in_fp32() -> bool:
    """Whether this is inside of `computing_in_fp32`, where what has to be compiled is not at hand."""
    return _inside.get()


def in_fp32(compute: Callable[[], T], dtype: torch.dtype) -> tuple[T, torch.dtype]:
    """What a model in half precision computes in fp32, or in half precision where its code does not take fp32.

    Args:
        compute: calls the model.
        dtype: in which it computes; full precision stays as it is.

    Returns:
        The result, and the dtype it was computed in.
    """
    if dtype not in HALF:
        return compute(), dtype
    try:
        with computing_in_fp32():
            return compute(), torch.float32
    except Exception as error:  # a model's code is third-party and may raise anything
        if not may_be_the_models(error):
            raise
        return compute(), dtype


def may_be_the_models(error: Exception) -> bool:
    """Whether something follows about the model from an exception: not from a lack of memory or a lost rank."""
    return not isinstance(error, (torch.OutOfMemoryError, DistError)) and not lost_a_peer(error)


class _InFp32(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs, name, caller = kwargs or {}, func.__name__, _caller(sys._getframe(1))
        if func is _TENSOR.to and casts_inputs(caller.f_code):
            return args[0]
        if name in _OF_ATTRIBUTES or caller.f_globals.get("__name__", "").startswith(_SHARDING):
            return func(*args, **kwargs)
        if func in _TO_HALF:
            return args[0].float()
        if func is F.embedding:  # a row for each token, of a large table
            return _float(func(*args, **kwargs))
        out = {key: value for key, value in kwargs.items() if key == "out"}
        kept = 1 if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) else 0
        return func(*args[:kept], *map(_in_fp32, args[kept:]), **{key: _in_fp32(kwargs[key]) for key in kwargs} | out)


def _caller(frame: FrameType) -> FrameType:
    """The code that calls an operation, beyond other modes."""
    while frame.f_back is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_globals.get("__name__") in CALLED_THROUGH
    ):
        frame = frame.f_back
    return frame


def _in_fp32(value: Any) -> Any:
    """An argument of an operation, with fp32 in the place of half precision."""
    if isinstance(value, torch.dtype):
        return torch.float32 if value in HALF else value
    if isinstance(value, list | tuple | dict):
        return tree_map_only((torch.Tensor, torch.dtype), _in_fp32, value)
    return _float(value)


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF else value
