"""What crosses files: one encoded row, one packed micro-batch, a loss and a metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Sample:
    """One row, encoded.

    Attributes:
        input_ids: int32 [length].
        loss_weights: float32 [length]; how much token t counts as a target, 0 where it is not supervised.
            Token 0 has no token before it that could predict it, so its weight never counts.
        prompt_ids: int32 [prompt_length], the conversation up to the answer to generate; only in evaluation rows.
        reference: the answer expected for `prompt_ids`.
    """

    input_ids: np.ndarray
    loss_weights: np.ndarray
    prompt_ids: np.ndarray | None = None
    reference: str | None = None

    @property
    def length(self) -> int:
        return len(self.input_ids)

    @property
    def target_weight(self) -> float:
        """The sum of the weights of the tokens that are targets: the row's share of the token mean's denominator."""
        return float(self.loss_weights[1:].sum(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: whole rows ("documents") laid end to end without padding.

    Attributes:
        input_ids: int64 [tokens].
        position_ids: int64 [tokens]; restarts at 0 with each document.
        target_positions: int64 [targets]; the tokens from which something is to be predicted, never a document's last.
        targets: int64 [targets]; the token that follows each of them.
        target_weights: float32 [targets].
        cu_seqlens: int32 [documents + 1]; document d is `[cu_seqlens[d], cu_seqlens[d + 1])`.
        document_weights: float32 [documents]; 1, or 0 for a filler that only keeps ranks in step.
        max_length: tokens in the longest document.
        rows: the dataset row of each document, -1 for a filler.
        target_weight: the sum of `target_weights`, taken in fp64 from the rows themselves.
        weights: the weight of each loss term over this micro-batch, as the row index has it.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    target_positions: torch.Tensor
    targets: torch.Tensor
    target_weights: torch.Tensor
    cu_seqlens: torch.Tensor
    document_weights: torch.Tensor
    max_length: int
    rows: tuple[int, ...]
    target_weight: float
    weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_documents(self) -> int:
        """Real documents, fillers aside."""
        return sum(row >= 0 for row in self.rows)

    def to(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        return replace(
            self,
            input_ids=move(self.input_ids),
            position_ids=move(self.position_ids),
            target_positions=move(self.target_positions),
            targets=move(self.targets),
            target_weights=move(self.target_weights),
            cu_seqlens=move(self.cu_seqlens),
            document_weights=move(self.document_weights),
        )


class LossSum(NamedTuple):
    """A loss before its division.

    A step's gradient is that of `total / weight`, both summed over ranks and micro-batches. A tuple, so that the hooks
    of sharded modules find the tensor in what a forward returns.

    Attributes:
        total: scalar tensor with a graph, the weighted sum of the loss over its targets.
        weight: the sum of the targets' weights; equal to what the row index says of these rows.
    """

    total: torch.Tensor
    weight: float


@dataclass(frozen=True, slots=True)
class Metric:
    """A quantity that is averaged only at the very end: `total / weight`, both summed over batches and ranks."""

    total: float
    weight: float

    def __add__(self, other: Metric) -> Metric:
        return Metric(self.total + other.total, self.weight + other.weight)

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else float("nan")
