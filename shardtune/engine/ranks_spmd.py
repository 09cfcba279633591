"""Ranks that torchrun (or another launcher) has started: each runs the caller's script, and calls are collective."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from shardtune.engine.pickling import pack_for_twin, unpack
from shardtune.engine.rank_process import Failure, Host, Limits, Outcome, Request, device_for, failure_of
from shardtune.engine.ranks import GRACE_SECONDS, Team
from shardtune.launch.cores import threads_of_rank
from shardtune.parallel.ranks import open_group
from shardtune.parallel.torch_private.processes import default_store


class SpmdRanks(Team):
    """This process and its like. Every rank makes the same calls; each gets the values of all.

    Args:
        device: auto | cpu | cuda.
        limits: on waiting.
    """

    def __init__(self, device: str, limits: Limits) -> None:
        self.rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        super().__init__(num_ranks)
        chosen = device_for(device, int(os.environ.get("LOCAL_RANK", "0")))
        if os.environ.get("OMP_NUM_THREADS") is None:
            torch.set_num_threads(threads_of_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        open_group(chosen, limits.collective_timeout)
        self._limits = limits
        self._host = Host(self.rank, num_ranks, chosen, copies=True, limits=limits, store=default_store())
        self._store = dist.PrefixStore("shardtune/engine", default_store())
        self._number = 0

    def _send(self, requests: Sequence[Request]) -> list[Outcome]:
        request = requests[self.rank]
        own: object = None
        packed = b""
        failure: Failure | None = None
        problem: BaseException | None = None
        try:
            own = self._host.do(request)
            packed = b"" if request.of_first else pack_for_twin(own)
        except Exception as error:
            problem, failure = error, failure_of(self.rank, error)
        failures = self._agree(failure, problem)
        if failures:
            return [Outcome(failure=each) for each in failures]
        if request.of_first:
            return [Outcome(own)] * self.num_ranks
        values: list[tuple[bytes, int]] = [(b"", 0)] * self.num_ranks
        dist.all_gather_object(values, (packed, self._host.units(request)))
        return [Outcome(unpack(value), units=units) for value, units in values]

    def _agree(self, failure: Failure | None, problem: BaseException | None) -> list[Failure]:
        """The failures of all ranks; one that fails alone ends here, as the others may be waiting for it elsewhere."""
        self._number += 1
        keys = [f"{self._number}/{rank}" for rank in range(self.num_ranks)]
        self._store.set(keys[self.rank], pack_for_twin(failure))  # pyright: ignore[reportArgumentType] (bytes are taken)
        limit = timedelta(seconds=self._limits.collective_timeout if failure is None else GRACE_SECONDS)
        try:
            self._store.wait(keys, limit)
        except RuntimeError as late:
            if problem is None:
                raise
            self.dead = f"rank {self.rank} failed, and the others did not come to the end of the call"
            _end_if_nobody_does()
            raise problem from late
        found = [unpack(self._store.get(key)) for key in keys]
        if self._number > 2:
            self._store.delete_key(f"{self._number - 2}/{self.rank}")
        return [each for each in found if each is not None]

    def close(self) -> None:
        """The processes are the caller's; only the engines on them end."""


def _end_if_nobody_does() -> None:
    """The others wait in a collective until this process is gone; a script that goes on would keep them there."""
    timer = threading.Timer(GRACE_SECONDS, os._exit, args=(1,))
    timer.daemon = True
    timer.start()
