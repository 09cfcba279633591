"""Shapes of results by the shapes that an operation takes, so that the second of two alike layers costs little.

A step of a large model is a hundred thousand operations, and almost all of them repeat earlier ones: in other layers,
in other chunks of the head, in the second micro-batch. For each of them torch would take some 0.2 ms.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardtune.parallel.torch_private.operations import FakeTensor, FakeTensorMode, schema_of, unset_fake_temporarily
from shardtune.parallel.torch_private.tensors import storage_identity

CPU = torch.device("cpu")
_REST = frozenset(("aten::set_", "aten::resize_", "aten::lift", "aten::lift_fresh", "aten::_local_scalar_dense"))


@dataclass(frozen=True, slots=True)
class _Same:
    """The result is the operation's tensor of this place."""

    place: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """The result is a tensor.

    Attributes:
        dtype: of it.
        size: of it.
        stride: of it.
        offset: into its memory.
        place: of the operation's tensor whose memory it is; None: its own.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    place: int | None

    @property
    def nbytes(self) -> int:
        """Of memory that holds it alone."""
        if 0 in self.size:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


_Result = _Same | _Tensor | None
_UNKNOWN = object()


class KnownShapes:
    """Computes operations under `FakeTensorMode`, by torch the first time and from what is known after that.

    What depends on values, changes a shape in place, or is no operation of torch's own is left to torch each time.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Any] = {}

    def compute(self, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation on tensors at least one of which has no memory."""
        key: list[object] = [func]
        tensors: list[torch.Tensor] = []
        if not _repeats(func) or not _describe((args, kwargs), key, tensors):
            return func(*args, **kwargs)
        if _has_aliases(func) and any(type(tensor) is not FakeTensor for tensor in tensors):
            return func(*args, **kwargs)
        found = self._known.get(tuple(key), _UNKNOWN)
        if found is _UNKNOWN:
            result = func(*args, **kwargs)
            self._known[tuple(key)] = _results(result, tensors)
            return result
        if found is None:
            return func(*args, **kwargs)
        kind, results = found
        with unset_fake_temporarily():
            made = [_make(mode, each, tensors) for each in results]
        return made[0] if kind is None else kind(made)


@functools.cache
def _repeats(operation: Any) -> bool:
    """Whether equal shapes give equal shapes."""
    name = schema_of(operation).name
    left_out = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
    return name.startswith("aten::") and name not in _REST and not any(tag in operation.tags for tag in left_out)


@functools.cache
def _has_aliases(operation: Any) -> bool:
    """Whether results are views of what it takes, or the same tensors."""
    return any(argument.alias_info is not None for argument in schema_of(operation).arguments)


def _describe(value: Any, key: list[object], tensors: list[torch.Tensor]) -> bool:
    """Add what a result's shape depends on to `key`, and the tensors; returns False where that is not all."""
    if isinstance(value, torch.Tensor):
        fake = type(value) is FakeTensor
        if fake and value.constant is not None:
            return False
        if not fake and (type(value) is not torch.Tensor or value.is_meta):
            return False
        if value.layout is not torch.strided or value.is_complex():
            return False
        key += (
            value.fake_device if fake else None,
            value.dtype,
            tuple(value.shape),
            value.stride(),
            value.storage_offset(),
        )
        tensors.append(value)
        return True
    if isinstance(value, list | tuple):
        key += (type(value), len(value))
        return all(_describe(each, key, tensors) for each in value)
    if isinstance(value, dict):
        key += (dict, *value)
        return all(_describe(each, key, tensors) for each in value.values())
    if value is None or isinstance(value, _PLAIN):
        key += (type(value), value)
        return True
    return False


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _results(result: Any, tensors: Sequence[torch.Tensor]) -> tuple[type | None, list[_Result]] | None:
    """What a result is, by what the operation took; None where that says too little."""
    kind = type(result) if type(result) in (list, tuple) else None
    found: list[_Result] = []
    own: set[int] = set()
    for value in result if kind else [result]:
        if value is None:
            found.append(None)
            continue
        if type(value) is not FakeTensor or value.fake_device != CPU or value.constant is not None:
            return None
        same = [place for place, tensor in enumerate(tensors) if tensor is value]
        if same:
            found.append(_Same(same[0]))
            continue
        storage = value.untyped_storage()
        shared = [place for place, tensor in enumerate(tensors) if _is_of(tensor, storage)]
        place = shared[0] if shared else None
        each = _Tensor(value.dtype, tuple(value.shape), value.stride(), int(value.storage_offset()), place)
        if place is None:
            if storage.nbytes() != each.nbytes or each.offset or storage_identity(storage) in own:
                return None
            own.add(storage_identity(storage))
        found.append(each)
    return kind, found


def _is_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    return storage_identity(tensor.untyped_storage()) == storage_identity(storage)


def _make(mode: FakeTensorMode, each: _Result, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if each is None:
        return None
    if isinstance(each, _Same):
        return tensors[each.place]
    if each.place is None:
        empty = torch.empty_strided(each.size, each.stride, dtype=each.dtype, device="meta")
    else:
        storage = tensors[each.place].untyped_storage()
        empty = torch.empty(0, dtype=each.dtype, device="meta").set_(storage, each.offset, each.size, each.stride)
    return FakeTensor(mode, empty, CPU)
