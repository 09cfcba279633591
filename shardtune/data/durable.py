"""Files and folders that last, as far as the file system can, and errors of the disk that name their file."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOT_OFFERED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EISDIR})
"""What a file system returns that cannot sync a folder (some network and user-space ones); its files can be."""


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk; without effect on a file system that cannot."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        if problem.errno not in NOT_OFFERED:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """An error of the disk inside names the file, which one of a write, a sync or a close does not."""
    try:
        yield
    except OSError as problem:
        if problem.filename is None:
            problem.filename = str(file)
        raise


def write_text(path: Path, text: str, *, durably: bool = True) -> None:
    """Replaces a file in one step: a reader sees the old text or the new one.

    Args:
        path: of the file.
        text: its new content.
        durably: wait until it is on the disk; False where its folder is synced as a whole.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with naming(path), temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            if durably:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durably:
        sync_folder(path.parent)


class Lines:
    """A file that lines are added to, each at once: what a full disk refuses is not tried again when it is closed.

    Args:
        file: is made if need be.
    """

    def __init__(self, file: Path) -> None:
        self._stream = open(file, "ab", buffering=0)  # noqa: SIM115 (open as long as its owner)

    def add(self, line: str) -> None:
        rest = memoryview(f"{line}\n".encode())
        while rest:  # a disk that is almost full takes a part
            rest = rest[self._stream.write(rest) :]

    def sync(self) -> None:
        """Waits until the lines are on the disk."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()
