"""Signals to a command that has nothing to save: one message, also while modules are imported.

An exception out of a signal's handler in the middle of an import is raised inside code of others, which may swallow it,
turn it into an error of its own, or crash, as torch's bindings do.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from shardtune.errors import Interrupted
from shardtune.launch.signals import NOTHING_TRAINED, is_supervised

IMPORTS = "<frozen importlib._bootstrap>"
HERE = str(Path(__file__).parent)
AGAIN_SECONDS = 0.05
_before: dict[signal.Signals, Any] = {}
"""The handlers that `stop_at_once` has replaced."""


def handle_interrupts() -> None:
    """Let SIGINT wait for the end of an import, except where a caller or `nohup` has a handler for it.

    A command whose own first imports are under way has made nothing yet, and ends at once.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def stop_at_once() -> None:
    """Until `signals_as_usual`, let signals end a training with the message and the code of a stop.

    Ranks are left out: their launcher has the message. So is a signal that a caller or `nohup` handles.
    """
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGQUIT: signal.SIG_DFL, signal.SIGINT: _on_interrupt}
    if sys.argv[1:2] == ["train"] and not is_supervised():
        _before.update({number: usual[number] for number in usual if signal.getsignal(number) == usual[number]})
    for number in _before:
        signal.signal(number, _stop_at_once)


def signals_as_usual() -> None:
    """Take back what `stop_at_once` has done, in the command itself."""
    while _before:
        number, handler = _before.popitem()
        signal.signal(number, handler)


def _stop_at_once(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(OSError):  # a terminal that is gone
        print(NOTHING_TRAINED, file=sys.stderr, flush=True)
    os._exit(Interrupted.exit_code)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    files = list(_files(frame))
    if IMPORTS not in files:
        raise KeyboardInterrupt
    first = len(files) - files[::-1].index(IMPORTS)
    if files[first].startswith(HERE) and not is_supervised():
        with suppress(OSError):  # a terminal that is gone
            clear = "\r\x1b[K" if sys.stderr.isatty() else ""
            print(f"{clear}error: interrupted", file=sys.stderr, flush=True)
        os._exit(1)
    again = threading.Timer(AGAIN_SECONDS, signal.pthread_kill, (threading.main_thread().ident, number))
    again.daemon = True
    again.start()


def _files(frame: FrameType | None) -> Iterator[str]:
    """The source files of a frame and of its callers, outwards."""
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back
