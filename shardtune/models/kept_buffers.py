"""Buffers that a checkpointed forward changes: it is computed again from their old values, and changes them once.

Activation checkpointing runs the forward of a unit a second time in the backward pass. A forward that updates running
statistics, a counter or a codebook would do so twice, and begin the second time with the values that the first, and
the forwards since, have left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import nn

from shardtune.parallel.torch_private.modules import NormBase, contents
from shardtune.parallel.torch_private.operations import FakeTensor
from shardtune.parallel.torch_private.tensors import changes_in_place

LARGE = 2**16
"""Numbers of a buffer beyond which no copy of it is kept for as long as nothing changes it."""

Place = tuple[nn.Module, str]
"""A module and the name of one of its own buffers."""
Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]
"""Of a forward, and of its recomputation."""


@dataclass(frozen=True, slots=True)
class Before:
    """A buffer before a forward.

    Attributes:
        held: the tensor in its place.
        changes: how often that had been changed in place.
        values: a copy, or the tensor itself.
    """

    held: torch.Tensor
    changes: int
    values: torch.Tensor

    def is_still(self, held: torch.Tensor | None) -> bool:
        """Whether this is the same tensor, and its count of changes too; some kernels change one without counting."""
        return held is self.held and changes_in_place(self.held) == self.changes


class KeptBuffers:
    """Keeps the buffers of a module for the recomputation of its forward.

    Buffers that forwards change are copied before each. They are found by comparing values after the first forward in
    training, and later by the count of changes in place. Of another buffer one copy is kept, for the forward that is
    the first to change it, unless it is large (a cache of angles, a mask).

    Args:
        module: whose forward is computed again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._holders = [each for each in module.modules() if contents(each)[1]]
        self._module = module
        self._changing: set[Place] = set()
        self._kept: dict[Place, Before] = {}
        self._compared = False

    def contexts(self, inner: Callable[[], Contexts] | None = None) -> Contexts:
        """The contexts of a forward and of its recomputation.

        Args:
            inner: makes further contexts, which are entered inside.
        """
        forward, again = (nullcontext(), nullcontext()) if inner is None else inner()
        before: dict[Place, Before | None] = {}
        return self._computing(before, forward), _ComputingAgain(before, self._changing, again)

    @contextmanager
    def _computing(self, before: dict[Place, Before | None], inner: AbstractContextManager[object]) -> Iterator[None]:
        for module in self._holders:
            for key, buffer in contents(module)[1].items():
                before[module, key] = None if buffer is None else self._before((module, key), buffer)
        with inner:
            yield
        for place, one in before.items():
            if one is not None and place not in self._changing:
                before[place] = self._compare(place, one)
        self._compared |= self._module.training

    def _before(self, place: Place, buffer: torch.Tensor) -> Before:
        module, _ = place
        if isinstance(module, NormBase) and module.training:
            self._changing.add(place)
        kept = self._kept.get(place)
        if kept is not None and kept.is_still(buffer):
            return kept
        copies = place in self._changing or not self._compared or buffer.numel() <= LARGE
        one = Before(buffer, changes_in_place(buffer), buffer.detach().clone() if copies else buffer)
        if place not in self._changing:
            self._kept[place] = one
        return one

    def _compare(self, place: Place, before: Before) -> Before:
        """After a forward: whether it has changed a buffer; returns what is needed to compute it again."""
        module, key = place
        held = contents(module)[1].get(key)
        changed = held is before.held and not before.is_still(held)
        if changed or (held is before.held and not self._compared and _differ(before.values, before.held)):
            self._changing.add(place)
            self._kept.pop(place, None)
        elif before.values.numel() > LARGE:
            before = self._kept[place] = Before(before.held, before.changes, before.held)
        return before


class _ComputingAgain(AbstractContextManager[None]):
    """Inside, buffers are copies of what they were before a forward, and afterwards what they are now.

    A result may share memory with the buffer that it was computed from, so each is another tensor. A backward pass that
    is repeated enters it again.
    """

    def __init__(
        self, before: Mapping[Place, Before | None], changing: set[Place], inner: AbstractContextManager[object]
    ) -> None:
        self._before = before
        self._changing = changing
        self._inner = inner
        self._now: dict[Place, torch.Tensor | None] = {}

    def __enter__(self) -> None:
        for place, one in self._before.items():
            module, key = place
            buffers = contents(module)[1]
            held = buffers.get(key)
            if (one is None and held is None) or (one and place not in self._changing and one.is_still(held)):
                continue
            self._now[place] = held
            buffers[key] = None if one is None else one.values.clone()
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return self._inner.__exit__(kind, error, traceback)
        finally:
            while self._now:
                (module, key), held = self._now.popitem()
                contents(module)[1][key] = held


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have different values; of those without values (in a plan) it is not known."""
    return not (one.is_meta or isinstance(one, FakeTensor)) and not torch.equal(one, other)
