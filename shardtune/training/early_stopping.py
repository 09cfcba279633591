"""Early stopping and the best checkpoint, by monitored metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypedDict

from shardtune.config import RunnerConfig
from shardtune.config.schema import short_key
from shardtune.evaluate.metric_direction import direction

OF_TRAINING = ("train/", "perf/")
"""Metrics that no evaluation measures."""


class WatchState(TypedDict):
    """The state of a `Watch` in a checkpoint."""

    monitor: str
    mode: str
    min_delta: float
    best: float | None
    best_step: int
    bad: int


class WatchesState(TypedDict, total=False):
    """The state of `Watches` in a checkpoint."""

    early: WatchState | None
    best: WatchState | None
    measured_by: dict[str, str]


@dataclass(slots=True)
class Watch:
    """The best value of a metric so far.

    Attributes:
        monitor: the metric's name.
        mode: min or max.
        min_delta: the smallest change that counts as an improvement.
        best: the best value, None before the first.
        best_step: the step at which it was measured.
        bad: measurements without an improvement since then.
    """

    monitor: str
    mode: str
    min_delta: float = 0.0
    best: float | None = None
    best_step: int = -1
    bad: int = 0

    def update(self, value: float, step: int) -> bool:
        """Take a new value; returns whether it is the best."""
        gain = -math.inf if math.isnan(value) else math.inf
        if self.best is not None and not math.isnan(value):
            gain = self.best - value if self.mode == "min" else value - self.best
        if gain > self.min_delta:
            self.best, self.best_step, self.bad = value, step, 0
            return True
        self.bad += 1
        return False

    def describe(self) -> str:
        """Why it stops, in one line."""
        best = ", in which it was NaN"
        if self.best is not None:
            best = f"; the best, {self.best:.6g}, was at step {self.best_step:,}"
        return f"{self.monitor} has not improved in {self.bad:,} evaluations{best} (runner.early_stop)"

    def without_best(self) -> str:
        """That there is no best checkpoint, as the metric was never a number; "" where there is one."""
        if self.best is not None or not self.bad:
            return ""
        return f"there is no best checkpoint: {self.monitor} was NaN in each evaluation (runner.best)"

    def forget(self) -> None:
        """Reset: the best checkpoint no longer exists."""
        self.best, self.best_step, self.bad = None, -1, 0

    def state(self) -> WatchState:
        """For a checkpoint."""
        return WatchState(
            monitor=self.monitor,
            mode=self.mode,
            min_delta=self.min_delta,
            best=self.best,
            best_step=self.best_step,
            bad=self.bad,
        )

    def restore(self, saved: WatchState | None) -> None:
        """Continue from a checkpoint, if it watched the same metric in the same direction."""
        if saved is not None and (saved["monitor"], saved["mode"]) == (self.monitor, self.mode):
            self.best, self.best_step, self.bad = saved["best"], saved["best_step"], saved["bad"]


class Watches:
    """Early stopping and the best checkpoint of a run.

    Args:
        config: names the monitored metrics.
        measured_by: a hash of each key that evaluations depend on beside the weights; empty: not known.

    Attributes:
        early: for early stopping; None if it is disabled.
        stop: whether the run has stopped improving.
        best: for the best checkpoint; None if none is kept.
    """

    def __init__(self, config: RunnerConfig, measured_by: Mapping[str, str] = MappingProxyType({})) -> None:
        early, best = config.early_stop, config.best
        self._measured_by = dict(measured_by)
        self._patience = early.patience
        self.stop = False
        self.early: Watch | None = None
        if early.enabled:
            self.early = Watch(early.monitor, direction(early.mode, early.monitor), early.min_delta)
        self.best: Watch | None = None
        if best.monitor is not None:
            self.best = Watch(best.monitor, direction(best.mode, best.monitor))

    def update(self, metrics: Mapping[str, float], step: int) -> bool:
        """Take the values of a step; returns whether its checkpoint is the best so far."""
        if self.early is not None:
            self.early.update(metrics[self.early.monitor], step)
            self.stop = self.early.bad >= self._patience
        return self.best is not None and self.best.update(metrics[self.best.monitor], step)

    def state(self) -> WatchesState:
        """For a checkpoint."""
        return {
            "early": self.early.state() if self.early else None,
            "best": self.best.state() if self.best else None,
            "measured_by": self._measured_by,
        }

    def restore(self, state: WatchesState) -> list[str]:
        """From a checkpoint; returns a note where its values cannot be compared with those to come."""
        if self.early is not None:
            self.early.restore(state.get("early"))
            self.stop = self.early.bad >= self._patience
        if self.best is not None:
            self.best.restore(state.get("best"))
        before, now = state.get("measured_by", {}), self._measured_by
        changed = [key for key, value in before.items() if now and now.get(key) != value]
        return self._forget_others(changed) if changed else []

    def _forget_others(self, changed: Sequence[str]) -> list[str]:
        """Reset what watches numbers of evaluations, which were measured otherwise."""
        watches = {"early_stop": self.early, "best": self.best}
        notes = []
        for name, watch in watches.items():
            if watch is None or watch.monitor.startswith(OF_TRAINING) or (watch.best is None and not watch.bad):
                continue
            watch.forget()
            notes.append(
                f"runner.{name} begins anew: {watch.monitor} was measured otherwise so far "
                f"({', '.join(short_key(key) for key in changed)})"
            )
        self.stop = self.early is not None and self.early.bad >= self._patience
        return notes
