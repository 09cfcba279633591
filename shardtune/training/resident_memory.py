"""The resident memory of this process, and its peak since a moment of choice (Linux)."""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESTART_PEAK = "5"
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""`M_MMAP_THRESHOLD` and `M_TRIM_THRESHOLD` of glibc's malloc.h."""
RETURNED_FROM = 128 * 1024
"""Bytes from which on memory is returned when it is freed. It is glibc's own first value of both, which grow to 32 and
64 MB with what a program frees: then freed tensors stay resident, and few fit into their gaps, as they are aligned."""
KEPT_TO = 32 * 1024**2
"""The most bytes up to which glibc by itself keeps what is freed."""


class Earlier:
    """The peak that the system has forgotten.

    Attributes:
        gigabytes: of it; 0 until `restart_peak` is called.
    """

    gigabytes = 0.0


def resident() -> int | None:
    """Bytes that are resident now; None where the system gives no such number."""
    return _read("VmRSS")


def resident_peak() -> int | None:
    """The most bytes that were resident, since `restart_peak` where it was called; None as `resident`."""
    return _read("VmHWM")


def mapped_files() -> int:
    """Bytes of files that are resident now, of libraries' code above all: they grow as code runs for the first time."""
    return _read("RssFile") or 0


def restart_peak() -> bool:
    """Let the system count the peak from now on; returns whether it does."""
    before = resident_peak()
    try:
        CLEAR.write_text(RESTART_PEAK)
    except OSError:  # another system, or a sandbox
        return False
    Earlier.gigabytes = max(Earlier.gigabytes, (before or 0) / 1e9)
    return True


def return_freed_memory() -> None:
    """Return memory to the system when a tensor is freed, from now on; what has been freed so far as well.

    Only glibc has functions for it, and what a user has set by a variable stays. A tensor's pages are then new ones
    each time, which costs a small model up to a third of its time, and one of 57M parameters 1.5 %.
    """
    _set_thresholds(RETURNED_FROM, RETURNED_FROM)


def keep_freed_memory() -> None:
    """Let the next tensors have the memory of freed ones, as glibc does by itself."""
    _set_thresholds(KEPT_TO, 2 * KEPT_TO)


def _set_thresholds(mmap: int, trim: int) -> None:
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
            return
        libc.mallopt(MMAP_THRESHOLD, mmap)
        libc.mallopt(TRIM_THRESHOLD, trim)
        libc.malloc_trim(0)


def _read(key: str) -> int | None:
    try:
        found = re.search(rf"^{key}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024
