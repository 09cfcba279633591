"""Makes folders durable, where the file system can."""

from __future__ import annotations

import errno
import os
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
