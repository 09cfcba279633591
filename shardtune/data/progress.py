"""The progress of tokenising a file: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from shardtune.errors import counted
from shardtune.launch.progress import PROGRESS

_LINE_SECONDS = 10.0


TOKENISING = "tokenising", "tokenised"


class BuildProgress:
    """Progress of one file; use it through `show_progress`."""

    def __init__(
        self,
        label: str,
        report: Callable[[str], None],
        bar: tuple[Progress, TaskID] | None,
        verbs: tuple[str, str] = TOKENISING,
    ) -> None:
        self._label = label
        self._doing, self._done = verbs
        self._report = report
        self._bar = bar
        self._began = self._spoken = time.monotonic()
        self._finished: str | None = None

    def update(self, rows: int, share: float) -> None:
        """`rows` have been read, which is `share` of the file, 0 if unknown."""
        PROGRESS.beats += 1
        now = time.monotonic()
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=share, rows=rows)
        elif now - self._spoken >= _LINE_SECONDS:
            self._spoken = now
            part = f"{share:.0%}, " if share else ""
            self._report(
                f"data: {self._doing} {self._label}: {part}{rows:,} rows, {rows / (now - self._began):,.0f} rows/s"
            )

    def finish(self, rows: int) -> None:
        seconds = time.monotonic() - self._began
        rate = f", {rows / seconds:,.0f} rows/s" if seconds > 0.5 else ""
        self._finished = f"data: {self._done} {self._label}: {counted(rows, 'row')} in {seconds:.1f} s{rate}"

    def close(self) -> None:
        """Report the end, after the bar is gone."""
        if self._finished is not None:
            self._report(self._finished)


@contextmanager
def show_progress(
    label: str, report: Callable[[str], None], verbs: tuple[str, str] = TOKENISING
) -> Iterator[BuildProgress]:
    """A bar that disappears when done if the error stream is a terminal; otherwise a line now and then.

    Args:
        label: of what is worked on.
        report: receives the lines.
        verbs: what is done, while it is and afterwards.
    """
    if not sys.stderr.isatty():
        progress = BuildProgress(label, report, None, verbs)
        yield progress
        progress.close()
        return
    columns = (
        TextColumn(f"{verbs[0]} {{task.description}}"),
        BarColumn(),
        TextColumn("{task.fields[rows]:,} rows"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        progress = BuildProgress(label, report, (bar, bar.add_task(label, total=1.0, rows=0)), verbs)
        yield progress
    progress.close()
