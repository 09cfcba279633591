"""Detects a call in which a rank waits in a collective that the others do not come to."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from shardtune.launch.watchdog.stacks import place_of_main_thread
from shardtune.launch.watchdog.verdict import StandReport, Verdict, describe, judge
from shardtune.parallel.torch_private import collectives_issued

RETURNED = "has returned from the call, in which the others wait for it"
SILENT = "does not come to the collective in which the others wait"


class CallWatch:
    """A thread that calls `on_stuck` once the main thread has waited in one collective of a call for too long.

    A method may compute for hours; only one that waits for other ranks counts.

    Args:
        rank: of this process.
        seconds: in one collective; 0: no limit.
        on_stuck: receives where the rank stands.
    """

    def __init__(self, rank: int, seconds: float, on_stuck: Callable[[StandReport], None]) -> None:
        self._rank = rank
        self._seconds = seconds
        self._on_stuck = on_stuck
        self._method = ""
        if seconds:
            threading.Thread(target=self._watch, name="shardtune-call-watch", daemon=True).start()

    @contextmanager
    def during(self, method: str) -> Iterator[None]:
        """A call of a method."""
        self._method = method
        try:
            yield
        finally:
            self._method = ""

    def _watch(self) -> None:
        tick = min(1.0, max(0.05, self._seconds / 20))
        main = threading.main_thread().ident or 0
        pause = threading.Event()
        before, waited = (0, 0, 0), 0.0
        while not pause.wait(tick):
            frame = sys._current_frames().get(main)
            method = self._method
            if not method or frame is None:
                waited = 0.0
                continue
            now = id(frame), frame.f_lasti, collectives_issued()
            waited, before = (waited + tick if now == before else 0.0), now
            if waited > self._seconds:
                place = place_of_main_thread()
                if place.collective:
                    self._on_stuck(self._report(waited, method, str(place), place.collective, place.in_users))
                    return
                waited = 0.0

    def _report(self, waited: float, method: str, place: str, collective: str, in_users: bool) -> StandReport:
        return StandReport(
            rank=self._rank,
            host=socket.gethostname(),
            seconds=waited,
            phase=f"the call of {method}",
            step=0,
            beats=0,
            place=place,
            collective=collective,
            in_users=in_users,
            issued=collectives_issued(),
        )


def end_rank(report: StandReport) -> None:
    """Print where this rank stands and end it: the launcher ends the others."""
    print(f"rank {report.rank}: error: {explain({report.rank: report}, {}, 1)}", file=sys.stderr, flush=True)
    os._exit(76)


def explain(reports: Mapping[int, StandReport], others: Mapping[int, str], num_ranks: int) -> str:
    """The message for a stuck call.

    Args:
        reports: of the ranks that wait in a collective.
        others: what the other ranks do, in words.
        num_ranks: of the engine.
    """
    found = Verdict(tuple(others), next(iter(others.values()))) if others else judge(reports, [])
    return describe(found, reports, others, num_ranks=num_ranks)
