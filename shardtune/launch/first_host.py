"""The first host, at whose store torchrun's agents meet: without it no ranks can be started again.

An agent that reads from the store of a host without power waits until TCP gives up, a quarter of an hour. So a thread
of each agent connects to the store's port from time to time. Once nothing answers there for too long, and none of the
agent's ranks runs any more, the agent ends.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

LOST_SECONDS = 60.0
"""Without an answer for so long the first host is lost."""
ATTEMPTS = 3
"""To connect, within that time."""
WAITING_SECONDS = 15.0
"""Without ranks for so long at the start, the agent reports what it waits for."""


class FirstHostWatch:
    """Ends an agent of torchrun that has no ranks any more once the first host is lost.

    Args:
        host: name or address of the first host.
        port: of its store.
        leave: ends this process; called in another thread than the main one, which may be blocked.
        report: reports that no ranks have been started yet; receives whether the first host has answered.
        seconds: without an answer.

    Attributes:
        met: whether the first host has answered.
    """

    def __init__(
        self,
        host: str,
        port: int,
        leave: Callable[[], None],
        report: Callable[[bool], None],
        seconds: float = LOST_SECONDS,
    ) -> None:
        self._address = host, port
        self._leave = leave
        self._report = report
        self._seconds = seconds / ATTEMPTS / 2  # between two attempts, and of one at most
        self._done = threading.Event()
        self.met = False
        threading.Thread(target=self._watch, name="shardtune-first-host", daemon=True).start()

    def end(self) -> None:
        """Stop watching: the agent ends by itself."""
        self._done.set()

    def _watch(self) -> None:
        missed, waits_until = 0, time.monotonic() + WAITING_SECONDS
        while not self._done.is_set():
            try:
                socket.create_connection(self._address, timeout=self._seconds).close()
                self.met, missed = True, 0
            except OSError:
                missed += 1
            alone = not _children_run()
            if self.met and missed >= ATTEMPTS and alone and not self._done.is_set():
                self._leave()
            if time.monotonic() > waits_until:
                waits_until = math.inf
                if alone:
                    self._report(self.met)
            self._done.wait(self._seconds if self.met else min(self._seconds, 1.0))


def _children_run() -> bool:
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has ended since
            if child.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
