"""Ranks as Ray actors, placed together."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardtune.engine.pickling import pack, unpack
from shardtune.engine.rank_process import Failure, Host, Limits, Meeting, Outcome, Request, failure_of
from shardtune.engine.ranks import GRACE_SECONDS, Team, raise_failure
from shardtune.errors import ParallelError
from shardtune.launch.cores import usable_cores
from shardtune.launch.ray import cluster as ray_cluster
from shardtune.launch.ray.actor import free_port, own_address
from shardtune.launch.ray.cluster import Actor, Placement

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.placement_group import PlacementGroup

LARGE_BYTES = 64 << 20
"""Above this size of a call's arguments or values a warning is logged."""
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
            return pack(Outcome())
        except Exception as error:
            return pack(Outcome(failure=failure_of(meeting.rank, error)))

    def answer(self, packed: bytes) -> bytes:
        assert self._host is not None
        return self._host.answer(packed)


class RayRanks(Team):
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
            address, port = ray_cluster.result(self._actors[0].call(RayRank.meet))
            threads = 0 if "OMP_NUM_THREADS" in os.environ else max(1, int(placement.cpus))
            meeting = Meeting(0, num_ranks, address, port, device, threads=threads, limits=limits)
            joins = [
                # A rank sees only its assigned GPUs; otherwise the ranks of a host would share the first.
                actor.call(RayRank.join, replace(meeting, rank=rank, local_rank=0 if placement.gpus else rank))
                for rank, actor in enumerate(self._actors)
            ]
            failures = [outcome.failure for outcome in self._collect(joins) if outcome.failure is not None]
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

    def _send(self, requests: Sequence[Request]) -> list[Outcome]:
        same = all(request is requests[0] for request in requests)
        packed = [pack(requests[0])] if same else [pack(request) for request in requests]
        _warn_if_large(sum(map(len, packed)), "sends", requests[0])
        if same:
            one = packed[0] if len(packed[0]) < 100_000 else ray_cluster.put(packed[0])
            refs = [actor.call(RayRank.answer, one) for actor in self._actors]
        else:
            refs = [actor.call(RayRank.answer, each) for actor, each in zip(self._actors, packed, strict=True)]
        return self._collect(refs, requests[0])

    def _collect(self, refs: Sequence[ObjectRef[bytes]], request: Request | None = None) -> list[Outcome]:
        """The outcomes; ranks that are still running some time after another has failed are killed."""
        found: dict[int, Outcome] = {}
        pending = {ref: rank for rank, ref in enumerate(refs)}
        until, size = None, 0
        while pending:
            seconds = 1.0 if until is None else max(0.0, until - time.monotonic())
            ready = ray_cluster.wait(list(pending), number=1 if found else len(pending), seconds=seconds)
            if not ready and until is not None:
                break
            for ref in ready:
                rank = pending.pop(ref)
                try:
                    answer = ray_cluster.result(ref)
                    size += len(answer)
                    found[rank] = unpack(answer)
                except ray_cluster.ActorEnded as error:
                    self.dead = self.dead or f"rank {rank} has ended"
                    found[rank] = Outcome(failure=Failure(rank, None, f"rank {rank} has ended: {error}", False))
                if found[rank].failure is not None and until is None:
                    until = time.monotonic() + GRACE_SECONDS
        if pending:
            rank = min(pending.values())
            self.dead = self.dead or f"rank {rank} waited for another that has failed, and was ended"
            text = "the rank waited for another that has failed, and was ended"
            found |= {rank: Outcome(failure=Failure(rank, None, text, True)) for rank in pending.values()}
        if self.dead:
            self.close()
        if request is not None:
            _warn_if_large(size, "returns", request)
        return [found[rank] for rank in range(self.num_ranks)]

    def close(self) -> None:
        super().close()
        if ray_cluster.is_connected():
            for actor in self._actors:
                actor.kill()
            ray_cluster.release(self._group)


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
