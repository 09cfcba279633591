"""What the system says of a process: whether it runs, waits, is stopped or has ended (Linux; elsewhere less)."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
STATES = {
    "R": "is computing",
    "S": "waits",
    "D": "waits for a disk or a driver (state D), which no signal interrupts",
    "T": "is stopped by a signal (state T, as after kill -STOP), so its stack cannot be written",
    "t": "is stopped by a debugger (state t), so its stack cannot be written",
    "Z": "has ended",
}
STOPPED, ENDED = frozenset("Tt"), "Z"


@dataclass(frozen=True, slots=True)
class Identity:
    """A process of a host: a number alone may be given to another one later.

    Attributes:
        host: its name.
        space: in which its number counts: containers on one host have their own.
        pid: its number.
        born: when it was started, in the system's own unit; 0 where unknown.
        stacks: the descriptor of the file to which it writes its stacks on a signal; -1: none.
    """

    host: str
    space: str
    pid: int
    born: int = 0
    stacks: int = -1

    def is_near(self, other: Identity) -> bool:
        """Whether both run where each can see the other."""
        return (self.host, self.space) == (other.host, other.space)

    @property
    def state(self) -> str:
        """One letter, as in ps; Z once it has ended."""
        found = _stat(self.pid)
        if found is None:
            return ENDED if PROC.is_dir() or not _exists(self.pid) else "S"
        return found[0] if not self.born or found[1] == self.born else ENDED

    def describe(self) -> str:
        """The state in words."""
        state = self.state
        return STATES.get(state, f"is in state {state}")

    def send(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.state != ENDED:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Work:
    """What a process and all that it has started have done so far.

    Attributes:
        seconds: of processors.
        moved: bytes read from disks and written anywhere.
    """

    seconds: float
    moved: int

    def differs(self, before: Work, seconds: float) -> bool:
        """Whether something was done in these seconds: more than waiting with some threads that look now and then."""
        moved = abs(self.moved - before.moved)  # less where a process has ended
        return abs(self.seconds - before.seconds) > BUSY * seconds or moved > BUSY_BYTES * seconds


BUSY, BUSY_BYTES = 0.05, 16_000
"""The share of a processor, and the bytes a second, above which a process works."""


def own_work() -> Work | None:
    """The work of this process, without that of the calling thread, and of all it has started; None without /proc."""
    if not PROC.is_dir():
        return None
    parents: dict[int, list[int]] = {}
    fields: dict[int, list[str]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError, ValueError):  # it has ended meanwhile
                found = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(found[1]), []).append(int(entry.name))
                fields[int(entry.name)] = found
    ticks, moved, left = 0, 0, [os.getpid()]
    while left:
        pid = left.pop()
        left += parents.get(pid, [])
        ticks += sum(map(int, fields[pid][11:15])) if pid in fields else 0
        with suppress(OSError, KeyError, ValueError):
            counts = dict(line.split(": ") for line in (PROC / str(pid) / "io").read_text().splitlines())
            moved += int(counts["read_bytes"]) + int(counts["wchar"])
    return Work(ticks / os.sysconf("SC_CLK_TCK") - time.thread_time(), moved)


def own_identity(host: str, stacks: int = -1) -> Identity:
    """This process."""
    found = _stat(os.getpid())
    try:
        space = os.readlink(PROC / "self" / "ns" / "pid")
    except OSError:
        space = ""
    return Identity(host, space, os.getpid(), 0 if found is None else found[1], stacks)


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start time of a process, from /proc/PID/stat; None without one."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
