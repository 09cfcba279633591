"""shardtune against the flat script: which runs are compared, and how far apart they may be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import ROWS, Trace, recipe, run_flat, run_recipes, save_model, save_rows

LAYOUTS = ((1, 8), (1, 1), (2, 4), (2, 1), (4, 2))
"""Ranks x rows of a forward."""
EXACT = 1e-10
ROUNDED = 5e-6
ROUNDED_WEIGHTS = 1e-6


@dataclass(frozen=True, order=True)
class Case:
    """One run."""

    ranks: int
    rows: int
    kind: str = "dense"
    precision: str = "fp64"
    optimizer: str = "AdamW"
    filled: bool = False

    def __str__(self) -> str:
        filled = "-filled" if self.filled else ""
        return f"{self.kind}-{self.precision}-{self.optimizer}-{self.ranks}x{self.rows}{filled}"


@dataclass(frozen=True)
class Distance:
    """The largest differences of two runs: of losses and norms relative to those above 1, of tensors absolute."""

    loss: float
    norm: float
    gradient: float
    weight: float


def distance(run: Trace, flat: Trace) -> Distance:
    """How far a run is from the flat script's."""
    return Distance(
        max(_relative(*pair) for pair in zip(run.losses, flat.losses, strict=True)),
        max(_relative(*pair) for pair in zip(run.norms, flat.norms, strict=True)),
        max(_apart(*pair) for pair in zip(run.gradients, flat.gradients, strict=True)),
        _apart(run.weights, flat.weights),
    )


def _relative(value: float, wanted: float) -> float:
    return abs(value - wanted) / max(1.0, abs(wanted))


def _apart(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def error(run: Trace, truth: Trace) -> float:
    """How far the losses and norms of a bf16 run are from those in fp64, on average over steps; relative."""
    pairs = [*zip(run.losses, truth.losses, strict=True), *zip(run.norms, truth.norms, strict=True)]
    return sum(abs(value - wanted) / abs(wanted) for value, wanted in pairs) / len(pairs)


class Comparison:
    """Makes models and rows in a folder, runs cases and the flat script, and keeps what they gave.

    Args:
        steps: of each run.
        rows: of the data, eight in a step.
    """

    def __init__(self, folder: Path, steps: int = 20, rows: int = ROWS) -> None:
        self._folder = folder
        self._steps = steps
        self.rows = save_rows(folder / "rows.jsonl", rows)
        self.traces: dict[Case, Trace] = {}
        self.model = cache(lambda kind: save_model(kind, folder / kind))

    def run(self, cases: Iterable[Case]) -> None:
        """Run those cases that have not been; all of one number of ranks in one start of ranks."""
        missing = sorted(set(cases) - self.traces.keys())
        for ranks, group in groupby(missing, lambda case: case.ranks):
            together = list(group)
            recipes = [self._recipe(case) for case in together]
            traces: Sequence[Trace]
            traces = run_recipes(recipes) if ranks == 1 else run_ranks(run_recipes, ranks, recipes, timeout=600)[0]
            self.traces.update(zip(together, traces, strict=True))

    def _recipe(self, case: Case) -> dict:
        return recipe(
            self.model(case.kind),
            self.rows,
            actor__micro_batch_size=case.rows,
            actor__fill_micro_batches=case.filled or None,
            actor__model__precision=case.precision,
            actor__optim__name=case.optimizer,
            runner__max_steps=self._steps,
        )

    @cache  # noqa: B019 - as long as the folder
    def flat(self, kind: str, precision: str, optimizer: str, forward: int = 1) -> Trace:
        """The flat script's run."""
        model = self.model(kind)
        return run_flat(
            model, self.rows, precision=precision, optimizer=optimizer, forward=forward, steps=self._steps
        )

    def distance(self, case: Case) -> Distance:
        return distance(self.traces[case], self.flat(case.kind, case.precision, case.optimizer))

    def bf16_error(self, case: Case) -> tuple[float, float]:
        """(the case's error, the flat script's own at its worst over several cuts into forwards), both against fp64."""
        truth = self.flat(case.kind, "fp64", case.optimizer)
        own = [error(self.flat(case.kind, "bf16", case.optimizer, forward), truth) for forward in (1, 2, 4, 8)]
        return error(self.traces[case], truth), max(own)
