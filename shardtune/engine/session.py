"""Backends for the ranks of engines: this process, this machine, torchrun, or a Ray cluster."""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal, get_args

from shardtune.engine.rank_process import Host, Limits, device_for
from shardtune.engine.ranks import InProcess, Team
from shardtune.engine.ranks_local import LocalRanks
from shardtune.engine.ranks_ray import RayRanks, connect
from shardtune.engine.ranks_spmd import SpmdRanks
from shardtune.errors import ParallelError
from shardtune.launch.ray.cluster import Placement
from shardtune.parallel.ranks import check_launcher

Backend = Literal["local", "torchrun", "ray"]
BACKENDS = ("local", "torchrun", "ray")
Device = Literal["auto", "cpu", "cuda"]
Placing = Literal["pack", "spread", "strict_pack", "strict_spread"]


@dataclass(slots=True)
class Session:
    """The choices of `init`.

    Attributes:
        backend: local | torchrun | ray.
        device: auto | cpu | cuda.
        placement: on a Ray cluster.
        in_process: the team of one rank in this process, once there is one.
        spmd: the team of torchrun's ranks, once there is one.
        limits: on waiting.
        teams: of ranks in other processes.
    """

    backend: str
    device: str
    placement: Placement
    in_process: Team | None = None
    spmd: SpmdRanks | None = None
    limits: Limits = field(default_factory=Limits)
    teams: list[Team] = field(default_factory=list)

    def team(self, num_ranks: int) -> Team:
        """Ranks for one engine, separate from those of others where possible."""
        if self.backend == "torchrun":
            self.spmd = self.spmd or SpmdRanks(self.device, self.limits)
            return self.spmd
        if self.backend == "ray":
            return self._noted(RayRanks(num_ranks, self.device, self.placement, self.limits))
        if num_ranks == 1:
            self.in_process = self.in_process or InProcess(Host(0, 1, device_for(self.device, 0), copies=True))
            return self.in_process
        return self._noted(LocalRanks(num_ranks, self.device, self._first_gpu(num_ranks), self.limits))

    def _noted(self, team: Team) -> Team:
        self.teams = [*(each for each in self.teams if not each.dead), team]
        return team

    def _first_gpu(self, num_ranks: int) -> int:
        """The first of so many neighbouring GPUs of this machine that no processes of other engines have."""
        teams = [team for team in self.teams if isinstance(team, LocalRanks) and not team.dead]
        taken = {gpu for team in teams for gpu in team.gpus}
        return next(gpu for gpu in itertools.count() if taken.isdisjoint(range(gpu, gpu + num_ranks)))

    @property
    def num_ranks(self) -> int | None:
        """The number of ranks that engines have to use; None: any number."""
        return int(os.environ["WORLD_SIZE"]) if self.backend == "torchrun" else None


_session: Session | None = None


def init(
    backend: Backend | None = None,
    *,
    address: str | None = None,
    device: Device = "auto",
    placement: Placing = "pack",
    cpus_per_rank: float = 1.0,
    gpus_per_rank: float | None = None,
    resources_per_rank: Mapping[str, float] | None = None,
    wait_seconds: float = 60.0,
    watchdog_seconds: float | None = 600.0,
    collective_timeout: float = 1800.0,
) -> None:
    """Choose the backend for the ranks of engines. Without it, `build` uses the defaults of `init()`.

    Args:
        backend: "torchrun": this process is a rank, and so are its peers; chosen where WORLD_SIZE is above 1. "ray":
            actors on a cluster; chosen where Ray is connected or RAY_ADDRESS is set. "local": one rank is this process,
            several are processes of this machine.
        address: of a Ray cluster; None: the one that is connected or that RAY_ADDRESS names, else one of this machine.
        device: auto, cpu or cuda.
        placement: of ranks on the hosts of a Ray cluster.
        cpus_per_rank: of a Ray cluster.
        gpus_per_rank: of a Ray cluster; None: one where it has any.
        resources_per_rank: of a Ray cluster, others.
        wait_seconds: for free resources of a Ray cluster.
        watchdog_seconds: a call in which a rank waits so long in one collective for the others counts as stuck; the
            error names the rank that differs. 0 or None: never.
        collective_timeout: seconds in a collective, after which torch ends it with an error.

    Raises:
        ParallelError: there is no such backend, or it cannot be used here.
    """
    global _session
    if backend in (None, "torchrun"):
        check_launcher()
    chosen = backend or _detected(address)
    _check_choice("backend", chosen, BACKENDS)
    _check_choice("device", device, get_args(Device))
    _check_choice("placement", placement, get_args(Placing))
    _check_seconds("watchdog_seconds", 0.0 if watchdog_seconds is None else watchdog_seconds, least=0.0)
    _check_seconds("collective_timeout", collective_timeout, least=1e-3)
    if chosen == "torchrun" and "WORLD_SIZE" not in os.environ:
        raise ParallelError(
            "no launcher has started this process",
            where='shardtune.init(backend="torchrun")',
            remedy="start the script by torchrun --nproc-per-node=N script.py",
        )
    if chosen == "ray":
        connect(address)
    where = Placement(placement, cpus_per_rank, gpus_per_rank, dict(resources_per_rank or {}), wait_seconds)
    if chosen != "ray":
        _check_no_cluster(chosen, address, where, named=backend is not None)
    spmd = _session.spmd if _session is not None else None
    limits = Limits(watchdog_seconds or 0.0, collective_timeout)
    _session = Session(chosen, device, where, spmd=spmd, limits=limits)


def _check_choice(name: str, given: str, choices: Sequence[str]) -> None:
    if given not in choices:
        raise ParallelError(
            f"there is no {name} {given!r}", where=f"shardtune.init({name}=…)", remedy=f"use {', '.join(choices)}"
        )


def _check_seconds(name: str, given: object, least: float) -> None:
    if isinstance(given, bool) or not isinstance(given, Real) or not least <= float(given) < float("inf"):
        raise ParallelError(
            f"{given!r} is no number of seconds" + ("" if least else " from 0 on"),
            where=f"shardtune.init({name}=…)",
            remedy="give seconds above 0" + ("" if least else ", or 0 or None for no limit"),
        )


def _check_no_cluster(backend: str, address: str | None, where: Placement, *, named: bool) -> None:
    """Refuse what only ranks on a Ray cluster have; a script that names no backend may be one for a cluster, too."""
    plain = Placement("pack", 1.0, None, {}, 60.0)
    changed = {
        "address": address is not None,
        "placement": where.strategy != plain.strategy,
        "cpus_per_rank": where.cpus != plain.cpus,
        "gpus_per_rank": where.gpus != plain.gpus,
        "resources_per_rank": where.resources != plain.resources,
        "wait_seconds": where.wait_seconds != plain.wait_seconds,
    }
    unused = [name for name, given in changed.items() if given]
    what = f"{', '.join(unused)} would have no effect: the ranks are those of the backend {backend}"
    if unused and not named:
        warnings.warn(f"shardtune.init: {what}", stacklevel=3)
    elif unused:
        raise ParallelError(
            what,
            where=f"shardtune.init({unused[0]}=…)",
            remedy='leave it out, or use backend="ray"',
        )


def current_session() -> Session:
    """The session of `init`, or a default one."""
    if _session is None:
        init()
    assert _session is not None
    return _session


def _detected(address: str | None) -> Backend:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "torchrun"
    if address is not None or "RAY_ADDRESS" in os.environ:
        return "ray"
    ray = sys.modules.get("ray")
    return "ray" if ray is not None and ray.is_initialized() else "local"
