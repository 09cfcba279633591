"""Seeds of random numbers: derived from what identifies a draw, and given to the generators of the process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from what identifies a draw, for example `derive_seed(seed, step, micro_batch, "dropout")`."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of the processor (torch's, numpy's and Python's) inside; restore them at the end."""
    with generators_kept():
        seed_processor(seed)
        yield


def seed_processor(seed: int) -> None:
    """Seed the global generators of the processor; no accelerator is looked for, as before a fork none may be.

    Args:
        seed: in [0, 2**63).
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_generators(seed: int, *, torch_alone: bool = False) -> None:
    """Seed the global generators of torch on all devices, of numpy and of Python.

    torch's are seeded as `torch.manual_seed` does. That also formats the stack, once for each kind of accelerator that
    is not in use, which takes half a millisecond or more.

    Args:
        seed: in [0, 2**63).
        torch_alone: leave those of numpy and Python as they are.
    """
    accelerator = _accelerator()
    if accelerator not in {"", "cuda"}:
        torch.manual_seed(seed)
    else:
        if accelerator:
            torch.cuda.manual_seed_all(seed)
        torch.default_generator.manual_seed(seed)
    if not torch_alone:
        random.seed(seed)
        np.random.seed(seed % 2**32)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the states of the global generators of torch, numpy and Python at the end."""
    python, numbers, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_rng_state(torchs)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@cache
def _accelerator() -> str:
    """The kind of accelerator that this process has, "" without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None else found.type
