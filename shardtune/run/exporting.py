"""The temporary directory of an export, with a lock: what a killed export left is removed by the next one."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardtune.data.file_lock import FileLock
from shardtune.errors import CheckpointError

WAIT_SECONDS = 3.0


@contextmanager
def exporting(target: Path) -> Iterator[Path]:
    """A name for a temporary directory beside `target`; it and those of exports whose process ended are removed.

    Args:
        target: the directory that is exported to; its parent exists and can be written.

    Raises:
        CheckpointError: another process is exporting to it, or nothing can be written there.
    """
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        is_free = lock.acquire(lambda _, seconds: seconds > WAIT_SECONDS and lock.holder_alive)
    except OSError as error:
        raise CheckpointError(
            f"nothing can be written into {target.parent}: {error.strerror or error}",
            where="--to",
            remedy="name another directory",
        ) from error
    if not is_free:
        raise CheckpointError(
            f"{lock.holder()} is exporting to {target}", where="--to", remedy="wait for it, or name another directory"
        )
    temporary = target.with_name(f".{target.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        for left in target.parent.glob(".*"):  # every export into this directory holds the lock while it writes
            if re.fullmatch(rf"\.{re.escape(target.name)}\.tmp-[0-9a-f]{{8}}", left.name):
                shutil.rmtree(left, ignore_errors=True)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        lock.release()
