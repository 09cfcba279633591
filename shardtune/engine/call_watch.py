"""Detects a call in which a rank waits in a collective that the others do not come to."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from shardtune.engine.call_board import CallBoard
from shardtune.launch.watchdog.stacks import Place, place_of_main_thread
from shardtune.launch.watchdog.verdict import StandReport, Verdict, describe, judge
from shardtune.parallel.torch_private.processes import collectives_issued

RETURNED = "has returned from the call, in which the others wait for it"
SILENT = "does not come to the collective in which the others wait"


class CallWatch:
    """A thread that calls `on_stuck` once the main thread has waited in one collective of a call for too long.

    A method may compute for hours; only one that waits for other ranks counts.

    Args:
        rank: of this process.
        seconds: in one collective; 0: no limit.
        on_stuck: receives where the rank stands.
        board: which ranks have ended the call, which those that wait in it for all others do without long before the
            time is over; None: each rank knows of itself alone.
        ended_seconds: in one collective, after which a rank reads it.
    """

    def __init__(
        self,
        rank: int,
        seconds: float,
        on_stuck: Callable[[StandReport], None],
        board: CallBoard | None = None,
        ended_seconds: float = 0.0,
    ) -> None:
        self._rank = rank
        self._seconds = seconds
        self._ended_seconds = min(seconds, ended_seconds)
        self._on_stuck = on_stuck
        self._board = board
        self._method = ""
        self._number = 0
        self._running = threading.Event()
        if seconds:
            threading.Thread(target=self._watch, name="shardtune-call-watch", daemon=True).start()

    @contextmanager
    def during(self, method: str, number: int) -> Iterator[None]:
        """A call of a method."""
        self._number, self._method = number, method
        self._running.set()
        try:
            yield
        finally:
            self._running.clear()
            self._method = ""

    def _watch(self) -> None:
        tick = min(1.0, max(0.05, (self._ended_seconds if self._board else self._seconds) / 10))
        main = threading.main_thread().ident or 0
        pause = threading.Event()
        before, waited = (0, 0, 0), 0.0
        while not pause.wait(tick):
            frame = sys._current_frames().get(main)
            method = self._method
            if not method or frame is None:
                waited = self._go_on(waited)
                self._running.wait()  # between calls it costs nothing
                continue
            now = id(frame), frame.f_lasti, collectives_issued()
            waited, before = (waited + tick if now == before else self._go_on(waited)), now
            ended = self._alone(waited, tick)
            if ended or waited > self._seconds:
                place = place_of_main_thread(users_first=True)
                if place.collective:
                    self._on_stuck(self._report(waited, method, place, dict.fromkeys(ended, RETURNED)))
                    return
                waited = self._go_on(waited)

    def _alone(self, waited: float, tick: float) -> list[int]:
        """The ranks that have ended the call, if all others have waited for some time; twice in turn, to be sure."""
        if self._board is None or waited < self._ended_seconds or not place_of_main_thread().collective:
            return []
        self._board.wait(self._number)
        return self._board.ended(self._number) if waited > self._ended_seconds + tick else []

    def _go_on(self, waited: float) -> float:
        """The main thread does not wait any longer; returns for how long it has waited since."""
        if self._board is not None and waited >= self._ended_seconds:
            self._board.wait(0)
        return 0.0

    def _report(self, waited: float, method: str, place: Place, others: Mapping[int, str]) -> StandReport:
        return StandReport(
            rank=self._rank,
            host=socket.gethostname(),
            seconds=waited,
            phase=f"the call of {method}",
            step=0,
            beats=0,
            place=str(place),
            collective=place.collective,
            in_users=place.in_users,
            issued=collectives_issued(),
            neighbours=others,
        )


def end_rank(report: StandReport) -> None:
    """Print where this rank stands and end it: the launcher ends the others."""
    known = 1 + len(report.neighbours)
    print(
        f"rank {report.rank}: error: {explain({report.rank: report}, report.neighbours, known)}",
        file=sys.stderr,
        flush=True,
    )
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
