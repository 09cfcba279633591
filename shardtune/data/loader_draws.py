"""What a user's own loader draws, made a function of seed, epoch and batch."""

from __future__ import annotations

import random
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader

from shardtune.data.order import derive_seed


@runtime_checkable
class EpochAware(Protocol):
    """A loader or sampler that is told the epoch, as torch's `DistributedSampler`."""

    def set_epoch(self, epoch: int) -> None: ...


class LoaderDraws:
    """Seeds all that a loader draws from: the processes' own generators, and those of a torch loader and its samplers.

    Args:
        loader: of the user.
        seed: of the run.
    """

    def __init__(self, loader: Any, seed: int) -> None:
        self._seed = seed
        torch_made = isinstance(loader, DataLoader)
        self._parts = [loader, loader.sampler, loader.batch_sampler] if torch_made else [loader]
        held = [loader.generator] if torch_made else []
        held += [value for part in self._parts[1:] if part is not None for value in vars(part).values()]
        found = {id(value): value for value in held if isinstance(value, torch.Generator)}
        self._generators = [(generator, generator.initial_seed()) for generator in found.values()]

    def begin(self, epoch: int) -> None:
        """Before the loader is gone through."""
        _seed_all(derive_seed(self._seed, epoch, "loader"))
        for generator, own_seed in self._generators:
            generator.manual_seed(derive_seed(own_seed, epoch, "generator"))
        for part in self._parts:
            if isinstance(part, EpochAware):
                part.set_epoch(epoch)

    def before(self, epoch: int, number: int) -> None:
        """Before a batch is asked for."""
        _seed_all(derive_seed(self._seed, epoch, number, "batch"))


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
