"""Counts the memory of operations that are computed without any: only the shapes of their results exist."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, has_torch_function_unary

from shardtune.models.flex_documents import flex, shapes
from shardtune.parallel.torch_private.graph import backward
from shardtune.parallel.torch_private.operations import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    schema_of,
    tree_map_only,
    unset_fake_temporarily,
    without_torch_function,
)
from shardtune.parallel.torch_private.tensors import local_part, storage_identity
from shardtune.parallel.weights import local
from shardtune.run.plan.known_shapes import KnownShapes

CPU = torch.device("cpu")
GATHERED = "gathered weights"
SHARDING_OPERATIONS = "fsdp::all_gather"
MOST_NUMBERS = 2**20
"""More than a micro-batch has tokens: no later shape depends on so many, except those that are given, of images."""
HELD = (FakeTensor, torch.Tensor, nn.Parameter)
"""Types whose storage is memory; that of a DTensor only describes the whole."""


class Ledger(TorchDispatchMode):
    """Inside `counting()`, operations on tensors without memory are computed as shapes, and what they would hold is
    counted storage by storage, with the time of each allocation and release.

    Operations whose inputs all have values (positions, lengths of documents, which rows are targets) are computed, as
    later shapes depend on them; but not more than `MOST_NUMBERS` that are made of fewer, such as the random bits that
    round states. A number that is read from a tensor without values is taken to be 1.

    Args:
        exact: the truth value that is read from a tensor without values: whether weights lose nothing in the precision
            that is computed in, which decides how many copies of them there are.
        known: shapes, of an earlier ledger too; None: none yet.

    Attributes:
        phase: the category of what is allocated from now on.
    """

    def __init__(self, *, exact: bool = True, known: KnownShapes | None = None) -> None:
        super().__init__()
        self._exact = exact
        self._known = known or KnownShapes()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.phase = "weights"
        self._live: dict[int, int] = {}  # storage to its entry
        self._categories: list[str] = []  # of entries
        self._events: list[tuple[int, int]] = []  # entry, its bytes from then on

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is allocated inside."""
        storages: Any = torch.UntypedStorage
        resize = storages.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> object:
            result = resize(storage, size)
            entry = self._live.get(storage_identity(storage))
            if entry is not None:
                self._events.append((entry, size))
            return result

        storages.resize_ = counted  # FSDP2 frees and takes the memory of gathered weights by it
        try:
            with self._mode, self:
                yield
        finally:
            storages.resize_ = resize

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func is _DEVICE_OF:  # torch reads it for about every other operation
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        with without_torch_function():  # here a tensor's device is the true one
            return self._compute(func, args, kwargs or {})

    def _compute(self, func: Any, args: Any, kwargs: Any) -> object:
        tensors = list(_tensors((*args, *kwargs.values())))
        empty = any(isinstance(value, FakeTensor) or value.is_meta for value in tensors)
        name = _name(func)
        if empty and name in _READ:
            return self._exact if tensors[0].dtype == torch.bool else 1
        dtype = kwargs.get("dtype")
        whole_numbers = (dtype is not None and not dtype.is_floating_point) or "arange" in name
        if not empty and (tensors or whole_numbers) and not _are_many(tensors):
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
        else:
            result = self._known.compute(self._mode, *_cheaper(name, func, args, kwargs))
        category = GATHERED if name.startswith(SHARDING_OPERATIONS) else self.phase
        for value in _tensors((result,)):
            if isinstance(value, DTensor):  # what it computed is computed where this mode is off
                value = local_part(value)
            if type(value) in HELD and not (value.is_meta and not isinstance(value, FakeTensor)):
                self._add(value.untyped_storage(), category)
        return result

    def _add(self, storage: torch.UntypedStorage, category: str) -> None:
        key = storage_identity(storage)
        if key in self._live:
            return
        entry = self._live[key] = len(self._categories)
        self._categories.append(category)
        self._events.append((entry, storage.nbytes()))
        weakref.finalize(storage, self._release, key, entry).atexit = False

    def _release(self, key: int, entry: int) -> None:
        if self._live.get(key) == entry:
            del self._live[key]
        self._events.append((entry, 0))

    def label(self, tensors: Iterable[torch.Tensor | None], category: str, *, unless: Sequence[str] = ()) -> None:
        """Assign the memory of tensors to a category, for all of its life; but not what is of one of `unless`."""
        for tensor in tensors:
            if tensor is None:
                continue
            held = local(tensor.detach())
            entry = self._live.get(storage_identity(held.untyped_storage()))
            if entry is not None and self._categories[entry] not in unless:
                self._categories[entry] = category

    def changes(self) -> Iterator[tuple[str, int]]:
        """What was allocated and released, in order: a category, and bytes more than before, or fewer."""
        held: dict[int, int] = {}
        for entry, size in self._events:
            change = size - held.get(entry, 0)
            held[entry] = size
            if change:
                yield self._categories[entry], change

    def held(self) -> dict[str, int]:
        """Bytes by category now."""
        sizes = dict(self._events)
        found: dict[str, int] = {}
        for entry, size in sizes.items():
            if size:
                found[self._categories[entry]] = found.get(self._categories[entry], 0) + size
        return found


class AsOnCuda(TorchFunctionMode):
    """Inside, tensors on the CPU report a CUDA device, so that code which chooses by the device takes the GPU's way.

    They stay on the CPU, and so does what is made for their device. torch computes shapes of CUDA tensors only where
    there is a driver.
    """

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func == _IS_CUDA:
            return True
        if func == _DEVICE and not _is_called_by("torch.distributed."):  # FSDP2 requires shards in host memory there
            return _CUDA
        if func == flex:  # a compiled kernel, which sees no shapes
            func = shapes
        if func == torch.Tensor.backward:
            with self:  # a mode is off while it handles a function, and this one runs checkpointed layers again
                return backward(*args, **(kwargs or {}))
        kwargs = {name: _back(value) for name, value in kwargs.items()} if kwargs else {}
        return func(*map(_back, args), **kwargs)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """`AsOnCuda`, for tensors without memory too, whose class has a `device` of its own that no mode sees; and with
    FlashAttention: to choose between that and cuDNN, torch 2.15 looks for a GPU."""
    classes: Any = FakeTensor
    own = classes.device
    chosen = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)

    def device(tensor: FakeTensor) -> torch.device:
        # The experts of transformers have kernels for a GPU, whose shapes torch computes for a GPU alone; FSDP2 has
        # streams of a GPU.
        outside = _is_called_by("transformers.", "torch.distributed.")
        return _CUDA if has_torch_function_unary(tensor) and not outside else own.fget(tensor)

    classes.device = property(device)
    try:
        with AsOnCuda():
            yield
    finally:
        classes.device = own
        torch.backends.cuda.enable_cudnn_sdp(chosen)


def _is_called_by(*packages: str) -> bool:
    """Whether the caller of the function that calls this one is a module of some packages."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith(packages)


def _back(value: Any) -> Any:
    """An argument with the CPU in the place of the CUDA device."""
    if isinstance(value, torch.device):
        return CPU if value == _CUDA else value
    return tree_map_only(torch.device, _back, value) if isinstance(value, list | tuple | dict) else value


@functools.cache
def _name(operation: Any) -> str:
    """The name of an operation, without that of its overload."""
    return schema_of(operation).name


def _are_many(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether many whole numbers are made of fewer: of [3, 1] and [4] twelve."""
    sizes: list[int] = []
    for tensor in tensors:
        sizes = [max(pair) for pair in zip_longest(sizes, tensor.shape[::-1], fillvalue=1)]
    number = math.prod(sizes)
    return number > MOST_NUMBERS and all(each.dtype == torch.int64 and each.numel() < number for each in tensors)


def _cheaper(name: str, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The same operation in a form whose shapes torch has at hand, where it takes a millisecond for this one.

    Those are views of products (`_unsafe_view`, which its cache leaves out), memory for a parameter on the meta device,
    of which it would first make a fake tensor, and products of groups, whose shapes torch has for bf16 alone.
    """
    if name == "aten::_grouped_mm" and args[0].dtype != torch.bfloat16:
        return torch.ops.aten.empty.memory_format, (_grouped_size(*args, **kwargs),), {"dtype": args[0].dtype}
    if name == "aten::histc" and not args[0].is_floating_point():  # of whole numbers on a GPU alone
        bins = args[1] if len(args) > 1 else kwargs.get("bins", 100)
        return torch.ops.aten.empty.memory_format, ([bins],), {"dtype": args[0].dtype}
    if name == "aten::_unsafe_view":
        return torch.ops.aten.view.default, args, kwargs
    if name == "aten::empty_like" and "device" in kwargs and "memory_format" not in kwargs:
        (like,) = args
        if type(like) in (torch.Tensor, nn.Parameter) and like.is_contiguous():
            kwargs = {"dtype": like.dtype, **kwargs}
            return torch.ops.aten.empty.memory_format, (list(like.shape),), kwargs
    return func, args, kwargs


def _grouped_size(one: torch.Tensor, other: torch.Tensor, offs: torch.Tensor | None = None, **_: object) -> list[int]:
    """The shape of a product of groups: rows or columns in groups, or, with matrices of two dimensions, the sum."""
    matrix = [one.shape[-2], other.shape[-1]]
    if one.ndim == other.ndim:
        return [len(one if offs is None else offs), *matrix]
    return matrix


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors among an operation's arguments or results, and in their lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


_DEVICE_OF: Any = torch.ops.prim.device.default
_READ = ("aten::_local_scalar_dense", "aten::is_nonzero")
_CUDA = torch.device("cuda", 0)
_IS_CUDA: Any = torch.Tensor.is_cuda.__get__  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
_DEVICE: Any = torch.Tensor.device.__get__
