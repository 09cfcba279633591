"""The training loss of each target, read beside the loss that is differentiated: summed by data source, or kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shardtune.batch import Metric, PackedBatch


class TargetLosses(Protocol):
    """What reads the loss of each target of a training forward."""

    def add(self, batch: PackedBatch, losses: torch.Tensor) -> None:
        """Read a micro-batch.

        Args:
            batch: whose `rows` are documents of the data set; fillers weigh nothing.
            losses: float [targets], the weighted loss of each target.
        """
        ...


class SourceLosses:
    """Sums of losses and weights of targets by the source of their rows, over micro-batches of one rank.

    Args:
        names: of the sources.
        starts: the first row of each in the data set, ascending; row 0 is the first source's.
    """

    def __init__(self, names: Sequence[str], starts: Sequence[int]) -> None:
        self._names = list(names)
        self._starts = np.asarray(starts, np.int64)
        self._sums: torch.Tensor | None = None

    def clear(self) -> None:
        self._sums = None

    def add(self, batch: PackedBatch, losses: torch.Tensor) -> None:
        """Add a micro-batch; see `TargetLosses`.

        Worked example: `starts` [0, 3] and the rows (4, 1), of which the first has two targets and the second one:
        the documents' sources are [1, 0], so the targets are added up by [1, 1, 0].
        """
        sources = np.maximum(np.searchsorted(self._starts, batch.rows, side="right") - 1, 0)
        document = torch.searchsorted(batch.cu_seqlens.long(), batch.target_positions, right=True) - 1
        index = torch.from_numpy(sources).to(losses.device)[document]
        values = torch.stack([losses.detach().double(), batch.target_weights.double()], 1)
        sums = torch.zeros(len(self._names), 2, dtype=torch.float64, device=losses.device).index_add_(0, index, values)
        self._sums = sums if self._sums is None else self._sums + sums

    def metrics(self) -> dict[str, Metric]:
        """`SOURCE/loss` of each source that had targets since `clear`."""
        if self._sums is None:
            return {}
        pairs = zip(self._names, self._sums.tolist(), strict=True)
        return {f"{name}/loss": Metric(total, weight) for name, (total, weight) in pairs if weight}


@dataclass(frozen=True, slots=True)
class RowTargets:
    """The loss of the targets of one row.

    Attributes:
        places: int64 [targets], of each in the row's tokens.
        losses: float64 [targets], weighted.
    """

    places: np.ndarray
    losses: np.ndarray


class KeptLosses:
    """The loss of each target, by row, of all micro-batches since it was made.

    Args:
        others: reads them too; None: nothing does.

    Attributes:
        rows: by number in the data set.
    """

    def __init__(self, others: TargetLosses | None = None) -> None:
        self._others = others
        self.rows: dict[int, RowTargets] = {}

    def add(self, batch: PackedBatch, losses: torch.Tensor) -> None:
        """Read a micro-batch; see `TargetLosses`.

        Worked example: rows of 3 and 2 tokens have `cu_seqlens` [0, 3, 5]. The target that is predicted from token 3
        is in document 1, and its token number 3 + 1 - 3 = 1.
        """
        if self._others is not None:
            self._others.add(batch, losses)
        starts, positions = batch.cu_seqlens.cpu().numpy(), batch.target_positions.cpu().numpy()
        document = np.searchsorted(starts, positions, side="right") - 1
        values = losses.detach().double().cpu().numpy()
        for number, row in enumerate(batch.rows):
            own = document == number
            if row >= 0:
                self.rows[row] = RowTargets(positions[own] + 1 - starts[number], values[own])
