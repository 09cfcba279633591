"""The process of one rank: its modules, and the requests that they carry out."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardtune.batch.seeds import derive_seed, seed_generators
from shardtune.config.rank_layout import Layout
from shardtune.engine.call_board import CallBoard
from shardtune.engine.call_watch import CallWatch, end_rank
from shardtune.engine.pickling import check_sendable, pack, sendable_error, unpack
from shardtune.engine.rank_module import Order, RankModule
from shardtune.engine.stops import CallInterrupted, Stops
from shardtune.engine.torch_settings import FollowedSettings, TorchSettings
from shardtune.errors import ParallelError, lost_a_peer
from shardtune.launch.watchdog.verdict import StandReport
from shardtune.parallel.gloo_threads import batch_threads
from shardtune.parallel.ranks import COLLECTIVE_SECONDS, Ranks, choose_device, close_group, lay_out
from shardtune.parallel.rendezvous import meet
from shardtune.parallel.shutdown import leave_at_exit


@dataclass(frozen=True, slots=True)
class Request:
    """A request to one rank.

    Attributes:
        engine: the owner of the module.
        action: "build", "end", or a method of `RankModule`.
        arguments: of it.
        of_first: only rank 0's result is needed.
        settings: torch's, of the caller; None: those of this process.
    """

    engine: str
    action: str
    arguments: tuple[Any, ...] = ()
    of_first: bool = False
    settings: TorchSettings | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on a rank.

    Attributes:
        rank: which one.
        error: the exception, if it can be pickled.
        text: its traceback.
        consequence: whether it only follows from another rank's failure.
        stands: where the rank waits for others that do not come; None for an exception.
    """

    rank: int
    error: BaseException | None
    text: str
    consequence: bool
    stands: StandReport | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a request: a value, or a failure, or where the rank has left an interrupted call.

    Attributes:
        units: of a call, differs between ranks that have called other units of the module after their last backward.
    """

    value: object = None
    failure: Failure | None = None
    left: tuple[int, int] | None = None
    units: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a rank's waiting for others.

    Attributes:
        watchdog_seconds: in one collective of a call, after which the call counts as stuck; 0: none.
        collective_timeout: seconds in a collective, after which torch ends it with an error.
        ended_seconds: in one collective of a call, after which it counts as stuck if other ranks have ended the call
            and the rest waits too; on GPUs, which may still work for a rank that has ended it, six times as long.
    """

    watchdog_seconds: float = 600.0
    collective_timeout: float = COLLECTIVE_SECONDS
    ended_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """The rendezvous of a team's ranks.

    Attributes:
        rank: of the receiving process.
        world_size: of the team.
        address: of rank 0's host.
        port: there.
        device: auto | cpu | cuda.
        local_rank: which GPU of its host.
        threads: of the process's computations; 0: unchanged.
        limits: on waiting.
    """

    rank: int
    world_size: int
    address: str = "127.0.0.1"
    port: int = 0
    device: str = "auto"
    local_rank: int = 0
    threads: int = 0
    limits: Limits = Limits()


class Host:
    """A rank.

    Args:
        rank: of this process among those of its team.
        world_size: of the team.
        device: to compute on.
        copies: whether values must be copied, because the caller is in the same process.
        limits: on waiting; None: no watchdog.
        store: in which the ranks met; None for a single rank.

    Attributes:
        board: of the ranks' calls; None for a single rank.
        on_stuck: receives where this rank waits for others that do not come.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        *,
        copies: bool = False,
        limits: Limits | None = None,
        store: dist.Store | None = None,
    ) -> None:
        self._rank, self._world_size, self._device, self._copies = rank, world_size, device, copies
        self._modules: dict[str, RankModule] = {}
        self._in_own_group: set[str] = set()
        self._calls = 0
        self._settings = FollowedSettings()
        self.on_stuck: Callable[[StandReport], None] = end_rank
        self.board = None if store is None or world_size == 1 else CallBoard(rank, world_size, store)
        limits = limits if limits is not None and world_size > 1 else Limits(0.0)
        ended = limits.ended_seconds * (6 if device.type == "cuda" else 1)
        self._watch = CallWatch(rank, limits.watchdog_seconds, self._stuck, self.board, ended)
        self._stops = Stops(self.board, remote=not copies)

    def _stuck(self, report: StandReport) -> None:
        self.on_stuck(report)

    @classmethod
    def join(cls, meeting: Meeting) -> Host:
        """Join the other ranks of a team; this process belongs to it alone."""
        if meeting.threads:
            torch.set_num_threads(meeting.threads)
        names = {"RANK": meeting.rank, "WORLD_SIZE": meeting.world_size, "LOCAL_RANK": meeting.local_rank}
        os.environ.update({name: str(value) for name, value in names.items()})
        device, store = device_for(meeting.device, meeting.local_rank), None
        if meeting.world_size > 1:
            limit = timedelta(seconds=meeting.limits.collective_timeout)
            store = meet(meeting.address, meeting.port, meeting.rank, meeting.world_size, limit)
            with batch_threads():
                dist.init_process_group(
                    backend_for(device), store=store, rank=meeting.rank, world_size=meeting.world_size, timeout=limit
                )
        return cls(meeting.rank, meeting.world_size, device, limits=meeting.limits, store=store)

    def do(self, request: Request) -> object:
        """Carry out a request; exceptions of a user's method are raised unchanged."""
        if request.action == "build":
            (order,) = request.arguments
            self._modules[request.engine] = self._build(request.engine, order)
            return self._modules[request.engine].notes
        if request.action == "end":
            return self._end(request.engine)
        resident = self._modules[request.engine]
        if request.action == "call":
            self._calls += 1
            try:
                with self._watch.during(str(request.arguments[0]), self._calls), self._stops.during(self._calls):
                    value = resident.call(*request.arguments, copy=self._copies)
                check_sendable(value, f"{resident.name}.{request.arguments[0]}", f"its value on rank {self._rank}")
                return value
            except BaseException:  # an interrupted one as well: in a notebook the module lives on
                resident.recover()
                raise
        if request.action == "push_here":
            number, other, dtype = request.arguments
            return resident.push_here(number, self._modules[other], dtype)
        value = getattr(resident, request.action)(*request.arguments)
        return None if request.of_first and self._rank and not self._copies else value

    def units(self, request: Request) -> int:
        """`Outcome.units` of a request that was carried out."""
        return self._modules[request.engine].called_units() if request.action == "call" else 0

    def answer(self, packed: bytes) -> bytes:
        """The packed outcome of a packed request."""
        try:
            request: Request = unpack(packed)
            with self._settings.during(request.settings):
                value = self.do(request)
            return pack(Outcome(value, units=self.units(request)))
        except CallInterrupted as interrupted:
            return pack(Outcome(left=interrupted.place))
        except Exception as error:
            return pack(Outcome(failure=failure_of(self._rank, error)))

    def _end(self, engine: str) -> None:
        """Release an engine, and with the last one the process group that was opened for them."""
        resident = self._modules.pop(engine, None)
        ended = resident.end() if resident is not None else None
        if self._in_own_group == {engine}:
            close_group()
        self._in_own_group.discard(engine)
        return ended

    def _build(self, engine: str, order: Order) -> RankModule:
        ranks = self._ranks(engine, order)
        if self._world_size > 1:
            seed_generators(derive_seed(order.seed, ranks.draws_rank, "engine"))
        return RankModule(order, ranks, self._stops)

    def _ranks(self, engine: str, order: Order) -> Ranks:
        if self._world_size > 1:
            return lay_out(order.layout, self._rank, self._device)
        if order.precision in ("fp32", "fp64"):
            return Ranks(0, 1, self._device)
        # Half precision is FSDP2's at one rank too: full-precision weights, of which it computes on casts.
        if self._in_own_group or _open_group_of_one(self._device):
            self._in_own_group.add(engine)
        return lay_out(Layout(), 0, self._device)


def device_for(device: str, local_rank: int) -> torch.device:
    """The device of a rank.

    Raises:
        ParallelError: there is none for it.
    """
    try:
        chosen = choose_device(device, local_rank)
    except ParallelError as error:
        raise ParallelError(
            error.what, where="shardtune.init(device=…)", remedy='use fewer ranks, colocate_with, or device="cpu"'
        ) from error
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen


def backend_for(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _open_group_of_one(device: torch.device) -> bool:
    """Open a process group of this process alone, unless one exists; returns whether it was opened."""
    if dist.is_initialized():
        return False
    store, limit = dist.HashStore(), timedelta(minutes=1)
    dist.init_process_group(backend_for(device), store=store, rank=0, world_size=1, timeout=limit)
    leave_at_exit()
    return True


def failure_of(rank: int, error: BaseException) -> Failure:
    """The picklable form of an exception, and always its traceback."""
    text = "".join(traceback.format_exception(error))
    return Failure(rank, sendable_error(error), text, lost_a_peer(error))
