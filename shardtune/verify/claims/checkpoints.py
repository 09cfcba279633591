"""The tensors of two checkpoints, compared one by one: weights, and the states of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from shardtune.checkpoint.dcp import StoredTensors
from shardtune.checkpoint.training_state import AVERAGE, MODEL, OPTIMIZER

PARTS = (MODEL, OPTIMIZER)
WHERE = {MODEL: "weights", OPTIMIZER: "states of the optimizer", AVERAGE: "averaged weights"}


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The first tensor in which two checkpoints differ.

    Attributes:
        part: `model`, `optimizer` or `average`.
        name: of the tensor.
        gap: the largest relative difference, see `gap_of`; infinite where one of them has no such tensor.
        text: in a sentence.
    """

    part: str
    name: str
    gap: float
    text: str


def tensor_difference(one: Path, other: Path) -> TensorDifference | None:
    """The first tensor in which two checkpoints differ; None where there is none.

    Args:
        one: a checkpoint.
        other: another, of the same model on any number of ranks.
    """
    kept = [AVERAGE] if (one / AVERAGE).is_dir() else []
    for part in (*PARTS, *kept):
        first, second = (StoredTensors(checkpoint / part) for checkpoint in (one, other))
        if first.names != second.names:
            alone = sorted({*first.names} ^ {*second.names})
            return TensorDifference(
                part, alone[0], float("inf"), f"only one of them has {part}: {', '.join(alone[:3])}"
            )
        for name in first.names:
            left, right = first[name], second[name]
            if left.shape == right.shape and left.dtype == right.dtype and same_bits(left, right):
                continue
            gap = gap_of(left, right)
            if gap > 0.0:
                return TensorDifference(part, name, gap, f"the {WHERE[part]} {name} differ by {gap:.2g} of their size")
    return None


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit by bit: a NaN equals the same NaN, and 0.0 is not -0.0."""
    left, right = (tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(left, right)


def gap_of(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference between elements over the largest element; infinite where it cannot be computed."""
    if one.shape != other.shape:
        return float("inf")
    left, right = one.double(), other.double()
    size = max(float(left.abs().max()), float(right.abs().max())) if left.numel() else 0.0
    gap = float((left - right).abs().max()) if left.numel() else 0.0
    if gap == 0.0:
        return 0.0
    return gap / size if gap == gap and size == size and size not in (0.0, float("inf")) else float("inf")
