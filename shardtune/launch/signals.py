"""Signals that stop a run, and a watchdog for a vanished parent process."""

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
"""Id of the process that started this rank; it may have ended before this process can read its parent's id."""
PARENT_POLL_SECONDS = 0.25
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Records SIGTERM and SIGINT, and stops this process at a safe point.

    While there is nothing to save (start-up, tokenising, writing `final/`) the signal raises `Interrupted` at once in
    the main thread. Inside `deferred` it is only recorded: training polls it where all ranks can stop together. A
    SIGINT after an earlier signal always raises `KeyboardInterrupt` at once.

    Attributes:
        requested: whether a signal was received.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False

    def check(self) -> None:
        """Raise `Interrupted` if a signal was received: the handler's exception may have been caught by other code."""
        if self.requested:
            raise Interrupted("stopped; all that was trained is saved, the same command continues")

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only record signals inside: stopping at once would lose work."""
        self.check()
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self._deferred:
            self.check()


_current: StopSignal | None = None


@contextmanager
def listening() -> Iterator[StopSignal]:
    """Handle SIGTERM and SIGINT as stop requests inside; the previous handlers are restored afterwards.

    A nested `listening` yields the outer one's `StopSignal`. Only the main thread receives signals.
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
            signal.signal(number, stop._on_signal)
        yield stop
    finally:
        _current = None
        for number, handler in before.items():
            signal.signal(number, handler)


_watching = False


def end_with_parent() -> None:
    """End this process, without saving, once its parent has ended: nothing reads its exit code or stops it any more.

    An orphaned rank of a killed launcher would continue training and overwrite the checkpoints of the restarted run.
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
