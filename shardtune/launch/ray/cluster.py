"""Ray, for runs and for engines: a connection to a cluster, room on its hosts, and actors there.

Only this file uses Ray's interface (and `actor.py`, which runs on the cluster). Ray is an extra and slow to import,
so it is imported inside the functions.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Generic, TypedDict, TypeVar, cast

import psutil

from shardtune.errors import ParallelError

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

T = TypeVar("T")
R = TypeVar("R")
POLL_SECONDS = 0.25
HEAD_SECONDS = 10.0
"""How long to try to connect to the head of a cluster: Ray itself tries for minutes, without a message."""
ADDRESS = "RAY_ADDRESS"
TOKENS = "RAY_AUTH_MODE"
NO_CLUSTER = "ray status shows a running cluster, ray start --head begins one"
LATEST_LOGS = "ray/session_latest/logs"
"""Of the cluster that was started last on this machine, below the directory of temporary files."""


class ActorEnded(Exception):
    """An actor or its host has died; the message is Ray's."""


class Node(TypedDict):
    """A host of a cluster, as Ray describes it; it has further keys."""

    NodeID: str
    NodeManagerAddress: str
    Alive: bool
    Resources: dict[str, float]


@dataclass(frozen=True, slots=True)
class Placement:
    """The resources of each rank and the placement of ranks on hosts.

    Attributes:
        strategy: pack | spread | strict_pack | strict_spread.
        cpus: of each rank.
        gpus: of each rank; None: one where the cluster has any.
        resources: further ones of each rank.
        wait_seconds: how long to wait for free resources.
    """

    strategy: str = "pack"
    cpus: float = 1.0
    gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    wait_seconds: float = 60.0

    def resolved(self, device: str) -> Placement:
        """With the number of GPUs, for ranks on a device (auto, cpu or cuda) of the connected cluster."""
        import ray

        if self.gpus is not None:
            return self
        return replace(self, gpus=1.0 if device != "cpu" and ray.cluster_resources().get("GPU") else 0.0)

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one rank, by Ray's names."""
        gpus = {"GPU": float(self.gpus)} if self.gpus else {}
        return {"CPU": float(self.cpus), **gpus, **{name: float(amount) for name, amount in self.resources.items()}}

    def __str__(self) -> str:
        return " ".join(f"{name} {amount:g}" for name, amount in self.bundle.items())


def import_ray(where: str, remedy: str) -> None:
    """Check that Ray can be imported.

    Raises:
        ParallelError: it is not installed.
    """
    try:
        import_module("ray")
        import_module("ray.util")
        import_module("ray.cloudpickle")
    except ImportError as error:
        raise ParallelError(
            f"Ray is not installed ({error})", where=where, remedy=f"pip install 'shardtune[ray]', or {remedy}"
        ) from error


def connect(
    address: str | None,
    *,
    cores: int,
    where: str,
    remedy: str = NO_CLUSTER,
    log_to_driver: bool = True,
    object_store_bytes: int | None = None,
) -> bool:
    """Connect to a cluster, or start one of this machine alone; returns False where this process is connected already.

    Args:
        address: as `ray.init` takes it; None: of a cluster of this machine alone.
        cores: of such a cluster; more than the machine has lets ranks share them, as processes do.
        where: of the setting that names the address, for messages.
        remedy: for messages.
        log_to_driver: pass on what actors print.
        object_store_bytes: of a cluster of this machine alone; None: as Ray chooses.

    Raises:
        ParallelError: the cluster cannot be reached.
    """
    import ray

    if ray.is_initialized():
        return False
    _check_head(address, where, remedy)
    local = {}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # the prompt for it contacts the network
        local = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": object_store_bytes}
    begin = partial(
        ray.init,
        address=address or "local",
        logging_level=logging.ERROR,
        namespace="shardtune",
        log_to_driver=log_to_driver,
        **local,
    )
    try:
        _begin_own(begin) if address is None else begin()
    except Exception as error:  # Ray raises the class itself where a process of its own does not start in time
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if address is None:
            raise _not_begun(reason, where) from error
        # Ray turns its token on by itself for a head that it starts, but not for an address that is given.
        token = "" if TOKENS in os.environ else f"; where the head has a token, set {TOKENS}=token"
        raise no_cluster(reason, where, remedy + token) from error
    return True


def _begin_own(begin: Callable[[], object]) -> None:
    """Start a cluster of this machine alone, a second time where Ray's processes need more than its 30 s at first, as
    on a busy machine."""
    import ray

    try:
        begin()
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        begin()


def _not_begun(reason: str, where: str) -> ParallelError:
    """The error for a cluster of this machine alone that does not start."""
    logs = Path(os.environ.get("RAY_TMPDIR", "/tmp"), LATEST_LOGS)
    return ParallelError(
        f"no Ray cluster of this machine alone could be started: {reason}",
        where=where,
        remedy=f"read its logs in {logs}, and try again when the machine is less busy; or start one with ray start "
        "--head and give auto as the address",
    )


def _check_head(address: str | None, where: str, remedy: str) -> None:
    """Check that something listens at the head of a cluster, also where Ray looks for the address (`auto`)."""
    source = ""
    if address == "auto" and os.environ.get(ADDRESS):
        address = os.environ[ADDRESS]
        source = f"{ADDRESS}="
        remedy = f"set {ADDRESS} to a running head, or unset it; {remedy}"
    if address == "auto":
        address = _last_started()
        source = "the cluster of the last ray start, "
    if address in (None, "local", "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        reason = f"{source}{address} is not host:port of the head (of a ray:// address, the host and 6379)"
        raise no_cluster(reason, where, remedy)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=HEAD_SECONDS).close()
    except OSError as error:
        raise no_cluster(f"{source}{address} does not answer ({error})", where, remedy) from error


def _last_started() -> str | None:
    """The address in the file that `ray start` leaves, if no process of Ray that is on this machine names another."""
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    if any(process.info["name"] == "raylet" for process in psutil.process_iter(["name"])) or not file.is_file():
        return None
    return file.read_text().strip() or None


def no_cluster(reason: str, where: str, remedy: str) -> ParallelError:
    """The error for a cluster that cannot be reached."""
    return ParallelError(f"the Ray cluster cannot be used: {reason}", where=where, remedy=remedy)


def is_connected() -> bool:
    import ray

    return ray.is_initialized()


def disconnect() -> None:
    import ray

    ray.shutdown()


def live_nodes(avoid: Collection[str] = ()) -> list[Node]:
    """The live hosts of the cluster, without those to avoid (by Ray's names)."""
    import ray

    nodes: list[Node] = ray.nodes()
    return [node for node in nodes if node["Alive"] and node["NodeID"] not in avoid]


def own_node() -> str:
    """Ray's name of this host."""
    import ray

    return ray.get_runtime_context().get_node_id()


def free_resources() -> Mapping[str, float]:
    """The free resources of the whole cluster."""
    import ray

    return ray.available_resources()


def reserve(
    placement: Placement,
    num_ranks: int,
    *,
    seconds: float,
    avoid: Collection[str] = (),
    check: Callable[[], None] = lambda: None,
) -> PlacementGroup | None:
    """Reserve resources for all ranks at once; None if the cluster does not have them in time.

    Args:
        placement: of the ranks.
        num_ranks: how many.
        seconds: to wait.
        avoid: hosts that get no rank, by Ray's names.
        check: called while waiting; may raise.
    """
    import ray

    elsewhere = {"ray.io/node-id": f"!in({','.join(sorted(avoid))})"}
    make = partial(ray.util.placement_group, [placement.bundle] * num_ranks, strategy=placement.strategy.upper())
    group = make(bundle_label_selector=[elsewhere] * num_ranks) if avoid else make()
    ready, until = group.ready(), time.monotonic() + seconds
    try:
        while not ray.wait([ready], timeout=POLL_SECONDS)[0]:
            check()
            if time.monotonic() > until:
                release(group)
                return None
    except BaseException:
        release(group)
        raise
    return group


def release(group: PlacementGroup) -> None:
    """Release reserved resources."""
    import ray

    ray.util.remove_placement_group(group)


class Actor(Generic[T]):
    """An actor of a class `T` on a cluster."""

    def __init__(self, handle: ActorHandle[T]) -> None:
        self._handle = handle

    def call(self, method: Callable[Concatenate[T, ...], R], *arguments: object) -> ObjectRef[R]:
        """Start a call of a method (given as an attribute of the class); `result` waits for the value.

        Args:
            method: of the class.
            arguments: of the method; a reference from `put` is replaced by its value.
        """
        return getattr(self._handle, method.__name__).remote(*arguments)

    def kill(self) -> None:
        """End the actor, if it can be reached."""
        import ray

        with suppress(Exception):
            ray.kill(self._handle)


def make_actors(
    kind: type[T], placement: Placement, group: PlacementGroup, num_ranks: int, *arguments: object
) -> list[Actor[T]]:
    """Create an actor of a class in each reserved bundle.

    Args:
        kind: the class.
        placement: of the ranks, resolved.
        group: the reservation.
        num_ranks: for which it was made.
        arguments: of the class.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def make(number: int) -> Actor[T]:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        remote = ray.remote(kind).options(
            num_cpus=placement.cpus,
            num_gpus=placement.gpus,
            resources=dict(placement.resources),
            scheduling_strategy=place,
            max_restarts=0,
        )
        return Actor(cast("ActorHandle[T]", remote.remote(*arguments)))

    return [make(number) for number in range(num_ranks)]


def put(value: bytes) -> ObjectRef[bytes]:
    """Bytes in the cluster's memory, to be sent to several actors once."""
    import ray

    return ray.put(value)


def wait(refs: Sequence[ObjectRef[R]], *, number: int, seconds: float) -> list[ObjectRef[R]]:
    """The results that are ready, once `number` of them are or the time is up."""
    import ray

    return ray.wait(list(refs), num_returns=number, timeout=seconds)[0]


def result(ref: ObjectRef[R]) -> R:
    """A result of an actor's method.

    Raises:
        ActorEnded: the actor is gone.
    """
    import ray
    from ray.exceptions import RayActorError

    try:
        return ray.get(ref)
    except RayActorError as error:
        raise ActorEnded(str(error)) from error
