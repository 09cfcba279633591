"""Ranks as processes on this machine."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import cast

from shardtune.engine.call_watch import RETURNED, SILENT, explain
from shardtune.engine.pickling import pack, unpack
from shardtune.engine.rank_process import Failure, Host, Limits, Meeting, Outcome, Request, failure_of
from shardtune.engine.ranks import GRACE_SECONDS, Team, raise_failure, stuck_error
from shardtune.launch.cores import threads_of_rank
from shardtune.launch.local import free_port
from shardtune.launch.module_process import module_command
from shardtune.launch.watchdog.verdict import StandReport

END_SECONDS = 5.0


class LocalRanks(Team):
    """One child process per rank; they end with this process.

    Args:
        num_ranks: the number of ranks.
        device: auto | cpu | cuda.
        first_gpu: of this machine, for rank 0; the others get the next ones.
        limits: on waiting.
    """

    def __init__(self, num_ranks: int, device: str, first_gpu: int, limits: Limits) -> None:
        super().__init__(num_ranks)
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._number = 0
        atexit.register(self.close)
        for _ in range(num_ranks):
            self._start()
        threads = 0 if "OMP_NUM_THREADS" in os.environ else threads_of_rank(num_ranks)
        meeting = Meeting(0, num_ranks, port=free_port(None), device=device, threads=threads, limits=limits)
        paths = list(sys.path)
        messages = [
            pack((paths, replace(meeting, rank=rank, local_rank=first_gpu + rank))) for rank in range(num_ranks)
        ]
        self._check([outcome.failure for outcome in self._exchange(messages)])

    def _start(self) -> None:
        here, there = socket.socketpair()
        with there:
            process = subprocess.Popen(
                module_command("shardtune.engine.ranks_local", str(there.fileno())),
                pass_fds=[there.fileno()],
                start_new_session=True,  # Ctrl-C is for the caller
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self._ranks.append(process)
        self._pipes.append(Connection(here.detach()))

    def _check(self, failures: Sequence[Failure | None]) -> None:
        found = [failure for failure in failures if failure is not None]
        if found:
            self.close()
            raise_failure(found)

    def _send(self, requests: Sequence[Request]) -> list[Outcome]:
        return self._exchange([pack(request) for request in requests])

    def _exchange(self, messages: Sequence[bytes]) -> list[Outcome]:
        """Send each rank its message, and wait for the replies."""
        self._number += 1
        lost: dict[int, str] = {}
        for rank, (pipe, message) in enumerate(zip(self._pipes, messages, strict=True)):
            try:
                pipe.send_bytes(self._number.to_bytes(8, "big") + message)
            except OSError:
                lost[rank] = self._how_it_ended(rank)
        found: dict[int, Outcome] = {}
        open_ranks = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in lost}
        until = time.monotonic() + GRACE_SECONDS if lost else None
        while open_ranks:
            left = None if until is None else until - time.monotonic()
            ready = wait(list(open_ranks), None if left is None else max(0.0, left))
            if not ready:
                break
            for pipe in cast(list[Connection], ready):
                rank = open_ranks[pipe]
                try:
                    answer = pipe.recv_bytes()
                except (EOFError, OSError):
                    lost[rank] = self._how_it_ended(rank)
                    del open_ranks[pipe]
                    until = min(until or float("inf"), time.monotonic() + GRACE_SECONDS / 4)
                    continue
                if int.from_bytes(answer[:8], "big") != self._number:
                    continue  # the reply to an abandoned call
                found[rank] = unpack(answer[8:])
                del open_ranks[pipe]
                if found[rank].failure is not None and until is None:
                    until = time.monotonic() + GRACE_SECONDS
        return self._judge(found, lost, sorted(open_ranks.values()))

    def _judge(self, found: dict[int, Outcome], lost: dict[int, str], stuck: list[int]) -> list[Outcome]:
        """Check the outcomes, and whether the ranks can still be used."""
        stands = stands_of(found)
        if stands and not lost:
            others = {rank: RETURNED for rank in found if rank not in stands} or dict.fromkeys(stuck, SILENT)
            error = stuck_error(explain(stands, others, self.num_ranks))
            self.dead = error.what.splitlines()[0]
            self.close()
            return [Outcome(failure=Failure(rank, error, str(error), False)) for rank in range(self.num_ranks)]
        if lost or stuck:
            rank, what = (
                next(iter(lost.items())) if lost else (stuck[0], "waits for another that has failed, and was ended")
            )
            self.dead = f"rank {rank} {what}"
            self.close()
        lost |= dict.fromkeys(stuck, "waited for another that has failed, and was ended")
        gone = {
            rank: Outcome(
                failure=Failure(rank, None, f"rank {rank} {what}", rank in stuck or bool(found_failure(found)))
            )
            for rank, what in lost.items()
        }
        return [{**found, **gone}[rank] for rank in range(self.num_ranks)]

    def _how_it_ended(self, rank: int) -> str:
        try:
            code = self._ranks[rank].wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def close(self) -> None:
        super().close()
        for pipe in self._pipes:
            pipe.close()
        until = time.monotonic() + (END_SECONDS if self.dead == "it was closed" else 0.0)
        for process in self._ranks:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        atexit.unregister(self.close)


def stands_of(found: Mapping[int, Outcome]) -> dict[int, StandReport]:
    """The reports of the ranks that wait in vain."""
    failures = {rank: outcome.failure for rank, outcome in found.items()}
    return {rank: failure.stands for rank, failure in failures.items() if failure and failure.stands}


def found_failure(found: dict[int, Outcome]) -> Failure | None:
    """The first real failure among outcomes."""
    failures = (outcome.failure for outcome in found.values() if outcome.failure is not None)
    return next((failure for failure in failures if not failure.consequence), None)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _answer_stuck(pipe: Connection, number: bytes, report: StandReport) -> None:
    """Answer a call from which the main thread does not return; the caller ends this process."""
    pipe.send_bytes(number + pack(Outcome(failure=Failure(report.rank, None, "", False, report))))


def main() -> None:
    """The main loop of a rank: join the team, then serve requests from the pipe until it is closed."""
    pipe = Connection(int(sys.argv[1]))
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    host: Host | None = None
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            break
        number, body = message[:8], message[8:]
        if host is None:
            paths, meeting = unpack(body)
            sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
            try:
                host = Host.join(meeting)
                answer = pack(Outcome())
            except Exception as error:
                answer = pack(Outcome(failure=failure_of(meeting.rank, error)))
        else:
            host.on_stuck = partial(_answer_stuck, pipe, number)
            answer = host.answer(body)
        try:
            pipe.send_bytes(number + answer)
        except OSError:
            break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without taking the group down: other ranks may have ended before


if __name__ == "__main__":
    main()
