"""What a recipe's own precision makes of a layout: its rounding, and no more than that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardtune.verify.claims.evidence import LOSS, NORM
from shardtune.verify.claims.numbers import Gap, Log, measured_gaps
from shardtune.verify.result import Failed

ROUNDING: Mapping[str, float] = {"fp32": 1e-5, "bf16": 2e-2, "pure_bf16": 2e-2, "fp16": 2e-2}
"""The relative difference of losses and norms of any step that two layouts may always have in a precision."""
FIRST_LOSS: Mapping[str, float] = {"bf16": 1e-3, "pure_bf16": 1e-3, "fp16": 2e-4}
"""The same of the first loss in half precision: no update has enlarged it, and it is a mean over targets."""
TIMES = 10.0
"""Beyond these, so many times the distance of one process in that precision from fp64."""
SAME_FORWARDS: Mapping[str, float] = {LOSS: 1e-5, NORM: 1e-4}
"""The same of the first step where ranks compute each row as one process does: sums in fp32 in another order, and what
a GPU's kernels for gradients add in any order."""
REGROUPING = frozenset({"compile", "sequence", "tensor", "expert"})
"""The parts of a layout that round a row otherwise."""


@dataclass(frozen=True, slots=True)
class RoundedRuns:
    """What runs in the recipe's own precision logged, and one without its rounding.

    Attributes:
        precision: the recipe's own.
        exact: one process in fp64, one row per forward.
        alone: the same in that precision.
        laid_out: the recipe's layout in it.
        by_row: the recipe's ranks, one row per forward, in half precision; None where one rank is all that is compared.
        same_forwards: whether these compute each row as one process does.
    """

    precision: str
    exact: Log
    alone: Log
    laid_out: Log
    by_row: Log | None
    same_forwards: bool

    def check(self) -> str:
        """How far layouts are apart, beside the precision's own rounding.

        Raises:
            Failed: they are further apart than rounding explains.
        """
        ranks = self._check_ranks(self.by_row) if self.by_row is not None else ""
        first = _first_gaps(self.exact, self.alone)[0].size
        if self.precision in FIRST_LOSS:
            self._require(_first_gaps(self.alone, self.laid_out)[0], FIRST_LOSS[self.precision], first)
        spread, worst = _furthest(self.exact, self.alone).size, _furthest(self.alone, self.laid_out)
        self._require(worst, ROUNDING[self.precision], spread)
        return (
            f"; in {self.precision} {worst.size:.1g} apart in losses and norms, where one process is {spread:.1g} from "
            f"fp64{ranks}"
        )

    def _require(self, gap: Gap, least: float, spread: float) -> None:
        """Refuse a difference above `least` and above `TIMES` the distance from fp64."""
        if gap.size > max(least, TIMES * spread):
            raise Failed(
                f"in {self.precision} the recipe's layout parts from one process in step {gap.step}: {gap}, where one "
                f"process is {spread:.2g} away from fp64; in fp64 they agree: precision makes the difference",
                where=f"step {gap.step}: {gap.name}, precision",
                remedy="see whether sums, norms or logarithms are taken in half precision: .float() before them",
            )

    def _check_ranks(self, by_row: Log) -> str:
        """Refuse ranks that round what one process does not; how far their first step is from its own."""
        found = _first_gaps(self.alone, by_row)
        if not self.same_forwards:
            self._require(found[0], FIRST_LOSS[self.precision], _first_gaps(self.exact, self.alone)[0].size)
            return ""
        for gap in found:
            if gap.size > SAME_FORWARDS[gap.name]:
                raise Failed(
                    f"in {self.precision} several ranks part from one process in step 1, with one row per forward on "
                    f"both: {gap}; in fp64 they agree: what goes into the model, or between its parts, is rounded on "
                    "several ranks alone: precision makes the difference",
                    where=f"step 1: {gap.name}, precision",
                    remedy="see what changes dtypes by the number of ranks: a cast of inputs, targets or buffers, a "
                    "MixedPrecisionPolicy of one's own, a sum over ranks in half precision",
                )
        return f", the first step row by row {max(gap.size for gap in found):.1g} on the ranks and on one"


def _furthest(one: Log, other: Log) -> Gap:
    """The largest difference of losses and norms."""
    return max(measured_gaps(one, other), key=lambda gap: gap.size)


def _first_gaps(one: Log, other: Log) -> list[Gap]:
    """The differences of the loss and the norm of the first step."""
    return [gap for gap in measured_gaps(one, other) if gap.step == 1]
