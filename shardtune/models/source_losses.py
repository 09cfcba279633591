"""The training loss of each data source, measured beside the loss that is differentiated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardtune.batch import Metric, PackedBatch


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
        """Add a micro-batch.

        Worked example: `starts` [0, 3] and the rows (4, 1), of which the first has two targets and the second one:
        the documents' sources are [1, 0], so the targets are added up by [1, 1, 0].

        Args:
            batch: whose `rows` are documents of the data set; fillers weigh nothing.
            losses: float [targets], the weighted loss of each target.
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
