"""Ranks that are actors of Ray, placed together. Ray is imported when it is asked for."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardtune.engine.pickling import pack, unpack
from shardtune.engine.rank_process import Failure, Host, Meeting, Outcome, Request, failure_of
from shardtune.engine.ranks import GRACE_SECONDS, Team, raise_failure
from shardtune.errors import ParallelError

LARGE_BYTES = 64 << 20
"""What a call may ship through Ray before a warning says so."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where ranks go on a cluster.

    Attributes:
        strategy: pack | spread | strict_pack | strict_spread.
        cpus: of each rank.
        gpus: of each rank; None: one where the cluster has any.
        resources: of each rank besides.
        wait_seconds: for room.
    """

    strategy: str = "pack"
    cpus: float = 1.0
    gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    wait_seconds: float = 60.0


class RayRank:
    """The actor that is one rank."""

    def __init__(self) -> None:
        self._host: Host | None = None

    def meet(self) -> tuple[str, int]:
        """The address of this host, and a port that is free there."""
        import socket

        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

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
    """As many actors as ranks.

    Args:
        num_ranks: how many.
        device: auto | cpu | cuda.
        placement: where they go.

    Raises:
        ParallelError: the cluster has no room for them in time.
    """

    def __init__(self, num_ranks: int, device: str, placement: Placement) -> None:
        super().__init__(num_ranks)
        self._ray = import_ray()
        gpus = placement.gpus
        if gpus is None:
            gpus = 1.0 if device != "cpu" and self._ray.cluster_resources().get("GPU") else 0.0
        bundle = {"CPU": placement.cpus, **({"GPU": gpus} if gpus else {}), **placement.resources}
        self._group = self._reserve(bundle, placement)
        try:
            self._actors = self._make(placement, gpus)
            addresses = self._ray.get([actor.meet.remote() for actor in self._actors])
            address, port = addresses[0]
            threads = 0 if "OMP_NUM_THREADS" in os.environ else max(1, int(placement.cpus))
            meeting = {"address": address, "port": port, "device": device, "threads": threads}
            joins = [
                actor.join.remote(Meeting(rank, num_ranks, local_rank=0 if gpus else rank, **meeting))
                for rank, actor in enumerate(self._actors)
            ]
            failures = [outcome.failure for outcome in self._collect(joins) if outcome.failure is not None]
            if failures:
                raise_failure(failures)
        except BaseException:
            self.close()
            raise

    def _reserve(self, bundle: Mapping[str, float], placement: Placement) -> Any:
        group = self._ray.util.placement_group([dict(bundle)] * self.num_ranks, strategy=placement.strategy.upper())
        if self._ray.wait([group.ready()], timeout=placement.wait_seconds)[0]:
            return group
        self._ray.util.remove_placement_group(group)
        free = self._ray.available_resources()
        takes = " ".join(f"{name} {amount:g}" for name, amount in bundle.items())
        there = " ".join(f"{name} {free.get(name, 0):g}" for name in bundle)
        raise ParallelError(
            f"the cluster has no room for {self.num_ranks} ranks, waited for {placement.wait_seconds:g} s: each takes "
            f"{takes}, there is {there}, placed as {placement.strategy}",
            where="engine.build(…)",
            remedy="use fewer ranks, colocate_with, close() an engine, or let each take less: init(cpus_per_rank=…)",
        )

    def _make(self, placement: Placement, gpus: float) -> list[Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind = self._ray.remote(RayRank)
        return [
            kind.options(
                num_cpus=placement.cpus,
                num_gpus=gpus,
                resources=dict(placement.resources),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number),
                max_restarts=0,
            ).remote()
            for number in range(self.num_ranks)
        ]

    def _ask(self, requests: Sequence[Request]) -> list[Outcome]:
        same = all(request is requests[0] for request in requests)
        packed = [pack(requests[0])] if same else [pack(request) for request in requests]
        _warn_if_large(sum(map(len, packed)), "sends", requests[0])
        if same:
            one = packed[0] if len(packed[0]) < 100_000 else self._ray.put(packed[0])
            refs = [actor.answer.remote(one) for actor in self._actors]
        else:
            refs = [actor.answer.remote(each) for actor, each in zip(self._actors, packed, strict=True)]
        return self._collect(refs, requests[0])

    def _collect(self, refs: Sequence[Any], request: Request | None = None) -> list[Outcome]:
        """The outcomes; ranks that do not come to an end once another has failed are ended."""
        found: dict[int, Outcome] = {}
        pending = {ref: rank for rank, ref in enumerate(refs)}
        until, size = None, 0
        while pending:
            left = None if until is None else max(0.0, until - time.monotonic())
            ready, _ = self._ray.wait(list(pending), num_returns=len(pending) if until is None and not found else 1,
                                      timeout=1.0 if left is None else left)  # fmt: skip
            if not ready and until is not None:
                break
            for ref in ready:
                rank = pending.pop(ref)
                try:
                    answer = self._ray.get(ref)
                    size += len(answer)
                    found[rank] = unpack(answer)
                except self._ray.exceptions.RayActorError as error:
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
        if not self._ray.is_initialized():
            return
        for actor in vars(self).get("_actors", ()):
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._group)


def import_ray() -> Any:
    """The module.

    Raises:
        ParallelError: Ray is not installed.
    """
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise ParallelError(
            f"Ray is not installed ({error})",
            where='shardtune.init(backend="ray")',
            remedy="pip install 'shardtune[ray]', or leave the backend out: ranks are processes of this machine then",
        ) from error
    return ray


def connect(address: str | None) -> None:
    """Connect to a cluster, or start one of this machine's own.

    Raises:
        ParallelError: it cannot be reached.
    """
    ray = import_ray()
    if ray.is_initialized():
        return
    options: dict[str, Any] = {"logging_level": "ERROR", "namespace": "shardtune"}
    if address is None and "RAY_ADDRESS" not in os.environ:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # asks the network
        # As many ranks as one likes may share this machine's cores, as with processes.
        options |= {"num_cpus": max(os.cpu_count() or 1, 32), "include_dashboard": False}
        address = "local"
    try:
        ray.init(address=address, **options)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise ParallelError(
            f"the Ray cluster cannot be used: {str(error).strip().splitlines()[0]}",
            where=f"shardtune.init(address={address!r})",
            remedy="ray status shows a running cluster, ray start --head begins one",
        ) from error


def _warn_if_large(size: int, what: str, request: Request) -> None:
    if size > LARGE_BYTES and request.action == "call":
        logger.warning(
            "%s %s %.0f MB through Ray: let the method read its data itself, and send it names or paths",
            request.arguments[0],
            what,
            size / 2**20,
        )
