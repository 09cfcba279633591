"""Results as a table, followed by each failure with its remedy; or as JSON."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardtune.verify.adapter import chosen
from shardtune.verify.result import Report, Result

STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def show(report: Report, console: Console | None = None) -> None:
    """Print a report."""
    screen = console or Console()
    table = Table(title=f"verify {report.subject}", title_justify="left", show_lines=False)
    for column in ("check", "", "s"):
        table.add_column(column, no_wrap=True, justify="right" if column == "s" else "left")
    table.add_column("seen")
    for result in report.results:
        table.add_row(
            result.name,
            Text(result.outcome, STYLES[result.outcome]),
            f"{result.seconds:.1f}",
            Text(_first_line(result)),
        )
    screen.print(table)
    for result in report.failures:
        screen.print(Text(str(result)), soft_wrap=True)
    for note in report.notes:
        screen.print(Text(f"note: {note}"), soft_wrap=True)
    screen.print(Text(summary(report)))


def _first_line(result: Result) -> str:
    """The text of a result without the lines of a program's output, which stand below the table."""
    return result.text.partition("\n")[0].removesuffix(":")


def as_json(report: Report) -> str:
    """The results as one JSON object."""
    results = [asdict(result) for result in report.results]
    return json.dumps(
        {"subject": report.subject, "passed": report.passed, "results": results, "notes": list(report.notes)}, indent=2
    )


def summary(report: Report) -> str:
    """The outcome in a line."""
    counts = {outcome: sum(result.outcome == outcome for result in report.results) for outcome in STYLES}
    counted = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    seconds = sum(result.seconds for result in report.results) if report.seconds is None else report.seconds
    return f"{report.subject}: {counted} of {len(report.results)} checks in {seconds:.0f} s"


def list_checks(only: Collection[str] = (), console: Console | None = None) -> None:
    """Print the names of the checks, or of those that are named, and the properties they check."""
    table = Table(show_header=False, box=None)
    for check in chosen(only):
        table.add_row(check.name, Text(check.title))
    (console or Console()).print(table)
