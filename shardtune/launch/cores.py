"""How many processor cores this process may use: of a shared machine or in a container often fewer than there are."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

WAITING = {"GOMP_SPINCOUNT": "1000"}
"""Of GNU's OpenMP, with which torch computes: the turns, of 10 to 50 ns, that a thread waits for others before it
sleeps. So it does by itself where it has more threads than cores; it does not know of other programs."""
CHOSEN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "RANK")
"""Variables with which users choose how threads wait, and that of a rank, which has what its launcher has chosen."""
LOOK_SECONDS = 0.1
"""How long the machine is watched for other programs."""
TAKEN = 0.5
"""Cores that these may use without a difference being made."""
STAT = Path("/proc/stat")
CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """The cores of this process's affinity, or those of its container's limit if these are fewer; at least 1."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(limit) for limit in cpu_limits())]))


def threads_of_rank(num_ranks: int) -> int:
    """The threads of one of several ranks that share this machine: all cores for each would slow down the others."""
    return max(1, usable_cores() // num_ranks)


def limit_threads() -> None:
    """Keep torch to the cores of this process, unless OMP_NUM_THREADS is set; it does not know a container's limit."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > usable_cores():
        torch.set_num_threads(usable_cores())


def waiting(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which threads that wait for others soon give up their core, where other programs use the cores now.

    They count for a process that imports torch afterwards. By default its threads wait actively for milliseconds at the
    end of each operation, and keep the core that the last of them needs where another program has one too. On a machine
    of its own that is faster by up to a quarter, so nothing is set there, nor where a user has chosen.
    """
    if any(name in environment for name in CHOSEN) or environment.get("OMP_NUM_THREADS") == "1":
        return {}
    return dict(WAITING) if idle_cores() < usable_cores() - TAKEN else {}


def idle_cores(stat: Path = STAT, seconds: float = LOOK_SECONDS) -> float:
    """How many of the cores that this process may use are idle; infinite where the system does not say."""
    try:
        before, began = _idle_ticks(stat), time.perf_counter()
        time.sleep(seconds)
        ticks = _idle_ticks(stat) - before
        return ticks / os.sysconf("SC_CLK_TCK") / (time.perf_counter() - began)
    except (OSError, ValueError, AttributeError):  # it is not Linux, or hides its numbers
        return math.inf


def _idle_ticks(stat: Path) -> int:
    """Since the machine was started, of all cores in this process's affinity: idle, or waiting for a disk."""
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    cores = [words for line in stat.read_text().splitlines() if (words := line.split()) and words[0] in mine]
    return sum(int(idle) + int(disk) for _, _, _, _, idle, disk, *_ in cores)


def cpu_limits(cgroups: Path = CGROUPS, own: Path = OWN) -> Iterator[float]:
    """The limits in cores of this process's control groups and of those around them (cgroup 2 and 1)."""
    with suppress(OSError):  # the system has no control groups
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = cgroups / "cpu" if controllers else cgroups
            inside = PurePosixPath(path.lstrip("/"))
            for folder in (inside, *inside.parents):
                limit = _limit(top / folder)
                if limit is not None:
                    yield limit


def _limit(folder: Path) -> float | None:
    """The limit of one control group, in cores; None without one, and where it cannot be read."""
    for read in (_of_version_2, _of_version_1):
        with suppress(OSError, ValueError):  # no such file; `max` is no number
            quota, period = read(folder)
            if quota > 0 and period > 0:
                return quota / period
    return None


def _of_version_2(folder: Path) -> tuple[int, int]:
    quota, period = (folder / "cpu.max").read_text().split()
    return int(quota), int(period)


def _of_version_1(folder: Path) -> tuple[int, int]:
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())
