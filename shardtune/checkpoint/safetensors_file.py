"""Safetensors files, read with `pread` and written in place: only the requested bytes enter this process."""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch

from shardtune.data.checksum import Parts, checksum
from shardtune.errors import ModelError, ShardtuneError

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

# A conversion (bf16 on disk, fp32 in memory) goes through a buffer of this many bytes, so that a large tensor
# never exists twice.
_BUFFER_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT = 64
"""Bytes; that of torch's own memory."""


class ReadInParts(ABC):
    """A tensor that is not in memory, of which any block can be read."""

    __slots__ = ()
    dtype: torch.dtype
    shape: tuple[int, ...]

    @abstractmethod
    def read_into(self, target: torch.Tensor, offsets: Sequence[int]) -> None:
        """Fills `target` (any dtype, any device) with the block of its shape that begins at `offsets`."""

    def read(self) -> torch.Tensor:
        """The whole tensor, on the CPU, in its dtype."""
        return self.read_slice((0,) * len(self.shape), self.shape)

    def read_slice(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The block of shape `sizes` whose first element is at `offsets`, on the CPU, in the tensor's dtype."""
        block = torch.empty(tuple(sizes), dtype=self.dtype)
        self.read_into(block, offsets)
        return block


@dataclass(frozen=True, slots=True)
class StoredTensor(ReadInParts):
    """The place of a tensor on disk.

    Attributes:
        start: the first byte of its data, counted from the beginning of `file`.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read_into(self, target: torch.Tensor, offsets: Sequence[int]) -> None:
        if target.numel():
            with opened(self.file) as descriptor:
                self.read_from(descriptor, target, offsets)

    def read_from(self, descriptor: int, target: torch.Tensor, offsets: Sequence[int]) -> None:
        """As `read_into`, from the file that is open already."""
        if not self.shape:
            target.copy_(_pread(descriptor, self, 0, 1).view(self.dtype).reshape(()))
            return
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        step = max(1, _BUFFER_BYTES // max(1, row))
        inner = tuple(slice(o, o + n) for o, n in zip(offsets[1:], target.shape[1:], strict=True))
        for first in range(0, target.shape[0], step):
            count = min(step, target.shape[0] - first)
            raw = _pread(descriptor, self, (offsets[0] + first) * row, count * row // self.dtype.itemsize)
            rows = raw.view(self.dtype).reshape(count, *self.shape[1:])
            target[first : first + count].copy_(rows[(slice(None), *inner)])


class opened:
    """A read-only file descriptor that is closed at the end of the block."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> int:
        self._descriptor = os.open(self._file, os.O_RDONLY)
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _pread(descriptor: int, tensor: StoredTensor, start: int, elements: int) -> torch.Tensor:
    """`elements` elements from byte `start` of the tensor's data, as uint8."""
    raw = torch.empty(elements * tensor.dtype.itemsize, dtype=torch.uint8)
    view = raw.numpy().data
    position = tensor.start + start
    while view:
        # One call returns at most 2 GiB on Linux, and may return less at any time.
        count = os.preadv(descriptor, [view], position)
        if count == 0:
            raise ModelError(
                f"{tensor.file.name} ends inside tensor '{tensor.name}'",
                where=str(tensor.file),
                remedy="the file is torn: download or copy it again",
            )
        view, position = view[count:], position + count
    return raw


def read_header(file: Path, error: type[ShardtuneError] = ModelError) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a safetensors file and its free-form metadata, without reading any data.

    Raises:
        error: the header is damaged, or the file's size does not match it.
    """

    def torn(what: str) -> ShardtuneError:
        return error(what, where=str(file), remedy="the file is torn or damaged: download, copy or save it again")

    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise torn(f"{file.name} has no safetensors header ({size} bytes, header length {length})")
            raw = stream.read(length)
    except OSError as problem:
        raise error(f"{file.name} cannot be read: {problem.strerror}", where=str(file)) from problem
    try:
        header: dict[str, _HeaderEntry] = json.loads(raw)
        metadata = {key: str(value) for key, value in header.pop("__metadata__", {}).items()}
        tensors = {name: _entry(file, name, entry, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise torn(f"{file.name} has a damaged safetensors header: {problem}") from problem
    _check_extent({name: entry["data_offsets"][1] for name, entry in header.items()}, size - 8 - length, torn)
    return tensors, metadata


def with_sorted_metadata(content: memoryview) -> tuple[bytes, memoryview]:
    """The header of a safetensors file, its free-form metadata sorted by key, and the data behind it.

    The library writes metadata in an order that is drawn in each process, so that equal files differ in their bytes.
    """
    end = 8 + struct.unpack("<Q", content[:8])[0]
    raw = bytes(content[:end])
    header = json.loads(raw[8:])
    header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(end - 8)
    return raw[:8] + text if len(text) == end - 8 else raw, content[end:]


class _HeaderEntry(TypedDict):
    """A tensor in a file's header; `data_offsets` are its first byte and the one after its last, within the data."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _entry(file: Path, name: str, entry: _HeaderEntry, data_start: int) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"tensor '{name}' has the unknown dtype {entry['dtype']!r}")
    begin, end = entry["data_offsets"]
    tensor = StoredTensor(name, file, DTYPES[entry["dtype"]], tuple(entry["shape"]), data_start + begin)
    if end - begin != tensor.nbytes:
        raise ValueError(
            f"tensor '{name}' of shape {list(tensor.shape)} takes {end - begin} bytes, not {tensor.nbytes}"
        )
    return tensor


def _check_extent(ends: Mapping[str, int], data_bytes: int, torn: Callable[[str], ShardtuneError]) -> None:
    """The data area is exactly as long as the tensors need; names the first tensor that is cut off."""
    needed = max(ends.values(), default=0)
    if data_bytes < needed:
        cut = min((name for name, end in ends.items() if end > data_bytes), key=ends.__getitem__)
        raise torn(f"the file holds {data_bytes} of {needed} bytes of data: it ends inside or before tensor '{cut}'")
    if data_bytes > needed:
        raise torn(f"the file holds {data_bytes} bytes of data, its header describes {needed}")


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor that is going to be written: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """A safetensors file whose tensors are known in advance and arrive in any order."""

    def __init__(self, file: Path, tensors: Sequence[TensorPlan]) -> None:
        header: dict[str, _HeaderEntry] = {}
        offset = 0
        # Readers map the file into memory, and torch's kernels may add in another order where a tensor is not aligned:
        # the data begin aligned, and tensors that would move those after them come last.
        tensors = sorted(tensors, key=lambda tensor: tensor.nbytes % _ALIGNMENT != 0)
        for tensor in tensors:
            header[tensor.name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": (offset, offset + tensor.nbytes),
            }
            offset += tensor.nbytes
        raw = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
        raw += b" " * (-(8 + len(raw)) % _ALIGNMENT)
        start = struct.pack("<Q", len(raw)) + raw
        self.file = file
        self._header: tuple[int, str] = len(start), checksum(start)
        self._sums = {tensor.name: (tensor.nbytes, "") for tensor in tensors}
        self._plans = {tensor.name: tensor for tensor in tensors}
        self._starts = {t.name: 8 + len(raw) + header[t.name]["data_offsets"][0] for t in tensors}
        self._missing = set(self._plans)
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(self._descriptor, len(start) + offset)
        self._write(0, memoryview(start))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor, cast to the planned dtype."""
        plan = self._plans[name]
        if tuple(tensor.shape) != plan.shape:
            raise ValueError(f"'{name}' was planned with shape {plan.shape}, not {tuple(tensor.shape)}")
        data = tensor.detach().to("cpu", plan.dtype).contiguous().reshape(-1)
        content = _bytes_of(data) if data.numel() else memoryview(b"")
        self._sums[name] = len(content), checksum(content)
        self._write(self._starts[name], content)
        self._missing.discard(name)

    def close(self) -> Parts:
        """Makes the file durable. Every planned tensor must have been written.

        Returns:
            The checksums of the header and of each tensor.
        """
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        if self._missing:
            raise ValueError(f"{self.file.name}: never written: {sorted(self._missing)[:5]}")
        return [self._header, *self._sums.values()]

    def _write(self, position: int, data: memoryview) -> None:
        while data:
            count = os.pwrite(self._descriptor, data, position)
            data, position = data[count:], position + count


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, which has to outlive the view.

    It may be a weight's own, which numpy's view would keep from being resized for good: its engine could not sleep.
    """
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
