"""Offloads the memory of a module, its gradients and optimizers, and restores it in the same tensors."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardtune.parallel.free_memory import free_bytes, host_bytes
from shardtune.parallel.torch_private.tensors import storage_identity

PREFIX = "shardtune-offloaded-"
YOUNG_SECONDS = 60.0
"""A file may not be locked yet so soon after it was made."""
HOST_RESERVE = 0.25
"""The part of a host's memory that has to be free, so that engines that take turns stay in memory."""


def optimizers_of(module: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """The optimizers that are attributes of a module, by name; those in lists and dicts as "name.0", "name.key"."""
    return dict(_optimizers("", vars(module)))


def _optimizers(name: str, value: object) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    if isinstance(value, torch.optim.Optimizer):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(item, nn.Module):
                yield from _optimizers(f"{name}.{key}" if name else str(key), item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _optimizers(f"{name}.{number}", item)


def remove_left_files() -> None:
    """Remove offloaded memory of killed processes: the kernel has released the lock that each held on its file."""
    for file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError), file.open("rb") as stream:  # another user's
            young = time.time() - os.fstat(stream.fileno()).st_mtime < YOUNG_SECONDS
            if not young and not _is_locked(stream):
                file.unlink()


def _is_locked(stream: IO[bytes]) -> bool:
    try:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # by a live process; or the file system has no locks, and then nothing is known
        return True
    return False


class Memory:
    """The memory of a module on one rank.

    Args:
        module: with its optimizers as attributes.
        device: of the engine.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._away: list[tuple[torch.UntypedStorage, int, int, torch.Tensor | None]] = []
        self._file: Path | None = None
        self._remove: weakref.finalize | None = None  # closes and removes the file, which is locked until then
        remove_left_files()

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def held(self) -> int:
        """Bytes of weights, buffers, gradients and optimizer states on this rank's device."""
        return sum(storage.nbytes() for storage in self._storages())

    def make_room(self) -> None:
        """Offload for another engine's turn: always from a GPU; from host memory only where that is short."""
        if self._device.type != "cpu" or free_bytes(self._device) < HOST_RESERVE * host_bytes():
            self.leave()

    def leave(self) -> None:
        """Offload: from a GPU to host memory, from host memory to a file. Nothing is lost.

        Memory of which numpy has made an array stays where it is: torch cannot free it any more.
        """
        if self._away:
            return
        storages = [storage for storage in self._storages() if storage.resizable()]
        if self._device.type == "cpu":
            self._write(storages)
        else:
            self._away = [(storage, storage.nbytes(), 0, _bytes_of(storage).cpu()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        gc.collect(1)  # all generations take half a second, mostly for what was imported
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            _return_to_system()

    @torch.no_grad()
    def come_back(self) -> None:
        """Restore the offloaded memory."""
        away, self._away = self._away, []
        if not away:
            return
        if self._file is None:
            for storage, size, _, kept in away:
                assert kept is not None
                storage.resize_(size)
                _bytes_of(storage).copy_(kept)
            return
        with self._file.open("rb") as stream:
            for storage, size, offset, _ in away:
                storage.resize_(size)
                stream.seek(offset)
                stream.readinto(_buffer(storage))
        self._remove_file()

    def forget(self) -> None:
        """Discard what is offloaded."""
        self._away = []
        self._remove_file()

    def _remove_file(self) -> None:
        if self._remove is not None:
            self._remove()
        self._remove = self._file = None

    def _write(self, storages: list[torch.UntypedStorage]) -> None:
        offset = 0
        stream = tempfile.NamedTemporaryFile(prefix=PREFIX, delete=False)  # noqa: SIM115
        self._file = Path(stream.name)
        self._remove = weakref.finalize(self, _remove, stream, self._file)
        self._remove.atexit = False  # a process forked meanwhile would remove the file too
        with suppress(OSError):  # without locks the file is not removed by others, if this process is killed
            fcntl.flock(stream.fileno(), fcntl.LOCK_EX)
        for storage in storages:
            stream.write(_buffer(storage))
            self._away.append((storage, storage.nbytes(), offset, None))
            offset += storage.nbytes()
        stream.flush()

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """The storages on this rank's device, each once."""
        seen: set[int] = set()
        for tensor in self._tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if local.device.type == self._device.type and storage.nbytes() and storage_identity(storage) not in seen:
                seen.add(storage_identity(storage))
                yield storage

    def _tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self._module.parameters():
            yield parameter.detach()
            if parameter.grad is not None:
                yield parameter.grad
        yield from self._module.buffers()
        for optimizer in optimizers_of(self._module).values():
            for state in optimizer.state.values():
                yield from _tensors_in(state)


def _remove(stream: IO[bytes], file: Path) -> None:
    stream.close()
    file.unlink(missing_ok=True)


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """uint8 [bytes], the storage itself."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore


def _buffer(storage: torch.UntypedStorage) -> ctypes.Array[ctypes.c_char]:
    """The memory of a storage on the host; numpy's view of it would keep it from being resized for good."""
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


def _return_to_system() -> None:
    """Return memory cached by C's allocator to the system; only glibc has a function for it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
