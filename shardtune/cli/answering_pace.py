"""How far the answers to a file of prompts have come, as a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

from shardtune.run.status import duration

LINE_SECONDS = 10.0
"""Between two lines, at least."""


class AnsweringPace:
    """Reports how many prompts are answered, and how long the others will take at the same pace.

    Args:
        total: the number of prompts.
        report: receives the lines.
        clock: seconds.
    """

    def __init__(self, total: int, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._report = report
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._reported = clock()

    def update(self, done: int) -> None:
        """So many prompts are answered; the pace is that since the first call, which follows the model's loading."""
        now = self._clock()
        first_done, began = self._first = self._first or (done, now)
        if now - self._reported < LINE_SECONDS or done >= self._total:
            return
        self._reported = now
        left = ""
        if done > first_done:
            left = f", about {duration((now - began) / (done - first_done) * (self._total - done))} left"
        self._report(f"{done:,} of {self._total:,} prompts are answered{left}")
