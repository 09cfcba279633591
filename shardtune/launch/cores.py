"""How many processor cores this process may use: of a shared machine or in a container often fewer than there are."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

WAITING = {"GOMP_SPINCOUNT": "1000"}
"""Of GNU's OpenMP, with which torch computes: the turns, of 10 to 50 ns, that a thread waits for others before it
sleeps. So it does by itself where it has more threads than cores; it does not know of other programs."""
WAITS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables with which users choose how threads wait."""
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
    """Variables by which threads that wait for others soon give up their core; none where a user has chosen otherwise.

    They count for a process that imports torch afterwards. By default its threads wait actively for milliseconds at the
    end of each operation, and keep the core that the last of them needs where another program has one too.
    """
    return {} if any(name in environment for name in WAITS) else dict(WAITING)


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
