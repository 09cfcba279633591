"""The resident memory of this process, and its peak since a moment of choice (Linux)."""

from __future__ import annotations

import re
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESTART_PEAK = "5"


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


def restart_peak() -> bool:
    """Let the system count the peak from now on; returns whether it does."""
    before = resident_peak()
    try:
        CLEAR.write_text(RESTART_PEAK)
    except OSError:  # another system, or a sandbox
        return False
    Earlier.gigabytes = max(Earlier.gigabytes, (before or 0) / 1e9)
    return True


def _read(key: str) -> int | None:
    try:
        found = re.search(rf"^{key}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024
