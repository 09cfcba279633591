"""A watchdog per rank: without progress it writes stacks, names the rank that differs, and ends the run.

While training goes on it reads one counter of its own process, so it costs nothing, on any number of ranks. A rank that
stands for too long writes its stacks into a file and a report into the rendezvous store; the ranks that wait for it do
the same. The first of them reads all reports, judges (`verdict.py`), and every rank ends with the same code.

At the start ranks have unequal work and nothing to count. There a rank is stuck that does not wait for others, and that
for long has not used a processor or a disk, nor has a process that it has started; it ends by itself.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from shardtune.launch.events import write_last_event
from shardtune.launch.exit_codes import note_exit_code
from shardtune.launch.local import RanksStuck, is_launched, write_report
from shardtune.launch.progress import PROGRESS, START, Phase
from shardtune.launch.signals import StopSignal
from shardtune.launch.watchdog.processes import ENDED, STOPPED, Identity, own_identity, own_work
from shardtune.launch.watchdog.stacks import (
    place_in,
    place_of_main_thread,
    stacks_of,
    stacks_of_all_threads,
    write_on_signal,
)
from shardtune.launch.watchdog.verdict import StandReport, Verdict, describe, judge

STOP_SECONDS = 10.0
"""Without progress for so long (or five times the usual) after a stop signal, a run counts as stuck."""
USUAL = 5.0
GRACE_SECONDS = 15.0
"""How long the other ranks may take at most to report."""
RAISED_SECONDS = 5.0
FOLDER = "stuck"


_current: Watchdog | None = None


def ended_peers(seconds: float = 1.0) -> str:
    """The ranks of this host whose processes have ended, in words; waits for the first a little. "" without any."""
    until = time.monotonic() + seconds
    while _current is not None:
        gone = _current.ended()
        if gone:
            return f"rank {gone[0]}" if len(gone) == 1 else f"each of the ranks {', '.join(map(str, gone))}"
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return ""


class Watchdog:
    """Watches this process's progress in a thread of its own; `end` ends it.

    Args:
        seconds: without progress after which the run counts as stuck; long phases have a multiple of it.
        folder: where stacks are written.
        stop: the run's stop requests: a stuck run that is stopped ends within seconds.
        goes_on: completes the message, with the last checkpoint.
        issued: the number of collectives that this process has called.
        rank_0_serves: whether the rendezvous store ends with rank 0.
    """

    def __init__(
        self,
        seconds: float,
        folder: Path,
        stop: StopSignal,
        *,
        goes_on: Callable[[], str],
        issued: Callable[[], int] = lambda: 0,
        rank_0_serves: bool = True,
    ) -> None:
        self._seconds = seconds
        self._folder = folder
        self._stop = stop
        self._goes_on = goes_on
        self._issued = issued
        self._rank_0_serves = rank_0_serves
        self._rank = int(os.environ.get("RANK", "0"))
        self.identity = own_identity(socket.gethostname(), write_on_signal())
        self._all: Sequence[Identity] = [self.identity]
        self._done = threading.Event()
        self._work, self._looked_at = own_work(), time.monotonic()
        self._grace = min(GRACE_SECONDS, max(3.0, seconds / 4))
        global _current
        _current = self
        self._thread = threading.Thread(target=self._watch, name="shardtune-watchdog", daemon=True)
        if seconds:
            self._thread.start()

    def meet(self, identities: Sequence[Identity]) -> None:
        """The processes of all ranks, in rank order."""
        self._all = identities

    def ended(self) -> list[int]:
        """The ranks of this host whose processes have ended."""
        return [rank for rank, each in enumerate(self._all) if self.identity.is_near(each) and each.state == ENDED]

    def end(self) -> None:
        """Stop watching."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(RAISED_SECONDS)

    def _watch(self) -> None:
        tick = min(1.0, max(0.05, self._seconds / 20))
        seen, stood, longest, stopping = PROGRESS.beats, 0.0, 0.0, 0.0
        last = time.monotonic()
        while not self._done.wait(tick):
            now = time.monotonic()
            passed, last = min(now - last, 3 * tick), now  # the time in which all of it was suspended does not count
            phase, beats = PROGRESS.phase, PROGRESS.beats
            if beats != seen:
                longest = max(longest, stood) if phase.patience == 1 else longest
                seen, stood = beats, 0.0
            stood += passed
            if phase is START and self._has_worked(now):
                stood = 0.0
            stopping += passed if self._stop.arrived() else 0.0
            if stopping and phase is START and stopping > STOP_SECONDS:
                _leave(75)  # there is nothing to save, and the main thread does not come back from where it is
            if stood > self._limit(phase, stopping, longest):
                if phase is not START:
                    self._stuck(phase, stood)
                    return
                if self._stuck_alone(phase, stood):
                    return
                stood = 0.0

    def _has_worked(self, now: float) -> bool:
        """Whether this process, or one that it has started, has worked since the last look, some seconds ago."""
        seconds = now - self._looked_at
        if seconds < max(1.0, self._seconds / 10):
            return False
        before, self._work, self._looked_at = self._work, own_work(), now
        return self._work is None or before is None or self._work.differs(before, seconds)

    def _limit(self, phase: Phase, stopping: float, longest: float) -> float:
        if not phase.patience:
            return float("inf")
        if stopping > STOP_SECONDS / 2 and phase.patience == 1:
            return min(self._seconds, max(STOP_SECONDS, USUAL * longest))
        return self._seconds * phase.patience

    def _stuck_alone(self, phase: Phase, stood: float) -> bool:
        """End with this rank's own verdict, unless it waits for others: at the start they may not have met."""
        own, ranks = self._report(phase, stood), int(os.environ.get("WORLD_SIZE", "1"))
        if own.collective or place_of_main_thread().for_lock:
            return False
        self._write_stacks(self._rank, stacks_of_all_threads())
        verdict = Verdict((self._rank,), "neither computes nor reads nor writes" if ranks > 1 else "")
        message = self._completed(describe(verdict, {self._rank: own}, {}, num_ranks=ranks))
        if ranks > 1:
            self._tell(message, [])
            _leave()
        self._raise(message)
        return True

    def _stuck(self, phase: Phase, stood: float) -> None:
        own = self._report(phase, stood)
        self._write_stacks(self._rank, stacks_of_all_threads())
        if len(self._all) == 1:
            self._raise(self._message({self._rank: own}, []))
            return
        agreed: list[tuple[str, list[int], bool]] = []
        asking = threading.Thread(target=lambda: agreed.append(self._agree(own)), daemon=True)
        asking.start()
        asking.join(5 * self._grace)  # the host of the store may be cut off or stopped
        message, silent, is_judge = agreed[0] if agreed else self._alone(own)
        self._end_silent(silent)
        if is_judge:
            self._tell(message, silent)
        _leave()

    def _tell(self, message: str, silent: Sequence[int]) -> None:
        """Give the message of all ranks to the launcher, or print it."""
        self._record(message)
        if is_launched():
            write_report(self._rank, RanksStuck(message, silent), message)
        else:
            print(f"rank {self._rank}: error: {message}", file=sys.stderr, flush=True)

    def _report(self, phase: Phase, stood: float) -> StandReport:
        place = place_of_main_thread()
        here = {rank: each.describe() for rank, each in enumerate(self._all) if self.identity.is_near(each)}
        return StandReport(
            rank=self._rank,
            host=self.identity.host,
            seconds=stood,
            phase=phase.name,
            step=PROGRESS.step,
            rounds=PROGRESS.rounds,
            begun=PROGRESS.begun,
            micro_batch=PROGRESS.micro_batch,
            micro_batches=PROGRESS.micro_batches,
            beats=PROGRESS.beats,
            place=str(place),
            collective=place.collective,
            in_users=place.in_users,
            issued=self._issued(),
            neighbours={rank: state for rank, state in here.items() if rank != self._rank},
        )

    def _agree(self, own: StandReport) -> tuple[str, list[int], bool]:
        """The verdict of all ranks: the message, the ranks that have not reported, and whether this rank judges."""
        grace = self._grace
        try:
            if self._rank_0_serves and self._cannot_run(self._all[0]):
                raise RuntimeError
            store = _connect(grace)
            prefix = "shardtune/stuck/{0.host}/{0.pid}/{0.born}".format(self._all[0])
            store.set(f"{prefix}/{self._rank}", own.to_json())
            if store.add(f"{prefix}/judges", 1) == 1:
                reports, silent = self._collect(store, prefix, grace)
                message = self._message(reports, silent)
                store.set(f"{prefix}/silent", ",".join(map(str, silent)))
                return message, silent, True
            store.wait([f"{prefix}/silent"], timedelta(seconds=3 * grace))
            numbers = store.get(f"{prefix}/silent").decode()
            return "", [int(number) for number in numbers.split(",") if number], False
        except RuntimeError:  # the store is gone
            return self._alone(own)

    def _alone(self, own: StandReport) -> tuple[str, list[int], bool]:
        """This rank's own verdict, where rank 0 does not serve the store any more."""
        silent = [rank for rank, each in enumerate(self._all) if self._cannot_run(each)] or [0]
        silent = [rank for rank in silent if rank != self._rank]
        return self._message({self._rank: own}, silent), silent, True

    def _collect(self, store: dist.Store, prefix: str, grace: float) -> tuple[dict[int, StandReport], list[int]]:
        """The reports of all ranks that write one in time; those that cannot run are not waited for."""
        ranks = range(len(self._all))
        expected = [rank for rank in ranks if not self._cannot_run(self._all[rank])]
        until = time.monotonic() + grace
        while time.monotonic() < until and not store.check([f"{prefix}/{rank}" for rank in expected]):
            time.sleep(0.1)
        there = [rank for rank in ranks if store.check([f"{prefix}/{rank}"])]
        found = {rank: StandReport.from_json(store.get(f"{prefix}/{rank}").decode()) for rank in there}
        return found, [rank for rank in ranks if rank not in found]

    def _cannot_run(self, process: Identity) -> bool:
        return self.identity.is_near(process) and process.state in {*STOPPED, ENDED}

    def _message(self, reports: dict[int, StandReport], silent: Sequence[int]) -> str:
        states = {rank: self._state(rank, reports.values()) for rank in silent}
        return self._completed(describe(judge(reports, silent), reports, states, num_ranks=len(self._all)))

    def _completed(self, text: str) -> str:
        return (
            f"{text}\n  stacks: {self._folder}/rank_*.txt\n  {self._goes_on()} (runner.watchdog_seconds is "
            f"{self._seconds:g})"
        )

    def _state(self, rank: int, reports: Iterable[StandReport]) -> str:
        """What is known of a rank that has not reported: its place, or its state as the system shows it."""
        process = self._all[rank]
        if self.identity.is_near(process):
            text = stacks_of(process)
            if text:
                self._write_stacks(rank, text)
                return f"runs no Python code, and is {place_in(text)}"
        seen = (report.neighbours[rank] for report in reports if rank in report.neighbours)
        return next(seen, f"on {process.host} has reported nothing")

    def _end_silent(self, silent: Sequence[int]) -> None:
        """Kill ranks of this host that cannot run: no signal reaches them."""
        for rank in silent:
            if self.identity.is_near(self._all[rank]):
                if not (self._folder / f"rank_{rank}.txt").exists():
                    text = stacks_of(self._all[rank])
                    self._write_stacks(rank, text or f"rank {rank} {self._all[rank].describe()}\n")
                self._all[rank].kill()

    def _record(self, message: str) -> None:
        write_last_event(self._folder.parent, "stuck", step=PROGRESS.step, ranks=len(self._all), reason=message)

    def _write_stacks(self, rank: int, text: str) -> None:
        with suppress(OSError):  # a disk that hangs or is full may be the cause
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"rank_{rank}.txt").write_text(text)

    def _raise(self, message: str) -> None:
        """Raise the error in the main thread of this only process; end the process where that does not work."""
        self._record(message)
        for _ in range(3):
            self._stop.fail(RanksStuck(message, ()))
            if self._done.wait(RAISED_SECONDS):
                return
        print(f"error: {message}", file=sys.stderr, flush=True)
        if self._stop.own_process:
            _leave()


def _leave(code: int = RanksStuck.exit_code) -> NoReturn:
    note_exit_code(code)
    os._exit(code)


def _connect(seconds: float) -> dist.Store:
    """A connection of its own to the rendezvous store: the group's may be blocked by the main thread."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None or port is None:
        raise RuntimeError
    return dist.TCPStore(
        address, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds)
    )
