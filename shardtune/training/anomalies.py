"""Steps that change nothing because their numbers are wrong: not finite, or a spike; and what follows them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, final

from shardtune.config import RunnerConfig
from shardtune.config.schema.runner import AnomalyAction, SpikeConfig
from shardtune.data.loader.protocol import DataState

Kind = Literal["nonfinite", "spike"]
NAMES: Mapping[Kind, str] = {"nonfinite": "not finite", "spike": "spikes"}
SPREAD = 1.4826
"""Standard deviations of normal values in a median absolute deviation."""
LEAST_SPREAD = 0.01
"""Of the median; otherwise the smallest change of values that have hardly differed would be a spike."""


def beyond_fp16(precision: str) -> str:
    """A further remedy for steps that are not finite in fp16, which masks of some models (LongT5) exceed."""
    if precision != "fp16":
        return ""
    return "; or set actor.model.precision: bf16 or fp32, as fp16 ends at 65,504, which a model's code may exceed"


@final
class Spikes:
    """Compares loss and gradient norm of a step with those of the last steps that changed weights.

    A value is a spike above `median + factor * spread`. A step with fewer targets than usual, as the last of an epoch,
    varies more, by the root of the ratio, and the threshold is raised likewise. Low values are none.

    Args:
        config: what is compared, over how many steps.
    """

    def __init__(self, config: SpikeConfig) -> None:
        self._config = config
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=config.window)

    def judge(self, loss: float, norm: float, targets: float) -> str:
        """Why a step is a spike, in one line; "" if it is none. The same on every rank, as its arguments are.

        Args:
            loss: of the step, finite.
            norm: of its gradient, finite.
            targets: the weight of its rows.
        """
        config, seen = self._config, self._seen
        if len(seen) < config.warmup_steps:
            return ""
        losses, norms, weights = zip(*seen, strict=True)
        ratio = math.sqrt(max(1.0, median(weights) / targets))
        for name, what, value, last in (("loss", "loss", loss, losses), ("grad_norm", "gradient norm", norm, norms)):
            if name not in config.watch:
                continue
            middle = median(last)
            spread = max(SPREAD * median([abs(one - middle) for one in last]), LEAST_SPREAD * abs(middle))
            threshold = middle + ratio * config.factor * spread + (ratio - 1) * abs(middle)
            if spread and value > threshold:
                return (
                    f"the {what} was a spike: {value:.6g}, above {threshold:.6g} (median {middle:.6g}, spread "
                    f"{spread:.3g} over the last {len(seen):,} steps)"
                )
        return ""

    def accept(self, loss: float, norm: float, targets: float) -> None:
        """Take in a step that changed weights."""
        self._seen.append((loss, norm, targets))

    def state(self) -> list[tuple[float, float, float]]:
        """For a checkpoint; at most `window` steps."""
        return list(self._seen)

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """From a checkpoint, perhaps of a run with another window."""
        self._seen.clear()
        self._seen.extend((loss, norm, targets) for loss, norm, targets in state)


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A step that changed nothing because its numbers are wrong.

    Attributes:
        kind: of the anomaly.
        action: what follows it.
        problem: what is wrong, with values.
        rows: of the step; those at fault where they were found.
        at: the position in the data before it.
        loss: of the step.
        gradient_norm: of the step.
        over_budget: whether there were too many of them, so that the run ends whatever the action is.
    """

    kind: Kind
    action: AnomalyAction
    problem: str
    rows: str
    at: DataState
    loss: float
    gradient_norm: float
    over_budget: bool

    def facts(self) -> dict[str, Any]:
        """For an event: JSON values, numbers that are not finite as text."""
        values = {"loss": self.loss, "grad_norm": self.gradient_norm}
        return {
            "kind": self.kind,
            "action": self.action,
            **{name: value if math.isfinite(value) else str(value) for name, value in values.items()},
            "epoch": self.at.epoch,
            "rows_consumed": self.at.rows_consumed,
            "rows": self.rows,
        }


@final
class Anomalies:
    """The anomalies of a run: what is one, what follows, and how many there may be.

    Args:
        runner: the recipe's keys.

    Attributes:
        spikes: None where they are not looked for.
        last: the anomaly of the last step; None if it was none.
        steps: of the data so far, those left out included.
        counts: anomalies so far by kind, and rollbacks.
    """

    def __init__(self, runner: RunnerConfig) -> None:
        self._runner = runner
        self.spikes = Spikes(runner.spike) if runner.on_spike is not None else None
        self.last: Anomaly | None = None
        self.counts: dict[str, int] = {}
        self.steps = 0
        self._recent: list[int] = []  # the numbers of those steps that were anomalies, within the window

    @property
    def may_roll_back(self) -> bool:
        """Whether a checkpoint has to be there for any anomaly."""
        return "rollback" in (self._runner.on_nonfinite, self._runner.on_spike)

    @property
    def rollbacks(self) -> int:
        """How often a checkpoint was loaded because of them."""
        return self.counts.get("rollback", 0)

    def add(self, kind: Kind, problem: str, rows: str, at: DataState, loss: float, norm: float) -> Anomaly:
        """Take in an anomaly of the current step."""
        runner = self._runner
        action = runner.on_nonfinite if kind == "nonfinite" else runner.on_spike or "skip"
        budget = runner.anomaly_budget
        self._recent = [number for number in self._recent if number > self.steps - runner.anomaly_window]
        if budget is not None and action != "stop":
            self._recent.append(self.steps)
        over = budget is not None and len(self._recent) > budget
        self.last = Anomaly(kind, action, problem, rows, at, loss, norm, over)
        for name in (kind, action) if action == "rollback" and not over else (kind,):
            self.counts[name] = self.counts.get(name, 0) + 1
        return self.last

    def metrics(self) -> dict[str, float]:
        """Spikes and rollbacks so far, for the line of a step, once there are any."""
        named = {"train/spikes": self.counts.get("spike", 0), "train/rollbacks": self.rollbacks}
        return {name: float(number) for name, number in named.items() if number}

    def describe(self) -> str:
        """How many there were, for the end of a run; "" if none."""
        kinds = ", ".join(f"{name}: {self.counts[kind]:,}" for kind, name in NAMES.items() if kind in self.counts)
        total = sum(self.counts.get(kind, 0) for kind in NAMES)
        back = f", with {self.rollbacks:,} rollback{'s' * (self.rollbacks > 1)}" if self.rollbacks else ""
        return f"{total:,} step{'s' * (total > 1)} left out ({kinds}){back}" if total else ""

    def state(self) -> dict[str, object]:
        """For a checkpoint; bounded."""
        return {"counts": dict(self.counts), "steps": self.steps, "recent": list(self._recent)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.counts, self.steps, self._recent = dict(state["counts"]), state["steps"], list(state["recent"])
