"""How many shortened runs have room at the same time."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Condition

import psutil
import torch

from shardtune.errors import ParallelError
from shardtune.launch.cores import usable_cores
from shardtune.parallel.free_memory import free_bytes
from shardtune.parallel.ranks import choose_device

PEAK = "perf/peak_memory_gb"
LARGER = 4
"""At most so many times the memory of one run is what another takes: one in bf16, the other in fp64."""


def own_bytes() -> int:
    """What this process holds in memory."""
    return psutil.Process().memory_info().rss


class Room:
    """One run; once it has shown what it takes, as many ranks as there are cores and memory for.

    On GPUs the first is in each run, so there runs count and not ranks, and the memory is that GPU's.

    Args:
        device: `runner.device`.

    Attributes:
        on_gpu: whether runs are on GPUs.
    """

    def __init__(self, device: str) -> None:
        self._cores = usable_cores()
        try:
            first = choose_device(device, 0)
        except ParallelError:  # the run's own message is better
            first = torch.device("cpu")
        self.on_gpu = first.type == "cuda"
        self._memory = free_bytes(first)
        self._libraries = 0 if self.on_gpu else own_bytes()  # of each process, as of this one
        self._count, self._weighed = 1, False
        self._used, self._changed = 0, Condition()

    def has_room(self, ranks: int) -> bool:
        """Whether a run of that many ranks would begin at once."""
        return not self._used or self._used + self._part(ranks) <= self._count

    def take(self, ranks: int) -> int:
        """Wait until a run of that many ranks has room; returns what `give_back` needs."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_room(ranks))
            self._used += self._part(ranks)
        return self._part(ranks)

    def give_back(self, taken: int) -> None:
        with self._changed:
            self._used -= taken
            self._changed.notify_all()

    def weigh_running(self, log: Path) -> None:
        """`weigh` of a run that goes on, on processors, where it begins alone; a GPU's has to have ended."""
        if not (self.on_gpu or self._weighed):
            self.weigh(log)

    def weigh(self, log: Path) -> None:
        """Make room for as many runs as the memory that a run has logged allows; nothing where it has not.

        Args:
            log: its `metrics.jsonl`.
        """
        try:
            peak = max(json.loads(line).get(PEAK, 0.0) for line in log.read_text().splitlines())
        except (OSError, ValueError):  # it has logged nothing, or was killed within a line
            return
        if peak > 0.0:
            own = max(0.0, peak * 1e9 - self._libraries)
            others = int(self._memory / (LARGER * own + self._libraries)) - 1  # one is the plain run, in this process
            with self._changed:
                self._weighed = True
                self._count = max(1, min(self._cores, others))
                self._changed.notify_all()

    def _part(self, ranks: int) -> int:
        return 1 if self.on_gpu else ranks
