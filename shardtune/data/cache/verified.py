"""Verifies the rows of a cache entry against their checksum: after they were changed or copied, and once a day."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from shardtune.data.cache.entry import ROWS, read_description
from shardtune.data.cache_directory import write_atomically
from shardtune.data.checksum import content_fault

VERIFIED = "verified.json"
"""In an entry's folder: the time stamps that its rows had when they were last verified, and when that was."""
TRUSTED_SECONDS = 24 * 3600.0


def check_rows(folder: Path) -> None:
    """Compare the rows of an entry with their checksum, unless they were verified and have not been touched since.

    So the many processes of a run do not each read a large file. Entries of earlier versions have no checksum.

    Raises:
        ValueError: they are damaged.
        OSError: they cannot be read.
    """
    described = read_description(folder)
    if ROWS not in described or _is_trusted(folder):
        return
    stamps = _stamps(folder)
    fault = content_fault(folder / ROWS, [(described["size"], described[ROWS])])
    if fault is not None:
        raise ValueError(fault)
    _trust(folder, stamps)


def trust_rows(folder: Path) -> None:
    """Note that the rows of an entry, just built, are as they were written."""
    _trust(folder, _stamps(folder))


def _trust(folder: Path, stamps: list[int]) -> None:
    with suppress(OSError):  # a cache that others share and that cannot be written here: it is verified each time
        write_atomically(folder / VERIFIED, json.dumps({"seen": stamps, "at": time.time()}).encode())


def _is_trusted(folder: Path) -> bool:
    with suppress(OSError, ValueError, KeyError, TypeError):
        noted = json.loads((folder / VERIFIED).read_text(encoding="utf-8"))
        return noted["seen"] == _stamps(folder) and 0 <= time.time() - noted["at"] < TRUSTED_SECONDS
    return False


def _stamps(folder: Path) -> list[int]:
    status = (folder / ROWS).stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
