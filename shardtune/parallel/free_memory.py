"""How much memory is free: of a GPU, or of a host, of which a container may have a part only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil
import torch

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still take on a device, without swapping on a host."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return max(0, min([psutil.virtual_memory().available, *(limit - used for limit, used in _limits())]))


def host_bytes() -> int:
    """The memory of this host, or of this process's container if that is less."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())])


def _limits() -> Iterator[tuple[int, int]]:
    """Limit and use of the control groups (version 2, or 1) of this process and of those around them, in bytes.

    Cached parts of files, which the system frees when memory is needed, are not counted as used.
    """
    with suppress(OSError):  # the system has no control groups
        for line in OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = CGROUPS / "memory" if controllers else CGROUPS
            names = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            )
            inside = PurePosixPath(path.lstrip("/"))
            for folder in (inside, *inside.parents):
                with suppress(OSError, ValueError):  # no such file; "max" is no number
                    limit, used = (int((top / folder / name).read_text()) for name in names)
                    yield limit, used - _cached(top / folder)


def _cached(folder: Path) -> int:
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
