"""A disk that is full from a write on, for code of this process; `full_disk.c` is its like for whole commands."""

from __future__ import annotations

import builtins
import errno
import io
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NAMING = ("mkdir", "rename", "replace", "symlink", "link")


@dataclass
class Disk:
    """What is below a folder.

    Attributes:
        full_at: the number of the first write that fails; 0: none does.
        late: whether that one still opens or names its file, and only what is written from then on fails.
        writes: how many there were.
    """

    below: Path
    full_at: int = 0
    late: bool = False
    writes: int = 0

    def take(self, path: object) -> None:
        """Count a write; raises once the disk is full."""
        if not isinstance(path, str | os.PathLike) or not Path(os.path.abspath(path)).is_relative_to(self.below):
            return
        self.writes += 1
        if not self.full_at or self.writes < self.full_at:
            return
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        if self.writes > self.full_at or not self.late:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))


@contextmanager
def filling(disk: Disk) -> Iterator[None]:
    """Meanwhile this process's files are on the disk: those that it makes, opens anew, names, syncs, or writes into.

    Once the disk is full, files may not grow (RLIMIT_FSIZE), which holds for those that are open, and in C, as well.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    opened, synced = io.open, os.fsync

    def open_(file: Any, mode: str = "r", *args: Any, **keys: Any) -> Any:
        if isinstance(file, str | os.PathLike) and set("wxa+") & set(mode) and not os.path.lexists(file):
            disk.take(file)
        return opened(file, mode, *args, **keys)

    def named(act: Callable[..., Any]) -> Callable[..., Any]:
        def take(*args: Any, **keys: Any) -> Any:
            disk.take(args[-1] if act.__name__ != "mkdir" else args[0])
            return act(*args, **keys)

        return take

    def fsync(descriptor: int) -> None:
        disk.take(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", open_)
        patch.setattr(io, "open", open_)
        patch.setattr(os, "fsync", fsync)
        for name in NAMING:
            patch.setattr(os, name, named(getattr(os, name)))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
