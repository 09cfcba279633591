"""How a process leaves its group when its script ends: with the others, and with gloo's threads at rest.

A thread of gloo lets go of a collective's tensors some moments after it has reported the collective as done, and takes
the interpreter's lock for it. One that waits for that lock when the interpreter begins to end is unwound through
destructors, which aborts the process (pytorch/pytorch#190489). Destroying a group ends its threads only where nothing
refers to it any more; the caches of tensors do, for as long as the process lives.
"""

from __future__ import annotations

import atexit
import datetime
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

EXIT_TIMEOUT = datetime.timedelta(minutes=5)
"""How long a rank whose script has ended waits for the others to end too."""
REST_SECONDS = 10.0
"""How long it waits at most for the threads of gloo."""
REST_STEP = 0.02
"""Longer than a thread that waits for the interpreter's lock sleeps at a time (5 ms)."""
GLOO_THREAD = "pt_gloo_runloop"
TASKS = Path("/proc/self/task")

_registered = False


def leave_at_exit() -> None:
    """See to it that a script that just ends leaves its group in order, if it has one then.

    A process that ends with the group open may hang or abort while the interpreter is taken down.
    """
    global _registered
    if _registered:
        return
    _registered = True
    print_error = sys.excepthook
    failed: list[BaseException] = []

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed.append(error)
        print_error(kind, error, trace)

    def leave() -> None:
        try:
            if dist.is_initialized():
                if failed:  # others may be waiting elsewhere
                    raise RuntimeError
                work = dist.barrier(async_op=True)  # with a limit; on CPU it is gloo's
                if work is not None:
                    work.wait(EXIT_TIMEOUT)
                dist.destroy_process_group()
        except RuntimeError:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        await_rest()

    sys.excepthook = note
    atexit.register(leave)


def await_rest() -> bool:
    """Wait until no thread of gloo has anything left to do; returns whether that is known.

    To be called after the last collective. A thread that has slept for longer than one that waits for the interpreter's
    lock does at a time waits for work. What threads do is known on Linux alone; elsewhere they get a moment.
    """
    until = time.monotonic() + REST_SECONDS
    before = _gloo_threads()
    while time.monotonic() < until:
        time.sleep(REST_STEP)  # without the interpreter's lock
        now = _gloo_threads()
        if now == before and all(thread.asleep for thread in now.values()):
            return TASKS.is_dir()
        before = now
    return False


@dataclass(frozen=True, slots=True)
class _Thread:
    """A thread of this process.

    Attributes:
        asleep: whether it waits for something.
        woken: how often it was given or lost a processor.
    """

    asleep: bool
    woken: tuple[str, ...]


def _gloo_threads() -> dict[str, _Thread]:
    """The threads that do gloo's work, by number; none where the system does not list them."""
    found: dict[str, _Thread] = {}
    for task in TASKS.iterdir() if TASKS.is_dir() else ():
        with suppress(OSError):  # it has ended
            lines = (line.partition(":") for line in (task / "status").read_text().splitlines())
            facts = {name: value.strip() for name, _, value in lines}
            if facts["Name"] == GLOO_THREAD:
                switches = tuple(value for name, value in facts.items() if name.endswith("ctxt_switches"))
                found[task.name] = _Thread(facts["State"].startswith("S"), switches)
    return found
