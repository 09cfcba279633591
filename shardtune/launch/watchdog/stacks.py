"""Where a process stands: the Python stacks of its threads, and the collective in which it waits."""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import IO

from shardtune.launch.watchdog.processes import PROC, Identity

STACK_SIGNAL = signal.SIGRTMIN + 8 if sys.platform == "linux" else signal.SIGUSR2
"""Makes a process write its stacks, also one in which no Python code can run."""
PACKAGE = str(Path(__file__).parents[2]) + os.sep
LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {"<frozen"}
)
DISTRIBUTED = os.sep.join(("", "torch", "distributed", ""))
FUNCTIONAL = DISTRIBUTED + "_functional_collectives.py"
DISPATCH = os.sep.join(("", "torch", "_"))
AUTOGRAD = os.sep.join(("", "torch", "autograd", "function.py"))
LOCKS = os.sep.join(("", "filelock", ""))
WRAPPERS = frozenset({"wrapper", "_time_logger", "wait", "__exit__", "<lambda>"})


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread stands.

    Attributes:
        at: file, line and function of the innermost code that is neither Python's nor a library's.
        line: the text of that line.
        collective: the name of torch's collective in which the thread waits; "" outside of one.
        in_users: whether `at` lies in the user's code.
        for_lock: whether it waits for a file lock, as for another rank that downloads the same file.
    """

    at: str
    line: str = ""
    collective: str = ""
    in_users: bool = False
    for_lock: bool = False

    def __str__(self) -> str:
        waits = f"waits in the collective {self.collective}, called " if self.collective else "is "
        line = f": {self.line}" if self.line else ""
        return f"{waits}at {self.at}{line}"


def place_of_main_thread(*, users_first: bool = False) -> Place:
    """Where this process's main thread stands; of another thread if only that waits in a collective.

    Args:
        users_first: name the innermost line of the user's code, where the thread has come from one.
    """
    frames = sys._current_frames()
    main = threading.main_thread().ident
    own = threading.get_ident()
    place = place_of(frames[main], users_first=users_first) if main in frames else Place("an unknown place")
    if not place.collective:
        others = (place_of(frame) for ident, frame in frames.items() if ident not in (main, own))
        return next((other for other in others if other.collective), place)
    return place


def place_of(frame: FrameType, *, users_first: bool = False) -> Place:
    """Where a thread with this innermost frame stands."""
    stack = _without_dispatch(list(_outwards(frame)))
    collective = ""
    for each in stack:
        if each.f_code.co_filename.endswith(AUTOGRAD):
            continue
        if DISTRIBUTED not in each.f_code.co_filename:
            break
        name = each.f_code.co_name
        collective = collective if name in WRAPPERS and collective else name
    named = [each for each in stack if not _is_library(each.f_code.co_filename)]
    if users_first:
        named.sort(key=lambda each: each.f_code.co_filename.startswith(PACKAGE))
    chosen = next(iter(named), stack[-1])
    code = chosen.f_code
    users = not code.co_filename.startswith(PACKAGE) and not _is_library(code.co_filename)
    line = linecache.getline(code.co_filename, chosen.f_lineno).strip()
    locked = any(LOCKS in each.f_code.co_filename for each in stack)
    return Place(f"{code.co_filename}:{chosen.f_lineno}, in {code.co_qualname}", line, collective, users, locked)


def _without_dispatch(stack: list[FrameType]) -> list[FrameType]:
    """A stack from a functional collective outwards, as those of DTensors; as it is where it ends in none.

    Such a collective is an operation of torch, which goes through Python's dispatch, and through the modes of
    `__torch_function__` that are on, before it waits.
    """
    for index, frame in enumerate(stack):
        code = frame.f_code
        if code.co_filename.endswith(FUNCTIONAL):
            return stack[index:]
        if DISPATCH not in code.co_filename and code.co_name != "__torch_function__":
            break
    return stack


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@cache
def _is_library(file: str) -> bool:
    return file.startswith(LIBRARIES) and not file.startswith(PACKAGE)


def stacks_of_all_threads() -> str:
    """The Python stacks of this process's threads, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"Thread {names.get(ident, ident)} (most recent call last):\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
        if ident != threading.get_ident()
    )


_on_signal: IO[bytes] | None = None


def write_on_signal() -> int:
    """See to it that `STACK_SIGNAL` writes the stacks into a file without a name; returns its descriptor.

    The writer is faulthandler's: it needs no lock of the interpreter, which code in C may hold for ever.
    """
    global _on_signal
    if sys.platform != "linux":
        return -1
    if _on_signal is None:
        _on_signal = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        faulthandler.register(STACK_SIGNAL, file=_on_signal, all_threads=True)
    return _on_signal.fileno()


def stacks_of(process: Identity, seconds: float = 1.0) -> str:
    """The stacks of another process of this machine, made to write them; "" if it does not in time."""
    if process.stacks < 0:
        return ""
    file = PROC / str(process.pid) / "fd" / str(process.stacks)
    process.send(STACK_SIGNAL)
    until, text = time.monotonic() + seconds, ""
    while time.monotonic() < until:
        time.sleep(0.05)
        try:
            now = file.read_text(errors="replace")
        except OSError:
            return text
        if now and now == text:
            break
        text = now
    return text


def place_in(stacks: str) -> str:
    """The innermost place outside of libraries in what faulthandler has written, in words.

    Of several threads it marks the one that holds the interpreter's lock as current; the main one is the last.
    """
    threads = re.split(r"^(?=(?:Current thread|Thread) )", stacks, flags=re.MULTILINE)
    thread = next((each for each in threads if each.startswith("Current")), threads[-1])
    found = re.findall(r'File "([^"]+)", line (\d+) in (.+)', thread)
    chosen = next((frame for frame in found if not _is_library(frame[0])), found[0] if found else None)
    return "in code without Python" if chosen is None else f"at {chosen[0]}:{chosen[1]}, in {chosen[2]}"
