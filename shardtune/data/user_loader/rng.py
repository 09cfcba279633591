"""Makes the random draws of a user's own loader a function of seed, epoch and batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from shardtune.batch.seeds import derive_seed, seed_generators
from shardtune.data.user_loader.state_json import StatefulLoader

Reseed = Callable[[int], object]


@runtime_checkable
class EpochAware(Protocol):
    """A loader or sampler whose order depends on the epoch, as torch's `DistributedSampler`."""

    def set_epoch(self, epoch: int) -> None: ...


class LoaderRng:
    """Seeds all generators that a loader uses.

    These are the global generators of the process, and those of a torch loader, its samplers and its data set.

    Args:
        loader: of the user.
        seed: of the run.
    """

    def __init__(self, loader: Iterable[Any], seed: int) -> None:
        self._seed = seed
        self._loader = loader
        self._parts = _parts_of(loader)
        # A loader that is not torch's and has its own state saves its generators in that state.
        whole = isinstance(loader, StatefulLoader) and not isinstance(loader, DataLoader)
        self._generators = [] if whole else _generators_of(self._parts)
        # Processes that outlive an epoch go on with draws of the last one, which a resumed run has not seen.
        outlive = isinstance(loader, DataLoader) and loader.persistent_workers
        self._untouched = copy(loader) if outlive and not isinstance(loader, StatefulLoader) else None

    @property
    def own_seeds(self) -> list[int]:
        """Numbers that identify the user's seeds of the loader's generators."""
        return [own_seed for _, own_seed in self._generators]

    def begin(self, epoch: int) -> Iterator[Any]:
        """The batches of an epoch, with everything that they draw from seeded."""
        seed_generators(derive_seed(self._seed, epoch, "loader"))
        for reseed, own_seed in self._generators:
            reseed(derive_seed(own_seed, epoch, "generator"))
        for part in self._parts:
            if isinstance(part, EpochAware):
                part.set_epoch(epoch)
        return iter(self._loader if self._untouched is None else copy(self._untouched))

    def before(self, epoch: int, number: int) -> None:
        """Seed the generators for the next batch."""
        seed_generators(derive_seed(self._seed, epoch, number, "batch"))


def _parts_of(loader: object) -> list[object]:
    """A loader, the data set of a torch loader, and its samplers, also those inside of others."""
    if not isinstance(loader, DataLoader):
        return [loader]
    parts: list[object] = [loader, loader.dataset]
    waiting: list[object] = [loader.sampler, loader.batch_sampler]
    while waiting:
        part = waiting.pop(0)
        if part is None or any(part is known for known in parts):
            continue
        parts.append(part)
        waiting += [value for value in _attributes(part) if isinstance(value, Sampler)]
    return parts


def _attributes(part: object) -> list[object]:
    """The values of an object's attributes; a list or a tuple of rows has none."""
    try:
        return list(vars(part).values())
    except TypeError:
        return []


def _generators_of(parts: list[object]) -> list[tuple[Reseed, int]]:
    """A function that seeds each generator of some parts, and a number that identifies its user's seed."""
    attributes = {id(value): value for part in parts for value in _attributes(part)}
    return [found for found in map(_generator, attributes.values()) if found is not None]


def _generator(value: object) -> tuple[Reseed, int] | None:
    if isinstance(value, torch.Generator):
        return value.manual_seed, value.initial_seed()
    if isinstance(value, random.Random):
        return value.seed, derive_seed(repr(value.getstate()))
    if isinstance(value, np.random.RandomState):
        return (lambda seed: value.seed(seed % 2**32)), derive_seed(repr(value.get_state()))
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return (lambda seed: setattr(bits, "state", type(bits)(seed).state)), derive_seed(repr(bits.state))
    return None
