"""The ranks of a run on a Ray cluster: one actor each; placed, watched and ended together.

The launcher ships the recipe and nothing else: each host reads data and model itself, and ranks communicate with each
other directly.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

from shardtune.config import Recipe
from shardtune.config.environment import variables
from shardtune.config.schema import RunnerConfig
from shardtune.errors import ParallelError
from shardtune.launch.cores import usable_cores
from shardtune.launch.exit_codes import REPORT_DIR
from shardtune.launch.local import GRACE_SECONDS, POLL_SECONDS, RankReport, raise_outcome
from shardtune.launch.ray import cluster as ray_cluster
from shardtune.launch.ray.actor import Place, RankHolder, Sign
from shardtune.launch.ray.cluster import Actor, ActorEnded, Placement
from shardtune.launch.signals import LAUNCHER_PID, StopSignal

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.placement_group import PlacementGroup

R = TypeVar("R")
FORWARDED = (
    *("SHARDTUNE_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH", "NCCL_", "GLOO_", "CUBLAS_"),
    *("WANDB_", "MLFLOW_", "TRACKIO_", "SWANLAB_"),
    *("OMP_", "GOMP_", "PYTHONPATH", "XDG_CACHE_HOME"),
)
"""Prefixes of the variables that ranks inherit from the launcher's environment."""
OBJECT_STORE_BYTES = 100 * 2**20
"""The object store of a local cluster: hardly any data goes through it."""
END_SECONDS = 10.0
"""How long actors may take to kill their ranks before they are killed."""
RESERVE_SECONDS = 3.0
"""How long to wait for resources for a number of workers before trying a smaller one."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NO_CLUSTER = f"{ray_cluster.NO_CLUSTER}; null: one of this machine's own"


def _where(address: str | None) -> str:
    return f"runner.ray.address = {address or 'null'}"


@dataclass(slots=True)
class Cluster:
    """A cluster that this process is connected to.

    Attributes:
        placement: of the workers, resolved.
        lost: hosts that stopped responding; no rank is placed there again.
        reserved: the reservation for the next start, and its number of workers.
    """

    placement: Placement
    lost: set[str] = field(default_factory=set)
    reserved: tuple[int, PlacementGroup] | None = None

    def room(self) -> int:
        """How many workers fit the live hosts, if nothing else ran on them."""
        needs = [(name, needed) for name, needed in self.placement.bundle.items() if needed]
        nodes = [node["Resources"] for node in ray_cluster.live_nodes(self.lost)]
        fit = [min(int(node.get(name, 0) // needed) for name, needed in needs) for node in nodes]
        if self.placement.strategy == "strict_spread":
            return sum(1 for number in fit if number)
        return max(fit, default=0) if self.placement.strategy == "strict_pack" else sum(fit)

    def describe(self) -> str:
        """The hosts, for messages."""
        nodes = ray_cluster.live_nodes(self.lost)
        resources = ", ".join(
            f"{node['NodeManagerAddress']}: " + " ".join(
                f"{name} {node['Resources'].get(name, 0.0):g}" for name in self.placement.bundle
            )
            for node in nodes
        )  # fmt: skip
        return f"{len(nodes)} host{'s' if len(nodes) != 1 else ''} ({resources})"


@contextmanager
def connected(runner: RunnerConfig) -> Iterator[Cluster]:
    """The cluster that a recipe names, or one of this machine alone that ends with this."""
    ray_cluster.import_ray("runner.launcher = ray", "use runner.nproc_per_node or torchrun")
    connected_here = _connect(runner)
    ray = runner.ray
    placement = Placement(ray.placement, ray.cpus_per_rank, ray.gpus_per_rank, ray.resources, ray.wait_seconds)
    try:
        yield Cluster(placement.resolved(runner.device))
    finally:
        if connected_here:
            ray_cluster.disconnect()


def _connect(runner: RunnerConfig) -> bool:
    if ray_cluster.is_connected():
        return False
    address = runner.ray.address
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return ray_cluster.connect(
            address,
            cores=max(usable_cores(), runner.workers * runner.ray.cpus_per_rank),  # as with nproc_per_node
            where=_where(address),
            remedy=NO_CLUSTER,
            log_to_driver=False,
            object_store_bytes=OBJECT_STORE_BYTES,
        )
    finally:
        for number, handler in before.items():  # Ray installs a handler that would end the run without saving
            with suppress(ValueError):
                signal.signal(number, handler)


def run_ranks_on_ray(
    cluster: Cluster,
    arguments: Sequence[str],
    recipe: Recipe,
    workers: int,
    environment: Mapping[str, str],
    *,
    stop: StopSignal,
    report: Callable[[str], None],
    bare: bool = False,
) -> None:
    """Run `python -m shardtune <arguments>` on the cluster, once per rank, and wait for all ranks.

    Args:
        cluster: to run on.
        arguments: of the command; RECIPE is replaced by the path of the recipe's file.
        recipe: sent to every rank.
        workers: how many ranks.
        environment: additional variables of the ranks.
        stop: passed on to the ranks.
        report: receives the placement of the ranks.
        bare: forward rank 0's output unchanged; every other line is prefixed with its rank.

    Raises:
        As `run_ranks`; RankLost also when a host is lost.
    """
    # Sent by value, so that a host without shardtune can report that it has none.
    import_module("ray.cloudpickle").register_pickle_by_value(sys.modules[RankHolder.__module__])
    group = _reserve(cluster, workers, stop)
    cluster.reserved = None
    with stop.deferred():
        ranks = _Ranks(recipe.runner.lost_after, bare)
        try:
            ranks.make(cluster.placement, group, workers, recipe.runner.master_port)
            ranks.start(arguments, recipe, environment, report)
            ranks.watch(stop)
        finally:
            ranks.end()
            with suppress(Exception):  # the cluster may be gone
                ray_cluster.release(group)
            cluster.lost |= ranks.lost_nodes()
        raise_outcome(ranks.codes, ranks.reports, stop_sent=stop.requested, gone=ranks.gone)


def _reserve(cluster: Cluster, workers: int, stop: StopSignal) -> PlacementGroup:
    """Reserve resources for all workers; raises if the cluster does not have them in time."""
    if cluster.reserved is not None and cluster.reserved[0] == workers:
        return cluster.reserved[1]
    placement = cluster.placement
    group = _try_to_reserve(cluster, workers, placement.wait_seconds, stop)
    if group is not None:
        return group
    raise ParallelError(
        f"the cluster has no room for {workers} workers, waited for {placement.wait_seconds:g} s: each takes "
        f"{placement}, placement is {placement.strategy}, and there is {cluster.describe()}",
        where="runner.num_ranks",
        remedy=f"lower it (room for {cluster.room()} if nothing else runs) or what each takes, or add hosts",
    )


def _try_to_reserve(cluster: Cluster, workers: int, seconds: float, stop: StopSignal) -> PlacementGroup | None:
    return ray_cluster.reserve(cluster.placement, workers, seconds=seconds, avoid=cluster.lost, check=stop.check)


def reserve_for_the_rest(cluster: Cluster, numbers: Sequence[int], stop: StopSignal) -> int:
    """Reserve resources for the next start after a loss.

    Args:
        cluster: to reserve on.
        numbers: acceptable numbers of workers, the largest first.
        stop: interrupts the wait.

    Returns:
        The number of workers reserved for; 0 if too few hosts are left and none joined in time.
    """
    until = time.monotonic() + cluster.placement.wait_seconds
    while True:
        room = cluster.room()
        for number in (number for number in numbers if number <= room):
            group = _try_to_reserve(cluster, number, RESERVE_SECONDS, stop)
            if group is not None:
                cluster.reserved = number, group
                return number
        stop.check()
        if time.monotonic() > until:
            return 0
        time.sleep(0.5)


class _Ranks:
    """The ranks of one start."""

    def __init__(self, lost_after: float, bare: bool) -> None:
        self._lost_after = lost_after
        self._bare = bare
        self._holders: list[Actor[RankHolder]] = []
        self._places: list[Place] = []
        self.codes: list[int | None] = []
        self.reports: list[RankReport] = []
        self.gone: dict[int, str] = {}

    def make(self, placement: Placement, group: PlacementGroup, workers: int, master_port: int | None) -> None:
        """Create the actors, in the order of their hosts."""
        made = self._holders = ray_cluster.make_actors(RankHolder, placement, group, workers, self._lost_after)
        self.codes = [None] * workers
        places = self._results([holder.call(RankHolder.place, master_port) for holder in made])
        if self.gone:
            return
        here = ray_cluster.own_node()  # rank 0 is placed on the launcher's host, if any rank is
        nodes = sorted(dict.fromkeys(place.node for place in places.values()), key=lambda node: node != here)
        order = sorted(range(workers), key=lambda number: nodes.index(places[number].node))
        self._holders = [made[number] for number in order]
        self._places = [places[number] for number in order]

    def _results(self, refs: list[ObjectRef[R]]) -> dict[int, R]:
        """The results of all actors by rank; actors that do not respond in time count as lost."""
        ready = ray_cluster.wait(refs, number=len(refs), seconds=self._lost_after)
        found: dict[int, R] = {}
        for rank, ref in enumerate(refs):
            if ref not in ready:
                self.gone[rank] = f"did not answer for {self._lost_after:g} s"
                continue
            try:
                found[rank] = ray_cluster.result(ref)
            except ActorEnded:
                self.gone[rank] = "is gone: its actor has ended"
        return found

    def start(
        self, arguments: Sequence[str], recipe: Recipe, environment: Mapping[str, str], report: Callable[[str], None]
    ) -> None:
        if self.gone:
            return
        self._check_hosts(recipe.runner.master_port)
        nodes = list(dict.fromkeys(place.node for place in self._places))
        names = {"reports": REPORT_DIR, "launcher": LAUNCHER_PID}
        if len(nodes) > 1:
            names["interface"] = GLOO_INTERFACE
        named = variables(recipe.references)  # which each host resolves for itself
        passed_on = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED) or name in named}
        started = [
            holder.call(
                RankHolder.start,
                list(arguments),
                recipe.to_yaml(as_given=True),
                {**passed_on, **environment, **self._variables(rank, nodes)},
                names,
            )
            for rank, holder in enumerate(self._holders)
        ]
        on = ", ".join(f"{self._count(node)} on {self._host(node)}" for node in nodes)
        report(f"Ray: {len(self._holders)} workers, {on}")
        self._results(started)

    def _count(self, node: str) -> int:
        return sum(place.node == node for place in self._places)

    def _host(self, node: str) -> str:
        place = next(place for place in self._places if place.node == node)
        return f"{place.host} ({place.address})"

    def _check_hosts(self, wanted_port: int | None) -> None:
        without = next((place for place in self._places if not place.shardtune), None)
        if without is not None:
            raise ParallelError(
                f"{without.host} ({without.address}) has no shardtune",
                where="runner.launcher = ray",
                remedy="install the same version on every host of the cluster",
            )
        if not self._places[0].port:
            raise ParallelError(
                f"port {wanted_port} cannot be used on {self._places[0].host}",
                where=f"runner.master_port = {wanted_port}",
                remedy="choose another, or leave runner.master_port out: a free one is found",
            )

    def _variables(self, rank: int, nodes: list[str]) -> dict[str, str]:
        """The environment variables that torchrun sets.

        Worked example: rank 2 of 4, dealt to hosts A A B B with one GPU each rank, is RANK 2 of WORLD_SIZE 4; it is the
        first on B, so LOCAL_RANK 0 of LOCAL_WORLD_SIZE 2 and GROUP_RANK 1 of GROUP_WORLD_SIZE 2, and its
        CUDA_VISIBLE_DEVICES holds the GPUs of ranks 2 and 3, of which LOCAL_RANK chooses the first.
        """
        here, first = self._places[rank], self._places[0]
        near = [other for other, place in enumerate(self._places) if place.node == here.node]
        gpus = list(dict.fromkeys(gpu for other in near for gpu in self._places[other].gpus))
        # Ranks of one host see each other's GPUs, so that NCCL can copy from one to the other.
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, here.cores // len(near)))}
        return {
            **visible,
            **threads,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self._places)),
            "LOCAL_RANK": str(near.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(near)),
            "GROUP_RANK": str(nodes.index(here.node)),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "MASTER_ADDR": first.address if len(nodes) > 1 else "127.0.0.1",
            "MASTER_PORT": str(first.port),
        }

    def watch(self, stop: StopSignal) -> None:
        """Forward the ranks' output until all have ended, or until shortly after the first failure."""
        answered = [time.monotonic()] * len(self._holders)
        polls: dict[ObjectRef[Sign], int] = {}
        until, forwarded = None, False
        while True:
            if stop.requested and not forwarded:
                forwarded = True
                for holder in self._holders:
                    holder.call(RankHolder.stop)
            waiting = [rank for rank in range(len(self._holders)) if self.codes[rank] is None and rank not in self.gone]
            if until is None and (any(self.codes) or self.gone):
                until = time.monotonic() + GRACE_SECONDS
            if not waiting or (until is not None and time.monotonic() > until):
                return
            polled = set(polls.values())
            polls |= {self._holders[rank].call(RankHolder.sign): rank for rank in waiting if rank not in polled}
            ready = ray_cluster.wait(list(polls), number=len(polls), seconds=POLL_SECONDS)
            for ref in ready:
                rank = polls.pop(ref)
                answered[rank] = time.monotonic()
                self._take(rank, ref)
            for rank in (rank for rank in waiting if time.monotonic() - answered[rank] > self._lost_after):
                self.gone.setdefault(rank, f"{self._on(rank)} is lost: nothing was heard for {self._lost_after:g} s")
            if ready:
                time.sleep(POLL_SECONDS)

    def _take(self, rank: int, ref: ObjectRef[Sign]) -> None:
        try:
            sign = ray_cluster.result(ref)
        except ActorEnded:
            self.gone[rank] = f"{self._on(rank)} is lost: its actor has ended"
            return
        for stream, text in sign.lines:
            self._print(rank, stream, text)
        self.codes[rank] = sign.code
        if sign.report is not None and sign.code is not None:
            self.reports = sorted([*self.reports, RankReport.from_json(sign.report)], key=lambda report: report.time)

    def _on(self, rank: int) -> str:
        return f"on {self._places[rank].host} ({self._places[rank].address})" if self._places else ""

    def _print(self, rank: int, stream: str, text: str) -> None:
        where = f"{rank} {self._places[rank].host}" if len({place.node for place in self._places}) > 1 else str(rank)
        prefix = "" if self._bare and rank == 0 else f"[rank {where}] "
        print(f"{prefix}{text}", file=sys.stdout if stream == "stdout" else sys.stderr, flush=True)

    def lost_nodes(self) -> set[str]:
        """Hosts that did not respond, as opposed to those on which only the actor has ended."""
        silent = {rank for rank, what in self.gone.items() if "heard" in what}
        return {self._places[rank].node for rank in silent} if self._places else set()

    def end(self) -> None:
        """Kill the remaining ranks, then their actors."""
        reachable = [holder for rank, holder in enumerate(self._holders) if rank not in self.gone]
        with suppress(Exception):  # an unresponsive actor is killed below
            refs = [holder.call(RankHolder.end) for holder in reachable]
            if refs:
                ray_cluster.wait(refs, number=len(refs), seconds=END_SECONDS)
        for holder in self._holders:
            holder.kill()
