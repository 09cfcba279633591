"""The comparison of two runs as a whole, and its form as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardtune.run.diff.causes import Explanation, explain
from shardtune.run.diff.circumstances import changed_circumstances, same_content
from shardtune.run.diff.numbers import Numbers, compare_numbers
from shardtune.run.diff.rows import RowsDifference, compare_rows
from shardtune.run.diff.settings import Difference, changed_settings
from shardtune.run.diff.weights import WeightsDifference, compare_weights
from shardtune.run.stored_run import StoredRun


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs, side by side.

    Attributes:
        runs: the first and the second.
        differences: of recipe, versions, code, data, model, dtypes, layout and history.
        rows: of each step.
        numbers: that both logged.
        weights: of `final/`.
        explanations: what parts, and what can be the cause.
    """

    runs: tuple[StoredRun, StoredRun]
    differences: Sequence[Difference]
    rows: RowsDifference
    numbers: Numbers
    weights: WeightsDifference
    explanations: Sequence[Explanation]

    @property
    def same_numbers(self) -> bool:
        """Whether rows, logged numbers and weights are the same, and enough was recorded to know it."""
        known = self.numbers.first_common is not None and self.numbers.last[0] == self.numbers.last[1]
        return known and self.rows.step is None and self.numbers.equal and self.weights.equal

    def to_json(self) -> dict[str, object]:
        """Everything as JSON values; a number that is not finite is null."""
        numbers = self.numbers
        return {
            "runs": [str(run.path) for run in self.runs],
            "same_numbers": self.same_numbers,
            "differences": [asdict(difference) for difference in self.differences],
            "rows": asdict(self.rows),
            "numbers": {
                "steps": numbers.steps,
                "last_steps": list(numbers.last),
                "dtype": numbers.dtype,
                "rounding": numbers.threshold,
                "metrics": [
                    {key: _finite(value) for key, value in {**asdict(metric), "size": metric.size}.items()}
                    for metric in numbers.metrics.values()
                ],
                "alone": numbers.alone,
            },
            "weights": {
                **asdict(self.weights),
                "differing": [{"name": one.name, "relative": _finite(one.relative)} for one in self.weights.differing],
            },
            "explanations": [
                {
                    "finding": one.finding,
                    "causes": [f"{cause.section}: {cause.name}" for cause in one.causes],
                    "advice": one.advice,
                }
                for one in self.explanations
            ],
        }


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare(first: Path, second: Path) -> Comparison:
    """Compare two runs, finished or not, by their files; nothing of them is executed and no model is made.

    Raises:
        CheckpointError: one of them is not a run directory.
    """
    one, other = StoredRun.read(first), StoredRun.read(second)
    differences = [*changed_settings(one, other, same_content(one, other)), *changed_circumstances(one, other)]
    numbers = compare_numbers(one, other)
    rows = compare_rows(one, other, min(numbers.last))
    weights = compare_weights(one, other)
    explanations = explain(differences, rows, numbers, weights)
    return Comparison((one, other), differences, rows, numbers, weights, explanations)
