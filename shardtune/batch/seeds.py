"""Seeds of random numbers: derived from what identifies a draw, and given to torch's generators."""

from __future__ import annotations

import hashlib
from functools import cache

import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from what identifies a draw, for example `derive_seed(seed, step, micro_batch, "dropout")`."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


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
