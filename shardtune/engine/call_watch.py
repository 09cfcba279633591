"""Detects a call in which a rank waits in a collective that the others do not come to."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from shardtune.launch.watchdog.stacks import Place, place_of_main_thread
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
        board: which ranks have ended the call; None: each rank knows of itself alone.
    """

    def __init__(
        self, rank: int, seconds: float, on_stuck: Callable[[StandReport], None], board: Board | None = None
    ) -> None:
        self._rank = rank
        self._seconds = seconds
        self._on_stuck = on_stuck
        self._board = board
        self._method = ""
        self._number = 0
        if seconds:
            threading.Thread(target=self._watch, name="shardtune-call-watch", daemon=True).start()

    @contextmanager
    def during(self, method: str) -> Iterator[None]:
        """A call of a method."""
        self._number += 1
        self._method = method
        try:
            yield
        finally:
            self._method = ""
        if self._board is not None and self._seconds:
            self._board.end(self._number)

    def _watch(self) -> None:
        tick = min(1.0, max(0.05, (self._board.seconds if self._board else self._seconds) / 10))
        main = threading.main_thread().ident or 0
        pause = threading.Event()
        before, waited = (0, 0, 0), 0.0
        while not pause.wait(tick):
            frame = sys._current_frames().get(main)
            method = self._method
            if not method or frame is None:
                waited = self._go_on(waited)
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
        if self._board is None or waited < self._board.seconds or not place_of_main_thread().collective:
            return []
        self._board.wait(self._number)
        return self._board.ended(self._number) if waited > self._board.seconds + tick else []

    def _go_on(self, waited: float) -> float:
        """The main thread does not wait any longer; returns for how long it has waited since."""
        if self._board is not None and waited >= self._board.seconds:
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


class Board:
    """Which ranks have ended a call, and which wait in a collective of it, in the store of the process group.

    If one has ended it, and all others wait, they wait for ever: that is known long before the time of the watchdog.

    Args:
        rank: of this process.
        num_ranks: of the group.
        store: of the group.
        seconds: of waiting, after which a rank reports it.
    """

    def __init__(self, rank: int, num_ranks: int, store: dist.Store, seconds: float) -> None:
        self.seconds = seconds
        self._rank, self._num_ranks = rank, num_ranks
        self._store = dist.PrefixStore("shardtune/calls", store)
        self.end(0)
        self.wait(0)

    def end(self, number: int) -> None:
        """This rank has ended its call of this number."""
        self._store.set(f"ended/{self._rank}", str(number))

    def wait(self, number: int) -> None:
        """This rank waits in its call of this number; 0: it does not wait."""
        self._store.set(f"waits/{self._rank}", str(number))

    def ended(self, number: int) -> list[int]:
        """The ranks that have ended a call, if all others wait in it."""
        ended, waits = (
            [int(value) for value in self._store.multi_get([f"{what}/{rank}" for rank in range(self._num_ranks)])]
            for what in ("ended", "waits")
        )
        found = [rank for rank in range(self._num_ranks) if ended[rank] >= number]
        return found if all(rank in found or waits[rank] == number for rank in range(self._num_ranks)) else []


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
