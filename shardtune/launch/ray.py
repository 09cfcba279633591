"""Ranks on a Ray cluster: one actor each, placed together, watched and ended together.

The launcher ships the recipe and nothing else: each host reads data and model itself, and ranks talk to each other
directly. Ray is imported when it is asked for.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from shardtune.config import Recipe
from shardtune.config.schema import RunnerConfig
from shardtune.errors import ParallelError
from shardtune.launch.local import GRACE_SECONDS, POLL_SECONDS, REPORT_DIR, RankReport, raise_outcome
from shardtune.launch.ray_actor import Place, RankHolder, Sign
from shardtune.launch.signals import LAUNCHER_PID, StopSignal

FORWARDED = (
    *("SHARDTUNE_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "TORCH", "NCCL_", "GLOO_", "CUBLAS_"),
    *("OMP_NUM_THREADS", "PYTHONPATH", "XDG_CACHE_HOME"),
)
"""How the names of the variables begin that ranks get from the launcher's own environment."""
OBJECT_STORE_BYTES = 100 * 2**20
"""Of a cluster of our own: hardly anything goes through it."""
END_SECONDS = 10.0
"""How long actors may take to kill their ranks before they are killed themselves."""
RESERVE_SECONDS = 3.0
"""How long a number of workers is waited for before a smaller one is tried."""
HEAD_SECONDS = 10.0
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def _check_head(address: str) -> None:
    """Whether something listens where a cluster's head is to be: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise _no_cluster(address, "an address is host:port of the head (of a ray:// address, the host and 6379)")
    try:
        socket.create_connection((host, int(port)), timeout=HEAD_SECONDS).close()
    except OSError as error:
        raise _no_cluster(address, f"{address} does not answer ({error})") from error


def _no_cluster(address: str | None, what: str) -> ParallelError:
    return ParallelError(
        f"the Ray cluster cannot be used: {what}",
        where=f"runner.ray.address = {address or 'null'}",
        remedy="ray status shows a running cluster, ray start --head begins one; null: one of this machine's own",
    )


@dataclass(slots=True)
class Cluster:
    """A cluster that this process is connected to.

    Attributes:
        ray: the module.
        config: the recipe's `runner`.
        gpus_per_worker: as asked for, or found.
        lost: hosts of which nothing was heard; no rank goes there again.
        reserved: room for the next start, and for how many workers it is.
    """

    ray: Any
    config: RunnerConfig
    gpus_per_worker: int
    lost: set[str] = field(default_factory=set)
    reserved: tuple[int, Any] | None = None

    def bundle(self) -> dict[str, float]:
        """What one worker takes."""
        asked = self.config.ray
        gpus = {"GPU": float(self.gpus_per_worker)} if self.gpus_per_worker else {}
        return {"CPU": float(asked.cpus_per_worker), **gpus, **{name: float(n) for name, n in asked.resources.items()}}

    def room(self) -> int:
        """How many workers fit the hosts that are there, were nothing else running on them."""
        bundle, placement = self.bundle(), self.config.ray.placement
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"] and node["NodeID"] not in self.lost]
        fit = [min(int(node.get(name, 0) // needed) for name, needed in bundle.items() if needed) for node in nodes]
        if placement == "strict_spread":
            return sum(1 for number in fit if number)
        return max(fit, default=0) if placement == "strict_pack" else sum(fit)

    def describe(self) -> str:
        """The hosts, for messages."""
        nodes = [node for node in self.ray.nodes() if node["Alive"] and node["NodeID"] not in self.lost]
        held = ", ".join(
            f"{node['NodeManagerAddress']}: " + " ".join(
                f"{name} {amount:g}" for name, amount in sorted(node["Resources"].items()) if name in self.bundle()
            )
            for node in nodes
        )  # fmt: skip
        return f"{len(nodes)} host{'s' if len(nodes) != 1 else ''} ({held})"


def _import_ray() -> Any:
    try:
        import ray
        import ray.util
        from ray import cloudpickle  # noqa: F401
    except ImportError as error:
        raise ParallelError(
            f"runner.launcher is ray, and Ray is not installed ({error})",
            where="runner.launcher = ray",
            remedy="pip install 'shardtune[ray]', or use runner.nproc_per_node or torchrun",
        ) from error
    return ray


@contextmanager
def connected(runner: RunnerConfig) -> Iterator[Cluster]:
    """The cluster that a recipe names, or one of this machine's that ends with this."""
    ray = _import_ray()
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, runner)
    try:
        gpus = runner.ray.gpus_per_worker
        if gpus is None:
            gpus = 0 if runner.device == "cpu" or not ray.cluster_resources().get("GPU") else 1
        yield Cluster(ray, runner, gpus)
    finally:
        if ours:
            ray.shutdown()


def _connect(ray: Any, runner: RunnerConfig) -> None:
    address = runner.ray.address
    if address not in (None, "auto"):
        _check_head(str(address))
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "shardtune"}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # asks the network
        cores = max(os.cpu_count() or 1, runner.workers * runner.ray.cpus_per_worker)  # as nproc_per_node may, too
        options |= {"num_cpus": cores, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(address=address or "local", **options)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise _no_cluster(address, str(error).strip().splitlines()[0]) from error
    finally:
        for number, handler in before.items():  # Ray sets one of its own, which would end the run without saving
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
    """Run `python -m shardtune <arguments>` as so many ranks on the cluster, and wait for all of them.

    Args:
        cluster: where.
        arguments: of the command; RECIPE stands for the recipe's file.
        recipe: sent along.
        workers: how many ranks.
        environment: what the ranks' holds besides.
        stop: passed on to the ranks.
        report: receives where the ranks are.
        bare: pass on rank 0's output as it is; every other line carries its rank.

    Raises:
        As `run_ranks`; RankLost also where a host is gone.
    """
    ray, runner = cluster.ray, recipe.runner
    ray.cloudpickle.register_pickle_by_value(sys.modules[RankHolder.__module__])
    group = _reserve(cluster, workers, stop)
    cluster.reserved = None
    with stop.deferred():
        ranks = _Ranks(ray, runner.lost_after, bare)
        try:
            ranks.make(cluster, group, workers)
            ranks.start(arguments, recipe, environment, report)
            ranks.watch(stop)
        finally:
            ranks.end()
            with suppress(Exception):  # the cluster may be gone
                ray.util.remove_placement_group(group)
            cluster.lost |= ranks.lost_nodes()
        raise_outcome(ranks.codes, ranks.reports, told=stop.asked, gone=ranks.gone)


def _reserve(cluster: Cluster, workers: int, stop: StopSignal) -> Any:
    """Room for all workers; an error where the cluster does not have it in time."""
    if cluster.reserved is not None and cluster.reserved[0] == workers:
        return cluster.reserved[1]
    asked = cluster.config.ray
    group = _try_to_reserve(cluster, workers, asked.wait_seconds, stop)
    if group is not None:
        return group
    takes = " ".join(f"{name} {amount:g}" for name, amount in cluster.bundle().items())
    raise ParallelError(
        f"the cluster has no room for {workers} workers, waited for {asked.wait_seconds} s: each takes {takes}, "
        f"placement is {asked.placement}, and there is {cluster.describe()}",
        where="runner.num_workers",
        remedy=f"lower it (room for {cluster.room()} if nothing else runs) or what each takes, or add hosts",
    )


def _try_to_reserve(cluster: Cluster, workers: int, seconds: float, stop: StopSignal) -> Any | None:
    ray = cluster.ray
    labels = [{"ray.io/node-id": f"!in({','.join(sorted(cluster.lost))})"}] * workers if cluster.lost else None
    group = ray.util.placement_group(
        [cluster.bundle()] * workers, strategy=cluster.config.ray.placement.upper(), bundle_label_selector=labels
    )
    ready, until = group.ready(), time.monotonic() + seconds
    try:
        while not ray.wait([ready], timeout=0.25)[0]:
            stop.check()
            if time.monotonic() > until:
                ray.util.remove_placement_group(group)
                return None
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    return group


def reserve_for_the_rest(cluster: Cluster, numbers: Sequence[int], stop: StopSignal) -> int:
    """Room for the next start after a loss.

    Args:
        cluster: where.
        numbers: of workers that would do, the largest first.
        stop: ends the waiting.

    Returns:
        For how many there is room; 0 if too few hosts are left and none came in time.
    """
    until = time.monotonic() + cluster.config.ray.wait_seconds
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

    def __init__(self, ray: Any, lost_after: float, bare: bool) -> None:
        self._ray = ray
        self._lost_after = lost_after
        self._bare = bare
        self._holders: list[Any] = []
        self._places: list[Place] = []
        self.codes: list[int | None] = []
        self.reports: list[RankReport] = []
        self.gone: dict[int, str] = {}

    def make(self, cluster: Cluster, group: Any, workers: int) -> None:
        """Make the actors, in the order of their hosts."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind = self._ray.remote(RankHolder)
        bundle = cluster.bundle()
        made = [
            kind.options(
                num_cpus=bundle["CPU"],
                num_gpus=cluster.gpus_per_worker,
                resources={name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
                max_restarts=0,
            ).remote(self._lost_after)
            for number in range(workers)
        ]
        self._holders = made
        self.codes = [None] * workers
        places = self._ask([holder.place.remote(cluster.config.master_port) for holder in made])
        if self.gone:
            return
        here = self._ray.get_runtime_context().get_node_id()  # rank 0 is near the one who looks on
        nodes = sorted(dict.fromkeys(place.node for place in places), key=lambda node: node != here)
        order = sorted(range(workers), key=lambda number: nodes.index(places[number].node))
        self._holders = [made[number] for number in order]
        self._places = [places[number] for number in order]

    def _ask(self, refs: list[Any]) -> list[Any]:
        """The answers of all actors; those that do not answer in time are gone."""
        _, late = self._ray.wait(refs, num_returns=len(refs), timeout=self._lost_after)
        answers: list[Any] = []
        for rank, ref in enumerate(refs):
            try:
                if ref in late:
                    self.gone[rank] = f"did not answer for {self._lost_after:g} s"
                answers.append(None if ref in late else self._ray.get(ref))
            except self._ray.exceptions.RayActorError:
                self.gone[rank] = "is gone: its actor has ended"
                answers.append(None)
        return answers

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
        passed_on = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        started = [
            holder.start.remote(
                list(arguments), recipe.to_yaml(), {**passed_on, **environment, **self._variables(rank, nodes)}, names
            )
            for rank, holder in enumerate(self._holders)
        ]
        on = ", ".join(f"{self._count(node)} on {self._host(node)}" for node in nodes)
        report(f"Ray: {len(self._holders)} workers, {on}")
        self._ask(started)

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
        """Those that torchrun sets."""
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
        """Pass on what the ranks print until all have ended, or some moments after the first that did not end well."""
        heard = [time.monotonic()] * len(self._holders)
        asked: dict[Any, int] = {}
        until, told = None, False
        while True:
            if stop.asked and not told:
                told = True
                for holder in self._holders:
                    holder.stop.remote()
            waiting = [rank for rank in range(len(self._holders)) if self.codes[rank] is None and rank not in self.gone]
            if until is None and (any(self.codes) or self.gone):
                until = time.monotonic() + GRACE_SECONDS
            if not waiting or (until is not None and time.monotonic() > until):
                return
            asked |= {self._holders[rank].sign.remote(): rank for rank in waiting if rank not in asked.values()}
            ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=POLL_SECONDS)
            for ref in ready:
                rank = asked.pop(ref)
                heard[rank] = time.monotonic()
                self._take(rank, ref)
            for rank in (rank for rank in waiting if time.monotonic() - heard[rank] > self._lost_after):
                self.gone.setdefault(rank, f"{self._on(rank)} is lost: nothing was heard for {self._lost_after:g} s")
            if ready:
                time.sleep(POLL_SECONDS)

    def _take(self, rank: int, ref: Any) -> None:
        try:
            sign: Sign = self._ray.get(ref)
        except self._ray.exceptions.RayActorError:
            self.gone[rank] = f"{self._on(rank)} is lost: its actor has ended"
            return
        for stream, text in sign.lines:
            self._print(rank, stream, text)
        self.codes[rank] = sign.code
        if sign.report is not None and sign.code is not None:
            self.reports = sorted([*self.reports, RankReport(**sign.report)], key=lambda report: report.time)

    def _on(self, rank: int) -> str:
        return f"on {self._places[rank].host} ({self._places[rank].address})" if self._places else ""

    def _print(self, rank: int, stream: str, text: str) -> None:
        where = f"{rank} {self._places[rank].host}" if len({place.node for place in self._places}) > 1 else str(rank)
        prefix = "" if self._bare and rank == 0 else f"[rank {where}] "
        print(f"{prefix}{text}", file=sys.stdout if stream == "stdout" else sys.stderr, flush=True)

    def lost_nodes(self) -> set[str]:
        """Hosts that did not answer, as opposed to those whose actor alone has ended."""
        silent = {rank for rank, what in self.gone.items() if "heard" in what}
        return {self._places[rank].node for rank in silent} if self._places else set()

    def end(self) -> None:
        """Kill what is left: the ranks first, then their actors."""
        reachable = [holder for rank, holder in enumerate(self._holders) if rank not in self.gone]
        with suppress(Exception):  # an actor that cannot answer any more is killed by the next lines
            refs = [holder.end.remote() for holder in reachable]
            if refs:
                self._ray.wait(refs, num_returns=len(refs), timeout=END_SECONDS)
        for holder in self._holders:
            with suppress(Exception):
                self._ray.kill(holder)
