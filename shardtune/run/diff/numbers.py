"""Where the logged numbers of two runs part, and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardtune.run.stored_run import StoredRun

Size = Literal["rounding", "real"]
Line = Mapping[str, float | None]
ROUNDING: Mapping[str, float] = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""By the dtype of the computation: up to this relative difference two numbers may differ by rounding alone."""
COUNTED = ("epoch", "train/learning_rate", "train/tokens", "train/samples", "train/supervised_tokens")
"""Metrics that nothing rounds: they are the same, or something else was computed."""
NOT_COMPARED = ("step",)
OF_TIME = "perf/"


@dataclass(slots=True)
class MetricDifference:
    """One metric in both runs.

    Attributes:
        name: of the metric.
        compared: steps at which both logged it.
        differing: those at which it differs in any bit.
        step: the first of these; None if there is none.
        first: its value there in the first run; None: it was not finite.
        second: in the second.
        relative: the difference there, relative to the larger of the two.
        largest: the largest relative difference.
        largest_step: where that is.
        beyond: the first step at which the difference is larger than rounding.
    """

    name: str
    compared: int = 0
    differing: int = 0
    step: int | None = None
    first: float | None = None
    second: float | None = None
    relative: float = 0.0
    largest: float = 0.0
    largest_step: int | None = None
    beyond: int | None = None

    @property
    def size(self) -> Size | None:
        """Of the difference at the step where it begins; None: there is none."""
        if self.step is None:
            return None
        return "real" if self.beyond == self.step else "rounding"

    def add(self, step: int, first: float | None, second: float | None, threshold: float) -> None:
        """Compare a step's values."""
        self.compared += 1
        if first == second:
            return
        relative = relative_difference(first, second)
        self.differing += 1
        if self.step is None:
            self.step, self.first, self.second, self.relative = step, first, second, relative
        if self.beyond is None and relative > threshold:
            self.beyond = step
        if relative > self.largest:
            self.largest, self.largest_step = relative, step


@dataclass(slots=True)
class Numbers:
    """The logged numbers of two runs, step by step.

    Attributes:
        steps: logged by both.
        last: the last step that each logged.
        first_common: the first step that both logged, 0 (before training) if it is the only one; None without any.
        threshold: the relative difference up to which a number may differ by rounding.
        dtype: of the computation, of the coarser one if they differ.
        metrics: by name; those that one run alone logs are in `alone`.
        alone: metrics of one run, with its number.
    """

    dtype: str
    threshold: float
    steps: int = 0
    last: tuple[int, int] = (0, 0)
    first_common: int | None = None
    metrics: dict[str, MetricDifference] = field(default_factory=dict)
    alone: dict[str, int] = field(default_factory=dict)

    def parted(self, *, evaluation: bool = False) -> list[MetricDifference]:
        """The metrics that differ, those that part first in front; of training or of evaluations."""
        found = [one for one in self.metrics.values() if one.step is not None]
        chosen = [one for one in found if one.name.startswith("eval/") == evaluation]
        return sorted(chosen, key=lambda one: (one.step, list(self.metrics).index(one.name)))

    @property
    def parting(self) -> MetricDifference | None:
        """The metric of training that parts first."""
        return next(iter(self.parted()), None)

    @property
    def equal(self) -> bool:
        return not any(one.differing for one in self.metrics.values())


def compare_numbers(first: StoredRun, second: StoredRun) -> Numbers:
    """Compare the lines of both runs, in one pass and bounded memory; time and memory are left out."""
    dtype = max((_dtype(run) for run in (first, second)), key=lambda name: ROUNDING[name])
    numbers = Numbers(dtype, ROUNDING[dtype])
    ends = [0, 0]
    for step, lines in _side_by_side(first.lines(), second.lines()):
        one, other = lines
        ends = [step if line is not None else end for line, end in zip(lines, ends, strict=True)]
        if one is None or other is None:
            continue
        numbers.steps += 1
        if not numbers.first_common:
            numbers.first_common = step
        for name in dict.fromkeys([*one, *other]):
            if name in NOT_COMPARED or name.startswith(OF_TIME):
                continue
            if name in one and name in other:
                metric = numbers.metrics.setdefault(name, MetricDifference(name))
                metric.add(step, one[name], other[name], 0.0 if name in COUNTED else numbers.threshold)
            elif not name.startswith("eval/"):
                numbers.alone.setdefault(name, 1 if name in one else 2)
    numbers.last = ends[0], ends[1]
    for name in numbers.metrics:
        numbers.alone.pop(name, None)
    return numbers


def _dtype(run: StoredRun) -> str:
    compute = run.manifest.get("dtypes", {}).get("compute")
    return compute if compute in ROUNDING else "bfloat16"


def _side_by_side(
    first: Iterable[Line], second: Iterable[Line]
) -> Iterator[tuple[int, tuple[Line | None, Line | None]]]:
    """Lines of both runs by step, in ascending order; None where a run did not log."""
    one, other = iter(first), iter(second)
    a, b = next(one, None), next(other, None)
    while a is not None or b is not None:
        steps = [int(line["step"] or 0) for line in (a, b) if line is not None]
        step = min(steps)
        mine = a if a is not None and a["step"] == step else None
        theirs = b if b is not None and b["step"] == step else None
        yield step, (mine, theirs)
        a = next(one, None) if mine is not None else a
        b = next(other, None) if theirs is not None else b


def relative_difference(first: float | None, second: float | None) -> float:
    """The difference of two numbers relative to the larger one; infinite where one alone is not finite."""
    if first is None or second is None:
        return float("inf")
    scale = max(abs(first), abs(second))
    return abs(first - second) / scale if scale else 0.0
