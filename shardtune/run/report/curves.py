"""The curves of runs: each a bounded number of points, whatever a run's length."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardtune.run.stored_run import StoredRun

MOST_POINTS = 400
"""Of a curve of one run."""
FEWEST_POINTS = 80
MOST_CHARTS = 60
DIGITS = 5
FIRST = ("train/loss", "train/grad_norm", "train/learning_rate", "perf/tokens_per_second", "perf/samples_per_second")
"""The charts that come first."""
LINEAR = ("learning_rate", "tokens_per_second", "samples_per_second", "accuracy", "success", "f1", "mrr")
"""Endings of metrics that are not drawn with a logarithmic axis at first."""
LEFT_OUT = ("step", "epoch")
LARGE_SPREAD = 50.0
Point = Mapping[str, object]


@dataclass(slots=True)
class Decimated:
    """A curve in bounded memory: means over equally many values, with the smallest and the largest of them.

    Args:
        most: points at any time.

    Attributes:
        steps: the last one of each point.
        missing: values that were not finite.
        values: finite ones.
        first: the first finite value. last: the last one. smallest, largest: of all.
        ends_missing: whether the last value was not finite.
    """

    most: int
    steps: list[int] = field(default_factory=list)
    missing: int = 0
    values: int = 0
    first: float = math.nan
    last: float = math.nan
    smallest: float = math.inf
    largest: float = -math.inf
    ends_missing: bool = False
    _size: int = 1
    _sums: list[float] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)
    _low: list[float] = field(default_factory=list)
    _high: list[float] = field(default_factory=list)
    _behind_gap: list[bool] = field(default_factory=list)

    def add(self, step: int, value: float | None) -> None:
        """Append a value; None: it was not finite."""
        if value is None:
            self.missing, self.ends_missing = self.missing + 1, True
            return
        is_behind_gap, self.ends_missing = self.ends_missing, False
        self.first = value if not self.values else self.first
        self.values, self.last = self.values + 1, value
        self.smallest, self.largest = min(self.smallest, value), max(self.largest, value)
        if self._counts and self._counts[-1] < self._size:
            self.steps[-1] = step
            self._sums[-1] += value
            self._counts[-1] += 1
            self._low[-1], self._high[-1] = min(self._low[-1], value), max(self._high[-1], value)
            return
        if len(self._sums) == self.most:
            self._halve()
        self.steps.append(step)
        self._sums.append(value)
        self._counts.append(1)
        self._low.append(value)
        self._high.append(value)
        self._behind_gap.append(is_behind_gap)

    def _halve(self) -> None:
        """Merge each two neighbouring points."""
        pairs = [slice(at, at + 2) for at in range(0, len(self.steps), 2)]
        self.steps = [self.steps[pair][-1] for pair in pairs]
        self._sums = [sum(self._sums[pair]) for pair in pairs]
        self._counts = [sum(self._counts[pair]) for pair in pairs]
        self._low = [min(self._low[pair]) for pair in pairs]
        self._high = [max(self._high[pair]) for pair in pairs]
        self._behind_gap = [any(self._behind_gap[pair]) for pair in pairs]
        self._size *= 2

    def to_json(self) -> dict[str, list[float] | list[int]]:
        """The points: `x` steps, `y` means; `low` and `high` where a point is of several values; `gaps`, the places
        of points that no line leads to, as values before them were not finite."""
        means = [total / count for total, count in zip(self._sums, self._counts, strict=True)]
        found: dict[str, list[float] | list[int]] = {"x": self.steps, "y": _rounded(means)}
        if self._size > 1:
            found |= {"low": _rounded(self._low), "high": _rounded(self._high)}
        if any(self._behind_gap):
            found["gaps"] = [place for place, is_behind in enumerate(self._behind_gap) if is_behind]
        return found

    @property
    def last_shown(self) -> str:
        """The last value in words."""
        return "not finite" if self.ends_missing else f"{self.last:.4g}"

    @property
    def spread(self) -> float:
        """The largest mean in relation to the smallest; 0 where one is not positive."""
        means = [total / count for total, count in zip(self._sums, self._counts, strict=True)]
        return max(means) / min(means) if means and min(means) > 0 else 0.0


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]


@dataclass(frozen=True, slots=True)
class Chart:
    """One metric of all runs.

    Attributes:
        name: of the metric.
        group: training, evaluations or more.
        curves: by the number of the run.
    """

    name: str
    group: str
    curves: Mapping[int, Decimated]

    @property
    def logarithmic(self) -> bool:
        """Whether its axis is at first."""
        spread = max(curve.spread for curve in self.curves.values())
        return not self.name.endswith(LINEAR) and spread > LARGE_SPREAD

    def to_json(self) -> dict[str, object]:
        series = [{"run": run, **curve.to_json()} for run, curve in self.curves.items()]
        return {"name": self.name, "log": self.logarithmic, "series": series}


def read_charts(runs: Sequence[StoredRun]) -> list[Chart]:
    """The charts of all metrics that the runs logged, also of those without a finite value; each line is read once."""
    most = max(FEWEST_POINTS, 2 * (MOST_POINTS // max(2, len(runs))))
    found: dict[str, dict[int, Decimated]] = {}
    for number, run in enumerate(runs):
        for line in run.lines():
            step = int(line["step"] or 0)
            for name, value in line.items():
                if name not in LEFT_OUT:
                    curves = found.setdefault(name, {})
                    if number not in curves:
                        curves[number] = Decimated(most)
                    curves[number].add(step, value)
    return sorted((Chart(name, _group(name), curves) for name, curves in found.items()), key=_place)


def drawn(charts: Sequence[Chart]) -> list[Chart]:
    """The charts that a page draws: the first ones with a finite value."""
    return [chart for chart in charts if any(curve.values for curve in chart.curves.values())][:MOST_CHARTS]


def _group(name: str) -> str:
    if name.startswith("eval/"):
        return "evaluations"
    counted = name.startswith("perf/") or name in ("train/tokens", "train/samples", "train/supervised_tokens")
    return "more" if counted and name not in FIRST else "training"


def _place(chart: Chart) -> tuple[int, list[tuple[str, int]]]:
    """The place of a chart: the usual ones first, then by name, with the numbers in names in their order."""
    usual = FIRST.index(chart.name) if chart.name in FIRST else len(FIRST)
    return usual, natural_order(chart.name)


def natural_order(name: str) -> list[tuple[str, int]]:
    """A key by which `layer_2` comes before `layer_10`."""
    return [(text, int(digits or -1)) for text, digits in re.findall(r"(\D*)(\d*)", name)]
