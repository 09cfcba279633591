"""The numbers of two runs of the same steps, side by side: losses, norms and weights after each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shardtune.checkpoint.dcp import StoredTensors
from shardtune.checkpoint.training_state import MODEL
from shardtune.verify.claims.evidence import LOSS, NORM, apart
from shardtune.verify.claims.short_runs import ShortRun

MEASURED = (LOSS, NORM)
Log = Sequence[tuple[float, float]]
"""(loss, gradient norm) of each step."""


class Numbers(Protocol):
    """What a run computed."""

    @property
    def log(self) -> Log:
        """(loss, gradient norm) of each step."""
        ...

    def weights(self, step: int) -> Mapping[str, torch.Tensor]:
        """The weights after a step, 1 being the first, by name."""
        ...


@dataclass(frozen=True)
class Recorded:
    """The numbers of a shortened run.

    Attributes:
        run: that is over.
    """

    run: ShortRun

    @property
    def log(self) -> list[tuple[float, float]]:
        return [(step.value(LOSS), step.value(NORM)) for step in self.run.evidence.steps]

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        stored = StoredTensors(self.run.checkpoint(self.run.evidence.steps[step - 1].number) / MODEL)
        return {name: stored[name] for name in stored.names}


@dataclass(frozen=True, slots=True)
class Gap:
    """A number of one run beside that of the other.

    Attributes:
        step: 1 is the first.
        name: `train/loss`, `train/grad_norm`, or of a weight.
        size: the relative difference; infinite for a weight that one of the runs does not have.
        found: of the run that is checked; NaN for a weight.
        expected: of the other.
    """

    step: int
    name: str
    size: float
    found: float = float("nan")
    expected: float = float("nan")

    @property
    def is_weight(self) -> bool:
        return self.name not in MEASURED

    def __str__(self) -> str:
        if self.is_weight and self.size == float("inf"):
            return f"the weight {self.name} is not among the run's"
        if self.is_weight:
            return f"the weight {self.name} is {self.size:.2g} of its size away"
        return f"{self.name} is {self.found:.12g} and not {self.expected:.12g} (relative {self.size:.2g})"


def measured_gaps(expected: Log, found: Log) -> Iterator[Gap]:
    """The losses and norms of two runs, step by step."""
    for number, pairs in enumerate(zip(expected, found, strict=True), 1):
        for name, right, own in zip(MEASURED, *pairs, strict=True):
            yield Gap(number, name, apart(right, own), own, right)


def gaps(expected: Numbers, found: Numbers, *, least: float = 0.0) -> Iterator[Gap]:
    """All numbers of two runs, step by step: loss, norm, then the weights of the first, the furthest first.

    Args:
        expected: the numbers that are right.
        found: those that are checked.
        least: the size that a weight is taken to have at least, in which its difference is measured.
    """
    measured = list(measured_gaps(expected.log, found.log))
    for number in range(1, len(expected.log) + 1):
        yield from (gap for gap in measured if gap.step == number)
        weights, others = expected.weights(number), found.weights(number)
        sizes = [
            (weight_gap(one, others[name], least) if name in others else float("inf"), name)
            for name, one in weights.items()
        ]
        yield from (Gap(number, name, size) for size, name in sorted(sizes, key=lambda pair: -pair[0]))


def run_gaps(expected: ShortRun, found: ShortRun) -> list[Gap]:
    """`gaps` of two shortened runs; a weight that rounding alone moves is measured by the learning rate."""
    return list(gaps(Recorded(expected), Recorded(found), least=found.recipe.actor.optim.lr))


def largest(found: Iterable[Gap]) -> float:
    """The largest relative difference."""
    return max((gap.size for gap in found), default=0.0)


def first_over(found: Sequence[Gap], allowed: Mapping[tuple[int, str], float], close: float) -> Gap | None:
    """The first difference above what is allowed for its number, or above `close` where that is larger."""
    return next((gap for gap in found if gap.size > max(close, allowed.get((gap.step, gap.name), 0.0))), None)


def weight_gap(one: torch.Tensor, other: torch.Tensor, least: float) -> float:
    """The largest difference of two tensors over their largest element, or over `least` where that is smaller."""
    if one.shape != other.shape:
        return float("inf")
    left, right = one.double(), other.double()
    gap = float((left - right).abs().max()) if left.numel() else 0.0
    if gap == 0.0:
        return 0.0
    size = max(float(left.abs().max()), float(right.abs().max()), least)
    return gap / size if gap == gap and size < float("inf") else float("inf")
