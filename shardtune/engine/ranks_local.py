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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import cast

from shardtune.engine.interrupts import held_interrupts
from shardtune.engine.pickling import pack, unpack
from shardtune.engine.rank_process import Failure, Host, Limits, Meeting, Outcome, Request, failure_of
from shardtune.engine.ranks import GRACE_SECONDS, raise_failure
from shardtune.engine.ranks_remote import RemoteRanks, stuck_outcome
from shardtune.errors import ParallelError
from shardtune.launch.cores import threads_of_rank, waiting
from shardtune.launch.module_process import module_command
from shardtune.launch.port import free_port
from shardtune.launch.watchdog.verdict import StandReport

END_SECONDS = 5.0


class LocalRanks(RemoteRanks):
    """One child process per rank; they end with this process.

    Args:
        num_ranks: the number of ranks.
        device: auto | cpu | cuda.
        first_gpu: of this machine, for rank 0; the others get the next ones.
        limits: on waiting.

    Attributes:
        gpus: of this machine, that the ranks use where it has any.
    """

    def __init__(self, num_ranks: int, device: str, first_gpu: int, limits: Limits) -> None:
        super().__init__(num_ranks)
        self.gpus = range(first_gpu, first_gpu + num_ranks)
        self._process = os.getpid()
        self._abandoned: set[str] = set()
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._ends: list[socket.socket] = []
        self._number = 0
        self._waiting = waiting(os.environ)
        atexit.register(self.close)
        for _ in range(num_ranks):
            self._start()
        threads = 0 if "OMP_NUM_THREADS" in os.environ else threads_of_rank(num_ranks)
        self._port = free_port(None)
        meeting = Meeting(0, num_ranks, port=self._port, device=device, threads=threads, limits=limits)
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
                env={**os.environ, **self._waiting, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        end = here.dup()
        threading.Thread(target=_end_with, args=(process, end), daemon=True).start()
        self._ranks.append(process)
        self._ends.append(end)
        self._pipes.append(Connection(here.detach()))

    def _check(self, failures: Sequence[Failure | None]) -> None:
        found = [failure for failure in failures if failure is not None]
        if found:
            self.close()
            raise_failure(found)

    def _send(self, requests: Sequence[Request]) -> list[Outcome]:
        return self._exchange([pack(request) for request in requests])

    @property
    def _address(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    def _exchange(self, messages: Sequence[bytes]) -> list[Outcome]:
        """Send each rank its message, and wait for the replies."""
        if os.getpid() != self._process:
            raise ParallelError(
                f"the ranks of this engine are those of process {self._process}, and this is a fork of it",
                where="a call in a forked process",
                remedy="call the engine where it was built, or build one in this process",
            )
        self.in_order = False
        with held_interrupts():
            self._send_all(messages)
            self.in_order = True
        found = self._wait(None)
        assert found is not None
        return found

    def _send_all(self, messages: Sequence[bytes]) -> None:
        self._number += 1
        self._replies = replies = _Replies({}, {}, {})
        for rank, (pipe, message) in enumerate(zip(self._pipes, messages, strict=True)):
            try:
                pipe.send_bytes(self._number.to_bytes(8, "big") + message)
                replies.missing[pipe] = rank
            except OSError:
                replies.lost[rank] = self._how_it_ended(rank)
        replies.until = time.monotonic() + GRACE_SECONDS if replies.lost else None

    def _wait(self, seconds: float | None) -> list[Outcome] | None:
        replies, end = self._replies, None if seconds is None else time.monotonic() + seconds
        while replies.missing:
            ends = [at for at in (replies.until, end) if at is not None]
            ready = wait(list(replies.missing), max(0.0, min(ends) - time.monotonic()) if ends else None)
            if not ready and replies.until is not None and time.monotonic() >= replies.until:
                break
            if not ready:
                return None
            self.in_order = False
            with held_interrupts():
                for pipe in cast(list[Connection], ready):
                    self._read(pipe, replies)
                self.in_order = True
        return self._judge(replies.found, replies.lost, sorted(replies.missing.values()))

    def _read(self, pipe: Connection, replies: _Replies) -> None:
        """Take a rank's reply."""
        rank = replies.missing[pipe]
        try:
            answer = pipe.recv_bytes()
        except (EOFError, OSError):
            replies.lost[rank] = self._how_it_ended(rank)
            del replies.missing[pipe]
            replies.until = min(replies.until or float("inf"), time.monotonic() + GRACE_SECONDS / 4)
            return
        if int.from_bytes(answer[:8], "big") != self._number:
            return  # the reply to an abandoned call
        replies.found[rank] = unpack(answer[8:])
        del replies.missing[pipe]
        if replies.found[rank].failure is not None and replies.until is None:
            replies.until = time.monotonic() + GRACE_SECONDS

    def _judge(self, found: dict[int, Outcome], lost: dict[int, str], stuck: list[int]) -> list[Outcome]:
        """Check the outcomes, and whether the ranks can still be used."""
        if not lost and (ended := self._end_stuck(found, stuck)) is not None:
            return ended
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

    def abandon(self, engine: str) -> None:
        """Nothing refers to an engine any more, which was not closed; the ranks end with the last one.

        Python may call this in the middle of anything, so that no message is sent.
        """
        self._abandoned.add(engine)
        if self._abandoned.issuperset(self.engines) and not self.dead:
            self.close()

    def close(self) -> None:
        super().close()
        if os.getpid() != self._process:  # a fork ends, as of a pool of workers; the ranks are its parent's
            return
        for pipe, end in zip(self._pipes, self._ends, strict=True):
            with suppress(OSError):  # the rank has ended before
                end.shutdown(socket.SHUT_RDWR)  # closing would not reach the rank: there are two descriptors
            pipe.close()
        until = time.monotonic() + (END_SECONDS if self.dead == "it was closed" else 0.0)
        for process in self._ranks:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        atexit.unregister(self.close)


@dataclass(slots=True)
class _Replies:
    """The replies to a message.

    Attributes:
        found: those that have come, by rank.
        lost: how ranks have ended, by rank.
        missing: the ranks whose replies are still to come, by pipe.
        until: when those count as stuck, because others have failed.
    """

    found: dict[int, Outcome]
    lost: dict[int, str]
    missing: dict[Connection, int]
    until: float | None = None


def found_failure(found: dict[int, Outcome]) -> Failure | None:
    """The first real failure among outcomes."""
    failures = (outcome.failure for outcome in found.values() if outcome.failure is not None)
    return next((failure for failure in failures if not failure.consequence), None)


def _end_with(process: subprocess.Popen[bytes], pipe: socket.socket) -> None:
    """Close the connection to a rank when it ends: a process that it has started may hold the other end open.

    What the rank has sent can still be read.
    """
    with pipe:
        process.wait()
        pipe.shutdown(socket.SHUT_RDWR)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _answer_stuck(pipe: Connection, number: bytes, report: StandReport) -> None:
    """Answer a call from which the main thread does not return; the caller ends this process."""
    pipe.send_bytes(number + pack(stuck_outcome(report)))


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
