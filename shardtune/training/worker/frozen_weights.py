"""Frozen weights, which no checkpoint holds: whether the code of a loss or a model changes them all the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch

from shardtune.errors import CheckpointError
from shardtune.parallel.buffers import fingerprint_of
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights

SAMPLED = 4096
"""Values of a rank's part of a weight that are looked at, evenly spread over it."""
SHOWN = 3
BASE = "actor.model.model_path"
"""The key of the directory that frozen weights are loaded from."""
_KEPT = (
    "leave requires_grad on for weights that the code itself moves, and call them under torch.no_grad(): the optimizer "
    "moves no weight without a gradient, and checkpoints have it"
)


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


def changed_line(names: Sequence[str], keeps: str) -> str:
    """The line on frozen weights that have changed.

    Args:
        names: theirs.
        keeps: the class of a worker whose own methods may keep them in its checkpoints; "" if none does.
    """
    what = (
        f"save_checkpoint and load_checkpoint of {keeps} have to keep them, or else"
        if keeps
        else "this run cannot be continued, and a rollback leaves them as they are;"
    )
    return (
        f"the frozen weights {named(names)} have changed since the first step, by the code of the model or its loss, "
        f"and no checkpoint holds frozen weights, so that {what} {_KEPT}"
    )


def changed_error(names: str, checkpoint: Path) -> CheckpointError:
    """The error for a checkpoint of a run whose frozen weights had changed."""
    return CheckpointError(
        f"the frozen weights {names} changed in training, and no checkpoint holds frozen weights",
        where=str(checkpoint),
        remedy=f"{_KEPT}; or go on from their first values with runner.allow_changes=[{BASE}]",
    )
