"""Weights that no optimizer trains, and which of them have changed since the module was built."""

from __future__ import annotations

from collections.abc import Collection

import torch

from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights

CHUNK = 1 << 20
"""Numbers of a weight that are multiplied at once."""
MIXER = 0x1B873593CC9E2D51
"""Any odd number whose bits look random."""


class FrozenWeights:
    """What the weights that are not trained are when this object is made: a loaded state begins with the same.

    Methods may change them by hand (the average that a target network is), and so do weights of another engine.

    Args:
        weights: of the module.
        ranks: of the engine.
        trained: names of the parameters that are trained, which are not watched.
    """

    def __init__(self, weights: Weights, ranks: Ranks, trained: Collection[str]) -> None:
        self._weights, self._ranks = weights, ranks
        self._before = self._marks(weights.parameters.keys() - set(trained))

    def changed(self) -> set[str]:
        """The names of those of which any rank's part is another now; every rank calls it."""
        now = self._marks(self._before.keys())
        mine = {name for name, mark in self._before.items() if now.get(name) != mark}
        return set().union(*self._ranks.gather(mine))

    def _marks(self, names: Collection[str]) -> dict[str, int]:
        return {name: _mark(part) for name, part in self._weights.own_parts().items() if name in names}


def _mark(part: torch.Tensor) -> int:
    """A number that changes, all but surely, with the bits of a tensor: writes through `.data` leave its version."""
    data = part.contiguous().reshape(-1).view(torch.uint8)
    factors = torch.arange(1, 2 * CHUNK, 2, device=data.device)
    found = torch.zeros((), dtype=torch.int64, device=data.device)
    for chunk in data.split(8 * CHUNK):
        words = chunk.view(torch.int64) if len(chunk) % 8 == 0 else chunk.long()
        for piece in words.split(CHUNK):
            found = found * 31 + (_mixed(piece) * factors[: len(piece)]).sum()
    return int(found)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Words in which each bit has changed many: doubled numbers differ in high bits alone, whose sum is often 0."""
    words = (words ^ (words >> 32)) * MIXER
    return words ^ (words >> 29)
