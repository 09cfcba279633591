"""`events.jsonl` and `alive` in a run directory: what happened to a run, and that it makes progress.

Both are for people and programs that watch runs. Nothing in training reads them, so they cannot change a number, and a
file that cannot be written is reported and does not end the run.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from shardtune.launch.progress import PROGRESS

EVENTS = "events.jsonl"
ALIVE = "alive"
TOUCH_SECONDS = 1.0
"""The time between two writes of `alive`."""
END_SECONDS = 5.0
"""How long the end of a run waits for such a write."""
TAIL_BYTES = 1 << 14
"""How much of `events.jsonl` is read to find its last line."""
WRITE_SECONDS = 2.0
"""How long a process that is about to end waits for an event."""
REASON_CHARACTERS = 2000
"""The longest reason of an event, so that its line is within the tail."""

EventName = Literal[
    "start", "resume", "save", "anomaly", "rollback", "lost", "stuck", "restart", "stop", "failed", "end"
]
BEGINS = ("start", "resume")
ANOMALY: EventName = "anomaly"


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
        tail = _tail(run_dir)
        line = {
            "time": now(),
            "event": event,
            "step": last_step(run_dir) if step is None else step,
            "restart": _restarts(tail) + (event in BEGINS),
            "host": socket.gethostname(),
            "ranks": ranks,
            "reason": reason[:REASON_CHARACTERS],
            **facts,
        }
        torn = bool(tail) and not tail.endswith(b"\n")
        with open(run_dir / EVENTS, "ab", buffering=0) as file:  # one write, so that lines of processes do not mix
            file.write(b"\n" * torn + json.dumps(line).encode() + b"\n")
    except OSError as error:
        _report_unwritable(run_dir / EVENTS, error)


def write_last_event(run_dir: Path, event: EventName, **facts: Any) -> None:
    """`write_event` in a thread, for at most two seconds: the disk may be what hangs, or is behind a lost network."""
    writer = threading.Thread(target=write_event, args=(run_dir, event), kwargs=facts, daemon=True)
    writer.start()
    writer.join(WRITE_SECONDS)


def now() -> str:
    """The time as in all files for operators: UTC, in milliseconds, `2026-11-22T19:07:43.123Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def restart_count(run_dir: Path) -> int:
    """How often the run was started again in this directory, by a launcher or by the same command: 0 at first."""
    return max(0, _restarts(_tail(run_dir)))


def last_event(run_dir: Path) -> str | None:
    """The name of the last event; None without one."""
    line = _last_line(_tail(run_dir))
    return None if line is None else str(line["event"])


def _tail(run_dir: Path) -> bytes:
    try:
        with open(run_dir / EVENTS, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read()
    except FileNotFoundError:
        return b""


def _restarts(tail: bytes) -> int:
    """The `restart` of the last complete line; -1 without one."""
    line = _last_line(tail)
    return -1 if line is None else int(line["restart"])


def _last_line(tail: bytes) -> dict[str, Any] | None:
    for line in reversed(tail.splitlines()):
        try:
            found = json.loads(line)
            return {**found, "event": str(found["event"]), "restart": int(found["restart"])}
        except (ValueError, KeyError, TypeError):  # torn, or cut by the beginning of the tail
            continue
    return None


class Alive:
    """The file `alive`: there while steps and evaluations are computed, its time of change that of the last progress.

    A thread writes it, so that training never waits for the disk.

    Args:
        run_dir: of the run.
        step: returns the optimizer steps done, which the file holds.
    """

    def __init__(self, run_dir: Path, step: Callable[[], int]) -> None:
        self._file = run_dir / ALIVE
        self._step = step
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._reported = False

    def begin(self) -> None:
        """Write the file, and from now on at most once a second where there was progress."""
        self._write()
        self._thread = threading.Thread(target=self._watch, name="shardtune-alive", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        seen = PROGRESS.beats
        while not self._ended.wait(TOUCH_SECONDS):
            now = PROGRESS.beats
            if now != seen:
                seen = now
                self._write()

    def _write(self) -> None:
        try:
            self._file.write_text(f"{self._step()}\n")
        except OSError as error:
            if not self._reported:
                self._reported = True
                _report_unwritable(self._file, error)

    def end(self) -> None:
        """Remove the file: nothing is computed that a probe could wait for."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(END_SECONDS)
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
