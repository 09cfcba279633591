"""Frozen weights, which no checkpoint holds: whether the code of a loss or a model changes them all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from shardtune.parallel.buffers import fingerprint_of
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights

SAMPLED = 4096
"""Values of a rank's part of a weight that are looked at, evenly spread over it."""
SHOWN = 3


@final
class FrozenWeights:
    """Some values of the weights that checkpoints leave out, as they are before a first step.

    A momentum encoder, or any other average that a loss writes into a frozen copy, changes nearly all values of it.

    Args:
        weights: of the model.
        ranks: of the run; every rank makes one, and calls `changed`.
    """

    def __init__(self, weights: Weights, ranks: Ranks) -> None:
        self._weights, self._ranks = weights, ranks
        self._first = self._samples()

    def changed(self) -> list[str]:
        """The names of those with other values now on some rank, sorted."""
        if self._first is None:
            return []
        now = self._samples()
        assert now is not None
        flags = (now != self._first).tolist()
        mine = [name for name, flag in zip(self._weights.left_out_parts(), flags, strict=True) if flag]
        return sorted({name for names in self._ranks.gather(mine) for name in names})

    @torch.no_grad()
    def _samples(self) -> torch.Tensor | None:
        """int64 [weights]; None where checkpoints have all weights."""
        parts = self._weights.left_out_parts().values()
        found = [fingerprint_of(part.reshape(-1)[:: max(1, part.numel() // SAMPLED)]) for part in parts]
        return torch.stack([each.to(self._ranks.device) for each in found]) if found else None


def named(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")
