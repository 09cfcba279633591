"""Heartbeats between hosts: once a host is silent for too long, the remaining ranks end instead of waiting for it.

A process that ends closes its connections, and the others notice. A host that is cut off or loses power closes nothing:
a collective would wait for it until its own limit, which is long since a save may be. So one rank of each host writes
heartbeats to the rendezvous store, and rank 0 checks that they continue.

Where a stop signal has ended a rank before the ranks could stop together, the store has that too, and the others stop,
also those whose collective has failed as that rank ended.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from shardtune.errors import Interrupted, lost_a_peer
from shardtune.launch.events import write_last_event
from shardtune.launch.local import is_launched
from shardtune.launch.signals import message_of_stop

BEATS_PER_LIMIT = 6
LONGEST_BEATS = 3.0
"""A pause counts as so many beats at most: in a longer one the process itself did not run, and heard nobody."""
ANNOUNCE_SECONDS = 2.0
"""How long a rank that ends may take to write into the store that it was stopped, and others to read that there."""

_watches = 0
_current: PeerWatch | None = None


class PeerWatch:
    """Ends this process with code 1 once a host is lost, and stops it once a rank of another host was stopped alone.

    Args:
        nodes: the hosts, each with its ranks.
        rank: of this process.
        limit: seconds without a heartbeat.
        run_dir: where the loss of a host is recorded as an event.
        number: of the watch; a process has one for each run. A stop belongs to one run.
        rank_0_serves: whether the rendezvous store ends with rank 0.
    """

    def __init__(
        self,
        nodes: Mapping[str, Sequence[int]],
        rank: int,
        limit: float,
        run_dir: Path,
        number: int = 1,
        *,
        rank_0_serves: bool = False,
    ) -> None:
        self._nodes = [(node.partition("/")[0], list(ranks)) for node, ranks in nodes.items()]
        self._rank = rank
        self._limit = limit
        self._every = limit / BEATS_PER_LIMIT
        self._run_dir = run_dir
        self._stopped = f"shardtune/peers/stopped/{number}"
        self._done = threading.Event()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._announced = threading.Event()
        self._answers = 0  # of the store
        self._serves = rank == 0 and rank_0_serves
        for work in (self._beat, self._judge):
            threading.Thread(target=work, name="shardtune-peer-watch", daemon=True).start()

    @classmethod
    def over(
        cls, nodes: Mapping[str, Sequence[int]], rank: int, limit: float, run_dir: Path, *, rank_0_serves: bool
    ) -> PeerWatch | None:
        """A watch if there are several hosts and no launcher of this package that watches them."""
        global _watches, _current
        _current = None
        if len(nodes) == 1 or is_launched():
            return None
        _watches += 1  # every rank has as many
        _current = cls(nodes, rank, limit, run_dir, _watches, rank_0_serves=rank_0_serves)
        return _current

    @contextmanager
    def announcing(self) -> Iterator[None]:
        """Let the other hosts stop too if a signal stops this rank alone inside.

        A signal before the first step or after the last one reaches perhaps one host, and the others would wait for it.
        A store that ends with this rank is kept until all others have read that, for one beat at most.
        """
        try:
            yield
        except Interrupted as stopped:
            if not stopped.together:
                self._stopping.set()
                self._wake.set()
                self._announced.wait(ANNOUNCE_SECONDS + (self._every if self._serves else 0.0))
            raise
        except Exception as error:
            stop = self.stop_before(error)
            if stop is None:
                raise
            raise stop from None

    def stop_before(self, error: BaseException) -> Interrupted | None:
        """The stop of another host's rank that has made a collective of this rank fail; None for any other error."""
        if not lost_a_peer(error):
            return None
        try:
            if not self._connect(ANNOUNCE_SECONDS).check([self._stopped]):
                return None
        except RuntimeError:  # the store has ended too
            return None
        return Interrupted(message_of_stop())

    def end(self) -> None:
        """Stop watching: all ranks end together."""
        self._done.set()
        self._wake.set()

    def _beat(self) -> None:
        """Write heartbeats and read those of the others; blocks if the network does."""
        mine = next((number for number, (_, ranks) in enumerate(self._nodes) if ranks[0] == self._rank), None)
        seen = [(-1, 0.0)] * len(self._nodes)
        prefix = "shardtune/peers"  # agents may count restarts differently
        store, last = None, time.monotonic()
        while not self._done.is_set():
            try:
                store = store or self._connect(self._limit)
                if self._stopping.is_set():
                    self._announce(store)
                    return
                if mine is not None:
                    store.add(f"{prefix}/{mine}", 1)
                if store.check([self._stopped]):
                    self._stop_too(store)
                    return
                if self._rank == 0:
                    now = time.monotonic()
                    self._look(store, prefix, seen, self._passed(now - last))
                    last = now
                elif store.check([f"{prefix}/lost"]):
                    self._leave(store.get(f"{prefix}/lost").decode())
                self._answers += 1
            except RuntimeError:  # a broken connection; `_judge` waits first, as ranks may be ending
                store = None
            self._wake.wait(self._every)

    def _announce(self, store: dist.Store) -> None:
        """Write that this rank was stopped."""
        store.set(self._stopped, "")
        self._await_readers(store)
        self._announced.set()

    def _stop_too(self, store: dist.Store) -> None:
        """Stop this rank, as another was stopped, and watch no longer: hosts end, and perhaps the store."""
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        self._await_readers(store)
        self._announced.set()
        self._done.set()

    def _await_readers(self, store: dist.Store) -> None:
        """Write that this rank knows of the stop; where it serves the store, wait until all ranks do, for one beat."""
        store.set(f"{self._stopped}/{self._rank}", "")
        readers = [f"{self._stopped}/{rank}" for _, ranks in self._nodes for rank in ranks]
        until = time.monotonic() + self._every
        while self._serves and not store.check(readers) and time.monotonic() < until:
            self._done.wait(ANNOUNCE_SECONDS / 20)

    def _connect(self, seconds: float) -> dist.Store:
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
        )

    def _passed(self, seconds: float) -> float:
        return min(seconds, LONGEST_BEATS * self._every)

    def _look(self, store: dist.Store, prefix: str, seen: list[tuple[int, float]], passed: float) -> None:
        """End all ranks if a host is silent; `seen` has the beats of each host and the seconds since the last."""
        for number, (host, ranks) in enumerate(self._nodes):
            before, silent = seen[number]
            count = store.add(f"{prefix}/{number}", 0)
            seen[number] = count, 0.0 if count != before else silent + passed
            if seen[number][1] > self._limit:
                lost = f"{host} ({_ranks(ranks)}) is lost: nothing was heard of it for {self._limit:g} s"
                store.set(f"{prefix}/lost", lost)
                self._record(lost, ranks)
                self._done.wait(2 * self._every)  # for the others to read it
                self._leave(lost)

    def _judge(self) -> None:
        """End this rank if the store does not answer."""
        seen, silent, last = self._answers, 0.0, time.monotonic()
        while not self._done.wait(self._every):
            now = time.monotonic()
            silent = silent + self._passed(now - last) if self._answers == seen else 0.0
            seen, last = self._answers, now
            if silent > self._limit:
                first, ranks = self._nodes[0]
                lost = f"{first} (rank 0), where the ranks meet, is lost: no answer for {self._limit:g} s"
                if self._rank == self._nodes[1][1][0]:  # one of the ranks that are left
                    self._record(lost, ranks)
                self._leave(lost)

    def _record(self, lost: str, lost_ranks: Sequence[int]) -> None:
        if not self._done.is_set():
            ranks = sum(len(ranks) for _, ranks in self._nodes)
            write_last_event(self._run_dir, "lost", ranks=ranks, reason=lost, lost_ranks=list(lost_ranks))

    def _leave(self, lost: str) -> None:
        if self._done.is_set():
            return
        print(
            f"rank {self._rank}: error: {lost}; {socket.gethostname()} ends its ranks, the same command goes on from "
            "the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def stop_before(error: BaseException) -> Interrupted | None:
    """The stop of another host's rank, in the run of this process, that has made a collective fail; None otherwise."""
    return None if _current is None else _current.stop_before(error)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
