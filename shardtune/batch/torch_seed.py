"""torch's generators of random numbers, on the CPU and on this process's accelerators."""

from __future__ import annotations

from functools import cache

import torch


def seed_torch(seed: int) -> None:
    """Seed torch's generators on all devices, as `torch.manual_seed` does.

    `torch.manual_seed` also formats the stack, once for each kind of accelerator that is not in use, which takes half a
    millisecond or more.

    Args:
        seed: in [-2**63, 2**64).
    """
    accelerator = _accelerator()
    if accelerator not in {"", "cuda"}:
        torch.manual_seed(seed)
        return
    if accelerator:
        torch.cuda.manual_seed_all(seed)
    torch.default_generator.manual_seed(seed)


@cache
def _accelerator() -> str:
    """The kind of accelerator that this process has, "" without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None else found.type
