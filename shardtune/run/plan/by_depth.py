"""The memory of a deep model's step from steps of models with fewer of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from shardtune.run.plan.layer_stacks import Stack
from shardtune.run.plan.timeline import Alphabet, Block, Change, inserted, repeated

Depths = Mapping[str, int]
"""Layers that are left of lists of layers, by the lists' names."""
DEEPER = 3
"""How many times deeper models are tried, where the first ones do not repeat yet."""
WORTH = 0.9
"""Of all layers: with more of them in the models together, the whole model is computed at once."""


class Shallow:
    """Steps of models with fewer layers.

    Args:
        changes: of memory in a step, at some depths.
    """

    def __init__(self, changes: Callable[[Depths], Iterable[Change]]) -> None:
        self._changes = changes
        self._alphabet = Alphabet()
        self._known: dict[tuple[tuple[str, int], ...], np.ndarray] = {}

    def fullest(self, stacks: Sequence[Stack]) -> dict[str, int] | None:
        """Bytes by category at the fullest moment of the whole model's step, exactly; None: it has to be computed.

        Of three depths, with a period of each stack more each time, two show what a period adds. That the third one is
        as it has to be by them, change by change, shows that each further period adds the same.

        Args:
            stacks: of the whole model, largest first; where they do not repeat together, the first one is taken alone.
        """
        for chosen in [stacks, stacks[:1]] if len(stacks) > 1 else [stacks]:
            for more in range(DEEPER):
                if not chosen or _layers(chosen, more) > WORTH * sum(stack.depth for stack in chosen):
                    break
                timeline = self._whole(chosen, more)
                if timeline is not None:
                    return self._alphabet.fullest(timeline)
        return None

    def _whole(self, stacks: Sequence[Stack], more: int) -> np.ndarray | None:
        """The timeline of the whole model, from some depths; None: they do not repeat."""
        least = {stack.name: stack.shallow(more) for stack in stacks}
        short = self._at(least)
        found: list[tuple[Stack, Block]] = []
        for stack in stacks:
            blocks = inserted(short, self._at({**least, stack.name: least[stack.name] + stack.period}))
            if blocks is None:
                return None
            found += [(stack, block) for block in blocks]
        deepest = self._at({stack.name: least[stack.name] + 2 * stack.period for stack in stacks})
        if not np.array_equal(deepest, repeated(short, [(block, 2) for _, block in found])):
            return None
        return repeated(short, [(block, (stack.depth - least[stack.name]) // stack.period) for stack, block in found])

    def _at(self, depths: Depths) -> np.ndarray:
        key = tuple(sorted(depths.items()))
        if key not in self._known:
            self._known[key] = self._alphabet.encode(self._changes(depths))
        return self._known[key]


def _layers(stacks: Sequence[Stack], more: int) -> int:
    """Layers of all models that are computed."""
    least = sum(stack.shallow(more) for stack in stacks)
    periods = sum(stack.period for stack in stacks)
    return (2 + len(stacks)) * least + 3 * periods
