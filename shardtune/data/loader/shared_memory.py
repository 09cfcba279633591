"""What a process hands to another: an object whose tensors and arrays lie in one piece of shared memory."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_ALIGNMENT = 64
_SMALL = 1024
_MOST_AT_ONCE = 1 << 30


@dataclass(frozen=True, slots=True)
class SharedMemoryMessage:
    """An object under way, as its sender describes it; it holds its memory open until it closes the file.

    Attributes:
        object: pickled, without what lies in shared memory.
        places: [start, stop) of each piece of shared memory.
        process: the sender.
        file: the memory, which has no name; None: nothing lies there.
    """

    object: bytes
    places: tuple[tuple[int, int], ...]
    process: int
    file: int | None

    def opened(self) -> Any:
        """The object. Nothing is copied; the memory is given back with the last tensor or array in it.

        Raises:
            OSError: the sender has closed it, or is gone.
        """
        if self.file is None:
            return pickle.loads(self.object)
        file = os.open(f"/proc/{self.process}/fd/{self.file}", os.O_RDWR)
        try:
            memory = mmap.mmap(file, self.places[-1][1])
        finally:
            os.close(file)
        whole = memoryview(memory)
        return pickle.loads(self.object, buffers=[whole[start:stop] for start, stop in self.places])


def packed(value: Any) -> SharedMemoryMessage:
    """An object as a parcel; the file is the caller's to close."""
    large: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        piece = buffer.raw()
        if piece.nbytes < _SMALL:
            return True
        large.append(piece)
        return False

    sink = io.BytesIO()
    shares = sys.platform == "linux"  # elsewhere there is no memory without a name; all goes through the pipe
    _Packer(sink, protocol=5, buffer_callback=is_small if shares else None).dump(value)
    if not large:
        return SharedMemoryMessage(sink.getvalue(), (), os.getpid(), None)
    file = os.memfd_create("shardtune")
    try:
        places = _laid(file, large)
    except BaseException:
        os.close(file)
        raise
    return SharedMemoryMessage(sink.getvalue(), places, os.getpid(), file)


def _laid(file: int, pieces: Sequence[memoryview]) -> tuple[tuple[int, int], ...]:
    places, end = [], 0
    for piece in pieces:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + piece.nbytes
        done = 0
        while done < piece.nbytes:
            done += os.pwrite(file, piece[done : done + _MOST_AT_ONCE], start + done)
        places.append((start, end))
    return tuple(places)


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return NotImplemented
        plain = value.detach()
        if plain.numel() and not any(plain.stride()):  # one number everywhere
            return _expanded, (plain.as_strided((1,), (1,)).clone(), plain.shape)
        content: Any = plain.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(content), plain.dtype, plain.shape)


def _tensor(content: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    if not len(content):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(shape)


def _expanded(number: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return number.view(()).expand(shape)
