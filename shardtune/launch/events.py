"""`events.jsonl` and `alive` in a run directory: what happened to a run, and that it makes progress.

Both are for people and programs that watch runs. Nothing in training reads them, so they cannot change a number, and a
file that cannot be written is reported and does not end the run.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

EVENTS = "events.jsonl"
ALIVE = "alive"
TOUCH_SECONDS = 1.0
"""The shortest time between two writes of `alive`."""
TAIL_BYTES = 1 << 14
"""How much of `events.jsonl` is read to find its last line."""
REASON_CHARACTERS = 2000
"""The longest reason of an event, so that its line is within the tail."""

EventName = Literal["start", "resume", "save", "lost", "stuck", "restart", "stop", "failed", "end"]
BEGINS = ("start", "resume")


def write_event(
    run_dir: Path,
    event: EventName,
    *,
    step: int | None = None,
    ranks: int | None = None,
    reason: str = "",
    **facts: Any,
) -> None:
    """Append a line to `events.jsonl`; does nothing for a directory that does not exist, where no run has begun.

    Any process may call it at any time: rank 0, the launcher, a watchdog's thread.

    Args:
        run_dir: of the run.
        event: its name.
        step: optimizer steps done; None: the last one that is known from `alive`.
        ranks: of the run; None where that is not known.
        reason: of the event, in words; the first 2,000 characters are written.
        facts: further JSON values.
    """
    if not run_dir.is_dir():
        return
    try:
        with open(run_dir / EVENTS, "a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read(TAIL_BYTES)
            restart = _restarts(tail) + (event in BEGINS)
            line = {
                "time": now(),
                "event": event,
                "step": last_step(run_dir) if step is None else step,
                "restart": restart,
                "host": socket.gethostname(),
                "ranks": ranks,
                "reason": reason[:REASON_CHARACTERS],
                **facts,
            }
            torn = tail and not tail.endswith(b"\n")
            file.write(b"\n" * bool(torn) + json.dumps(line).encode() + b"\n")
    except OSError as error:
        _report_unwritable(run_dir / EVENTS, error)


def now() -> str:
    """The time as in all files for operators: UTC, in milliseconds, `2026-11-22T19:07:43.123Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def restart_count(run_dir: Path) -> int:
    """How often the run was started again in this directory, by a launcher or by the same command: 0 at first."""
    file = run_dir / EVENTS
    if not file.exists():
        return 0
    with open(file, "rb") as lines:
        lines.seek(max(0, lines.seek(0, os.SEEK_END) - TAIL_BYTES))
        return max(0, _restarts(lines.read()))


def _restarts(tail: bytes) -> int:
    """The `restart` of the last complete line; -1 without one."""
    for line in reversed(tail.splitlines()):
        try:
            return int(json.loads(line)["restart"])
        except (ValueError, KeyError, TypeError):  # torn, or cut by the beginning of the tail
            continue
    return -1


class Alive:
    """The file `alive`: there while steps and evaluations are computed, its time of change that of the last progress.

    Args:
        run_dir: of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / ALIVE
        self._next = 0.0
        self._reported = False

    def touch(self, step: int) -> None:
        """Write the step, at most once a second."""
        seconds = time.monotonic()
        if seconds < self._next:
            return
        self._next = seconds + TOUCH_SECONDS
        try:
            self._file.write_text(f"{step}\n")
        except OSError as error:
            if not self._reported:
                self._reported = True
                _report_unwritable(self._file, error)

    def end(self) -> None:
        """Remove the file: nothing is computed that a probe could wait for."""
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            _report_unwritable(self._file, error)


def last_step(run_dir: Path) -> int | None:
    """The step in `alive`; None where the file is missing or torn."""
    try:
        return int((run_dir / ALIVE).read_text())
    except (OSError, ValueError):
        return None


def _report_unwritable(file: Path, error: OSError) -> None:
    print(f"{file} cannot be written: {error.strerror}; training continues without it", file=sys.stderr, flush=True)
