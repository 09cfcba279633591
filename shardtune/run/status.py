"""The state of a run in a few lines: what it does, how far it is, its loss, speed, memory, and the time left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from rich.text import Text

from shardtune.launch.progress import (
    CALLBACK,
    EVALUATION,
    FINAL,
    FIRST_STEP,
    GENERATION,
    LOADING,
    PROGRESS,
    SAVING,
    Phase,
    Progress,
)
from shardtune.launch.watchdog.stacks import place_of_main_thread

ACTIVITIES: Mapping[Phase, str] = {
    FIRST_STEP: "compiling",
    EVALUATION: "evaluating",
    GENERATION: "answering",
    SAVING: "saving",
    LOADING: "going back",
    CALLBACK: "callback",
    FINAL: "writing final/",
}
"""What a phase is called; any other is training, or what the display was given."""
STEP_FORMS: Mapping[str, Callable[[float], str]] = {
    "train/grad_norm": lambda norm: f"grad {decimal(norm, 3)}",
    "train/learning_rate": "lr {:.2e}".format,
}
LABEL_COLUMNS, BAR_COLUMNS, CURVE_COLUMNS = 11, 40, 32
SHOWN_SECONDS = 3.0
"""From this long on, the time is shown that something other than training has taken."""
LARGE_SPREAD = 10.0
LARGEST_IN_PLACES = 1e9
BLOCKS = "▁▂▃▄▅▆▇█"


class Curve:
    """A series of numbers of any length in bounded memory: means over equally many of them.

    Args:
        most: means that are kept, at least half as many once there are so many numbers.
    """

    def __init__(self, most: int = 2 * CURVE_COLUMNS) -> None:
        self._most = most
        self._size = 1
        self._sums: list[float] = []
        self._counts: list[int] = []

    def add(self, value: float) -> None:
        """Append a number; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        if self._counts and self._counts[-1] < self._size:
            self._sums[-1] += value
            self._counts[-1] += 1
            return
        if len(self._sums) == self._most:
            self._sums = [sum(self._sums[at : at + 2]) for at in range(0, self._most, 2)]
            self._counts = [sum(self._counts[at : at + 2]) for at in range(0, self._most, 2)]
            self._size *= 2
        self._sums.append(value)
        self._counts.append(1)

    def sparkline(self, columns: int) -> str:
        """The numbers as a line of blocks, from the least to the largest; by their logarithms if they differ much."""
        means = [total / count for total, count in zip(tuple(self._sums), tuple(self._counts), strict=False)]
        if len(means) < 2 or columns < 2:
            return ""
        if len(means) > columns:
            edges = [round(at * len(means) / columns) for at in range(columns + 1)]
            parts = [means[start:stop] for start, stop in pairwise(edges)]
            means = [sum(part) / len(part) for part in parts]
        if min(means) > 0 and max(means) > LARGE_SPREAD * min(means):
            means = [math.log(mean) for mean in means]
        low, spread = min(means), max(means) - min(means)
        return "".join(BLOCKS[min(7, int(8 * (mean - low) / spread)) if spread else 0] for mean in means)


class Status:
    """The state of a run; written by the thread that trains, read by the one that draws.

    Args:
        label: what the process does where its phase has no name of its own.
        total: optimizer steps of the run; 0: no bar.
        step: optimizer steps done.
        ranks: of the run.
        progress: of this process.
    """

    def __init__(
        self, label: str, total: int = 0, step: int = 0, *, ranks: int = 1, progress: Progress = PROGRESS
    ) -> None:
        self.total = total
        self._label, self._step, self._ranks = label, step, ranks
        self._progress = progress
        self._metrics: Mapping[str, float] = {}
        self._losses = Curve()
        self._first = self._last = (step, math.nan)  # step, and the time when it was done
        self._seen = (0, "", time.monotonic())  # beats, activity, since when
        self._stood = time.monotonic()

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done, which may have changed nothing."""
        now = time.monotonic()
        self._step, self._metrics, self._last = step, metrics, (step, now)
        if math.isnan(self._first[1]):  # the first step, and what ran before it, are no measure of the others
            self._first = self._last
        if "train/loss" in metrics:
            self._losses.add(metrics["train/loss"])

    @property
    def seconds_left(self) -> float | None:
        """Estimated from the first step on, evaluations and checkpoints included; None before the second."""
        (first, began), (last, now) = self._first, self._last
        return None if last <= first else (now - began) / (last - first) * max(0, self.total - last)

    def lines(self, width: int) -> Sequence[Text]:
        """The state in lines of at most `width` columns."""
        label = self._activity()
        if not self.total:
            return [Text(label, style="bold")]
        counted = f" {self._step:,}/{self.total:,}"
        left = self.seconds_left
        further = [f"{duration(left)} left"] if left is not None and self._step < self.total else []
        label = f"{label} ".ljust(LABEL_COLUMNS)
        pieces = _fitting(further, width - len(label) - len(counted) - 10)
        bar = min(BAR_COLUMNS, width - len(label) - len(counted) - len(pieces))
        first = Text(label, style="bold")
        if bar >= 5:
            first.append_text(_bar(self._step, self.total, bar))
        first.append(counted).append(pieces, style="cyan")
        lines = [first, self._numbers(width)] if self._metrics else [first]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return lines

    def _numbers(self, width: int) -> Text:
        """The second line: loss with its curve, speed, memory, and what else fits."""
        metrics, text = self._metrics, Text()
        shown = []
        for unit in ("tokens", "samples"):
            if (speed := metrics.get(f"perf/{unit}_per_second")) is not None:
                shown.append(f"{speed:,.0f} {unit}/s")
        if (memory := metrics.get("perf/peak_memory_gb")) is not None:
            shown.append(f"{memory:.1f} GB")
        shown += [form(metrics[name]) for name, form in STEP_FORMS.items() if name in metrics]
        if "train/loss" in metrics:
            text.append(f"loss {decimal(metrics['train/loss'], 4)}".ljust(LABEL_COLUMNS) + " ")
            columns = max(0, min(CURVE_COLUMNS, width - 59))
            text.append(self._losses.sparkline(columns).ljust(columns), style="green")
        text.append(_fitting(shown, width - len(text)))
        return text

    def _activity(self) -> str:
        """What the process does, and for how long where that is not training."""
        beats, now = self._progress.beats, time.monotonic()
        if beats != self._seen[0]:
            self._stood = now
        name = ACTIVITIES.get(self._progress.phase, self._label)
        if self._ranks > 1 and now - self._stood > SHOWN_SECONDS and place_of_main_thread().collective:
            name = "waiting for other ranks"
        since = self._seen[2] if name == self._seen[1] else now
        self._seen = (beats, name, since)
        return name if name == "training" or now - since < SHOWN_SECONDS else f"{name} {duration(now - since)}"


def _bar(done: int, total: int, columns: int) -> Text:
    full = min(columns, columns * done // max(1, total))
    return Text("━" * full, style="green").append("━" * (columns - full), style="bright_black")


def _fitting(pieces: Sequence[str], columns: int) -> str:
    """As many of the pieces, from the first on, as fit, each behind two blanks."""
    text = ""
    for piece in pieces:
        if len(text) + 2 + len(piece) > columns:
            break
        text += f"  {piece}"
    return text


def decimal(value: float, places: int) -> str:
    """A number to so many places, or as `3.2100e-05` where that would show one digit of it, or none, or thirty."""
    in_places = value == 0 or 10.0 ** (1 - places) <= abs(value) < LARGEST_IN_PLACES
    return f"{value:,.{places}f}" if in_places else f"{value:.{places}e}"


def duration(seconds: float) -> str:
    """Seconds as 1 h 02 min, 3 min 20 s or 12 s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole >= 60:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole} s"
