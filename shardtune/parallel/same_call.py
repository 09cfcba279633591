"""Compares, before weights are gathered, what the ranks call: a call on some ranks alone would wait for ever."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from shardtune.errors import ParallelError
from shardtune.parallel.ranks import Ranks

LIMIT_SECONDS = 300.0
"""How long a rank waits for the others to make the same call."""


class SameCall:
    """Compares calls that gather weights outside of a model's forward; every rank makes one.

    Args:
        ranks: of the run.

    Attributes:
        running: the name of the method that uses weights; "": none.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group = ranks.new_group(timedelta(seconds=LIMIT_SECONDS))
        self.running = ""
        self._compared = False

    @contextmanager
    def method(self, name: str) -> Iterator[None]:
        """Inside, weights are used by a method, whose name is compared once; methods inside it are a part of it."""
        if self.running:
            yield
            return
        self.running, self._compared = name, False
        try:
            yield
        finally:
            self.running = ""

    def compare(self, part: str) -> None:
        """Compare the method that is running, if that is not done yet; outside of methods the part that is called.

        Raises:
            ParallelError: other ranks call something else, or nothing.
        """
        if self._group is None or (self.running and self._compared):
            return
        name = self.running or part
        self._compared = True
        number = zlib.crc32(name.encode())
        ends = torch.tensor([number, -number], dtype=torch.int64)
        try:
            dist.all_reduce(ends, op=dist.ReduceOp.MIN, group=self._group)
        except RuntimeError as error:
            raise self._refusal(f"rank {self._ranks.rank} calls {name}, and not all others do") from error
        if int(ends[0]) != -int(ends[1]):
            raise self._refusal(f"rank {self._ranks.rank} calls {name}, and others something else")

    def agree(self, answer: bool) -> bool:
        """Whether it is true on all ranks, each of which calls this."""
        if self._group is None:
            return answer
        flag = torch.tensor(int(answer))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group)
        return bool(flag)

    def _refusal(self, what: str) -> ParallelError:
        return ParallelError(
            f"{what} (waited for up to {LIMIT_SECONDS:.0f} s)",
            where="methods and parts of a sharded model",
            remedy="call it on all ranks, as often on each: weights are gathered from all of them",
        )
