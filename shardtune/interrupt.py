"""Signals that ask a run to stop, and the watch over a parent that may vanish."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

PARENT_POLL_SECONDS = 1.0


class StopSignal:
    """Whether SIGTERM or SIGINT has asked this process to stop. The second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """Take over both signals; only the main thread may."""
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True


def end_with_parent() -> None:
    """End this process, without saving, when its parent is gone: nobody reads its exit code or stops it any more.

    A rank left behind by a killed launcher would go on training, and save over the checkpoints of the run started anew.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="shardtune-parent-watch", daemon=True).start()
