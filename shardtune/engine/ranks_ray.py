"""Ranks as Ray actors, placed together."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardtune.engine.call_watch import end_rank
from shardtune.engine.interrupts import held_interrupts
from shardtune.engine.pickling import pack, unpack
from shardtune.engine.rank_process import Failure, Host, Limits, Meeting, Outcome, Request, failure_of
from shardtune.engine.ranks import GRACE_SECONDS, raise_failure
from shardtune.engine.ranks_remote import RemoteRanks, stuck_outcome
from shardtune.errors import ParallelError
from shardtune.launch.cores import usable_cores
from shardtune.launch.ray import cluster as ray_cluster
from shardtune.launch.ray.actor import free_port, own_address
from shardtune.launch.ray.cluster import Actor, Placement
from shardtune.launch.watchdog.verdict import StandReport

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.placement_group import PlacementGroup

POLL_SECONDS = 1.0
LARGE_BYTES = 64 << 20
"""Above this size of a call's arguments or values a warning is logged."""
UNREAD_SECONDS = 3 * GRACE_SECONDS
"""After so much time nobody has read that a rank is stuck: it ends itself, with what it would have written."""
logger = logging.getLogger(__name__)


class RayRank:
    """The actor of one rank."""

    def __init__(self) -> None:
        self._host: Host | None = None

    def meet(self) -> tuple[str, int]:
        """The address of this host, and a free port."""
        return own_address(), free_port()

    def join(self, meeting: Meeting) -> bytes:
        try:
            self._host = Host.join(meeting)
            self._host.on_stuck = self._report_stuck
            return pack(Outcome())
        except Exception as error:
            return pack(Outcome(failure=failure_of(meeting.rank, error)))

    def answer(self, packed: bytes) -> bytes:
        assert self._host is not None
        return self._host.answer(packed)

    def _report_stuck(self, report: StandReport) -> None:
        """Let the caller know, who then ends this actor; its main thread does not return from the call."""
        if self._host is not None and self._host.board is not None:
            self._host.board.is_stuck(report)
            time.sleep(UNREAD_SECONDS)
        end_rank(report)


class RayRanks(RemoteRanks):
    """One actor per rank.

    Args:
        num_ranks: the number of ranks.
        device: auto | cpu | cuda.
        placement: of the ranks on hosts.
        limits: on waiting.

    Raises:
        ParallelError: the cluster has no free resources for them in time.
    """

    def __init__(self, num_ranks: int, device: str, placement: Placement, limits: Limits) -> None:
        super().__init__(num_ranks)
        placement = placement.resolved(device)
        self._group = self._reserve(placement)
        self._actors: list[Actor[RayRank]] = []
        try:
            self._actors = ray_cluster.make_actors(RayRank, placement, self._group, num_ranks)
            self._met = address, port = ray_cluster.result(self._actors[0].call(RayRank.meet))
            threads = 0 if "OMP_NUM_THREADS" in os.environ else max(1, int(placement.cpus))
            meeting = Meeting(0, num_ranks, address, port, device, threads=threads, limits=limits)
            joins = [
                # A rank sees only its assigned GPUs; otherwise the ranks of a host would share the first.
                actor.call(RayRank.join, replace(meeting, rank=rank, local_rank=0 if placement.gpus else rank))
                for rank, actor in enumerate(self._actors)
            ]
            self._expect(joins)
            failures = [outcome.failure for outcome in self._outcomes() if outcome.failure is not None]
            if failures:
                raise_failure(failures)
        except BaseException:
            self.close()
            raise

    def _reserve(self, placement: Placement) -> PlacementGroup:
        group = ray_cluster.reserve(placement, self.num_ranks, seconds=placement.wait_seconds)
        if group is not None:
            return group
        free = ray_cluster.free_resources()
        available = " ".join(f"{name} {free.get(name, 0):g}" for name in placement.bundle)
        raise ParallelError(
            f"the cluster has no room for {self.num_ranks} ranks, waited for {placement.wait_seconds:g} s: each takes "
            f"{placement}, there is {available}, placed as {placement.strategy}",
            where="engine.build(…)",
            remedy="use fewer ranks, colocate_with, close() an engine, or let each take less: init(cpus_per_rank=…)",
        )

    @property
    def _address(self) -> tuple[str, int]:
        return self._met

    def _send(self, requests: Sequence[Request]) -> list[Outcome]:
        self.in_order = False
        with held_interrupts():
            self._expect(self._submit(requests))
        outcomes = self._outcomes()
        _warn_if_large(self._answers.size, "returns", requests[0])
        return outcomes

    def _submit(self, requests: Sequence[Request]) -> list[ObjectRef[bytes]]:
        same = all(request is requests[0] for request in requests)
        packed = [pack(requests[0])] if same else [pack(request) for request in requests]
        _warn_if_large(sum(map(len, packed)), "sends", requests[0])
        if not same:
            return [actor.call(RayRank.answer, each) for actor, each in zip(self._actors, packed, strict=True)]
        one = packed[0] if len(packed[0]) < 100_000 else ray_cluster.put(packed[0])
        return [actor.call(RayRank.answer, one) for actor in self._actors]

    def _expect(self, refs: Sequence[ObjectRef[bytes]]) -> None:
        self._answers = _Answers({ref: rank for rank, ref in enumerate(refs)})
        self.in_order = True

    def _outcomes(self) -> list[Outcome]:
        """The outcomes; ranks that are still running some time after another has failed are killed."""
        found = self._wait(None)
        assert found is not None
        return found

    def _wait(self, seconds: float | None) -> list[Outcome] | None:
        answers, end = self._answers, None if seconds is None else time.monotonic() + seconds
        while answers.pending:
            ends = [at - time.monotonic() for at in (answers.until, end) if at is not None]
            left = min([POLL_SECONDS, *ends])
            number = 1 if answers.found else len(answers.pending)
            ready = ray_cluster.wait(list(answers.pending), number=number, seconds=max(0.0, left))
            for ref in ready:
                self._read(ref, answers)
            if not ready and answers.until is not None and time.monotonic() >= answers.until:
                break
            if not ready and end is not None and time.monotonic() >= end:
                return None
            if not ready:
                self._read_stuck(answers)
        return self._judge(answers)

    def _read(self, ref: ObjectRef[bytes], answers: _Answers) -> None:
        """Take a rank's answer."""
        rank = answers.pending[ref]
        try:
            answer = ray_cluster.result(ref)
            answers.size += len(answer)
            outcome = unpack(answer)
        except ray_cluster.ActorEnded as error:
            self.dead = self.dead or f"rank {rank} has ended"
            outcome = Outcome(failure=Failure(rank, None, f"rank {rank} has ended: {error}", False))
        answers.take(ref, outcome)

    def _read_stuck(self, answers: _Answers) -> None:
        """Take what ranks have written that wait for others in vain."""
        reports = self._board.stuck(self.num_ranks) if self.calls and self._board is not None else {}
        for ref, rank in [*answers.pending.items()]:
            if rank in reports:
                answers.take(ref, stuck_outcome(reports[rank]))

    def _judge(self, answers: _Answers) -> list[Outcome]:
        """Check the outcomes, and whether the ranks can still be used."""
        missing, found = sorted(answers.pending.values()), answers.found
        if not self.dead and (ended := self._end_stuck(found, missing)) is not None:
            return ended
        if missing:
            self.dead = self.dead or f"rank {missing[0]} waited for another that has failed, and was ended"
            text = "the rank waited for another that has failed, and was ended"
            found |= {rank: Outcome(failure=Failure(rank, None, text, True)) for rank in missing}
        if self.dead:
            self.close()
        return [found[rank] for rank in range(self.num_ranks)]

    def close(self) -> None:
        super().close()
        if ray_cluster.is_connected():
            for actor in self._actors:
                actor.kill()
            ray_cluster.release(self._group)


@dataclass(slots=True)
class _Answers:
    """The answers of ranks to a request.

    Attributes:
        pending: the ranks whose answers are still to come, by Ray's reference.
        found: those that have come, by rank.
        until: when the others count as stuck, because some have failed.
        size: of the answers, in bytes.
    """

    pending: dict[ObjectRef[bytes], int]
    found: dict[int, Outcome] = field(default_factory=dict)
    until: float | None = None
    size: int = 0

    def take(self, ref: ObjectRef[bytes], outcome: Outcome) -> None:
        self.found[self.pending.pop(ref)] = outcome
        if outcome.failure is not None and self.until is None:
            self.until = time.monotonic() + GRACE_SECONDS


def connect(address: str | None) -> None:
    """Connect to a cluster, or start a local one.

    Raises:
        ParallelError: Ray is not installed, or the cluster cannot be reached.
    """
    ray_cluster.import_ray(
        'shardtune.init(backend="ray")', "leave the backend out: ranks are processes of this machine then"
    )
    ray_cluster.connect(
        address or os.environ.get("RAY_ADDRESS"),
        cores=max(usable_cores(), 32),  # any number of ranks may share this machine's cores
        where=f"shardtune.init(address={address!r})",
    )


def _warn_if_large(size: int, what: str, request: Request) -> None:
    if size > LARGE_BYTES and request.action == "call":
        logger.warning(
            "%s %s %.0f MB through Ray: let the method read its data itself, and send it names or paths",
            request.arguments[0],
            what,
            size / 2**20,
        )
