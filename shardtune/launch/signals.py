"""Signals that stop a run, and the watch over a parent that may vanish."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from shardtune.errors import Interrupted

LAUNCHER_PID = "SHARDTUNE_LAUNCHER_PID"
"""The process that started this rank; it may be gone before this process can read its parent's id."""
PARENT_POLL_SECONDS = 0.25
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Whether SIGTERM or SIGINT has asked this process to stop, and what it does then.

    While nothing is there to be saved (start-up, tokenising, writing `final/`) the signal raises `Interrupted` wherever
    the main thread stands. Inside `deferred` it is only noted: training checks it where all ranks can stop together.
    The second SIGINT raises `KeyboardInterrupt` at once in any case.

    Attributes:
        asked: whether a signal came.
    """

    def __init__(self) -> None:
        self.asked = False
        self._deferred = False

    def check(self) -> None:
        """Raise `Interrupted` if a signal came: what its handler raised may have been lost in somebody's `except`."""
        if self.asked:
            raise Interrupted("stopped; all that was trained is saved, the same command continues")

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """For as long as something would be lost by stopping at once."""
        self.check()
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self._deferred:
            self.check()


_current: StopSignal | None = None


@contextmanager
def listening() -> Iterator[StopSignal]:
    """Let SIGTERM and SIGINT ask for a stop meanwhile; afterwards they do what they did before.

    Inside another `listening` it is that one's `StopSignal`. Only the main thread hears signals.
    """
    global _current
    if _current is not None and threading.current_thread() is threading.main_thread():
        yield _current
        return
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    _current = stop
    try:
        for number in SIGNALS:
            signal.signal(number, stop._ask)
        yield stop
    finally:
        _current = None
        for number, handler in before.items():
            signal.signal(number, handler)


_watching = False


def end_with_parent() -> None:
    """End this process, without saving, when its parent is gone: nobody reads its exit code or stops it any more.

    A rank left behind by a killed launcher would go on training, and save over the checkpoints of the run started anew.
    """
    global _watching
    if _watching:
        return
    _watching = True
    parent = int(os.environ.get(LAUNCHER_PID, os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="shardtune-parent-watch", daemon=True).start()
