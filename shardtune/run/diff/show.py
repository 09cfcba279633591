"""The comparison of two runs as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from shardtune.config.secrets import without_secrets
from shardtune.errors import cut, printable
from shardtune.run.diff.compare import Comparison
from shardtune.run.diff.numbers import MetricDifference
from shardtune.run.diff.settings import Difference, Effect
from shardtune.run.diff.weights import NOT_FINITE
from shardtune.run.display import shown_path
from shardtune.run.stored_run import StoredRun

WORDS: Mapping[Effect, str] = {
    "rows": "which rows a step holds",
    "tokens": "what a row is to the model",
    "loss": "the loss of given rows",
    "update": "what a step changes",
    "length": "the number of steps",
    "rounding": "the last digits",
    "evaluation": "evaluations",
    "result": "final/",
}
SECTIONS = ("recipe", "versions", "code", "data", "template", "model", "dtypes", "layout", "history")
NAME_COLUMNS, VALUE_COLUMNS = 34, 44
SHOWN_METRICS = 12
SHOWN_TENSORS = 3


def lines(found: Comparison) -> Iterator[str]:
    """The report, line by line."""
    for letter, run in zip("AB", found.runs, strict=True):
        yield f"{letter}  {shown_path(run.path)}: {_state(run, found.numbers.last['AB'.index(letter)])}"
    for section in SECTIONS:
        chosen = [one for one in found.differences if one.section == section]
        if chosen:
            yield ""
            yield section
            yield from _table(chosen)
    same = [section for section in SECTIONS if not any(one.section == section for one in found.differences)]
    yield ""
    yield f"the same: {', '.join(same) or 'nothing of the above'}"
    yield ""
    yield from (f"{name:<9} {text}" if name else f"{'':<9} {text}" for name, text in _results(found))
    for one in found.explanations:
        yield ""
        yield f"{_sentence(one.finding)}."
        if one.causes:
            yield "It can be explained by:"
            for cause in one.causes:
                yield f"  {cause.section}: {_change(cause)}"
        if one.advice:
            yield f"{_sentence(one.advice)}."


def _sentence(text: str) -> str:
    """With a capital letter, unless the name of a metric comes first."""
    return text if "/" in text.partition(" ")[0] else f"{text[:1].upper()}{text[1:]}"


def text(found: Comparison) -> str:
    """The report, without secrets and control characters."""
    return printable(without_secrets("\n".join(lines(found))))


def _state(run: StoredRun, last: int) -> str:
    if run.finished is not None:
        return f"finished after step {int(run.finished['step']):,}"
    return f"not finished, logged until step {last:,}"


def _table(differences: Sequence[Difference]) -> Iterator[str]:
    width = min(NAME_COLUMNS, max(len(one.name) for one in differences))
    values = [(_shortened(one.first), _shortened(one.second)) for one in differences]
    columns = [max(len(pair[place]) for pair in values) for place in (0, 1)]
    for one, (first, second) in zip(differences, values, strict=True):
        effect = ", ".join(WORDS[effect] for effect in one.effects) or "no number"
        name = one.name if len(one.name) <= NAME_COLUMNS else f"{one.name}\n  {'':<{width}}"
        yield f"  {name:<{width}}  {first:<{columns[0]}}  {second:<{columns[1]}}  ({effect})"


def _shortened(value: str) -> str:
    """A value, without the beginning of a long path or the middle of a long text."""
    value = value.replace("\n", "\\n")
    if len(value) <= VALUE_COLUMNS:
        return value
    half = (VALUE_COLUMNS - 1) // 2
    return f"…{value[1 - VALUE_COLUMNS :]}" if value.startswith("/") else f"{value[:half]}…{value[-half:]}"


def _change(cause: Difference) -> str:
    return f"{cause.name}: {_shortened(cause.first)} and {_shortened(cause.second)}"


def _results(found: Comparison) -> Iterator[tuple[str, str]]:
    """Name and text of each line about rows, numbers and weights."""
    yield from _rows(found)
    numbers = found.numbers
    if numbers.first_common is None:
        yield "numbers", "no step was logged by both"
    else:
        ends = (
            "" if numbers.last[0] == numbers.last[1] else f" (A ends at {numbers.last[0]:,}, B at {numbers.last[1]:,})"
        )
        equal = [one.name for one in numbers.metrics.values() if one.step is None]
        compared = f"{numbers.steps:,} logged step{'' if numbers.steps == 1 else 's'} compared{ends}"
        yield "numbers", f"{compared}; {len(equal)} of {len(numbers.metrics)} metrics are bitwise equal in all of them"
        parted = [*numbers.parted(), *numbers.parted(evaluation=True)]
        yield from (("", line) for line in _metrics(parted[:SHOWN_METRICS]))
        if len(parted) > SHOWN_METRICS:
            yield "", f"and {len(parted) - SHOWN_METRICS} other metrics (--json has them)"
        for run in (1, 2):
            names = [name for name, number in numbers.alone.items() if number == run]
            if names:
                yield "", f"only {'AB'[run - 1]} logged {', '.join(names[:SHOWN_METRICS])}"
    yield from _weights(found)


def _rows(found: Comparison) -> Iterator[tuple[str, str]]:
    rows = found.rows
    if rows.step is not None:
        yield "rows", f"part at step {rows.step:,} (by {rows.by})"
        for letter, named, more in zip("AB", (rows.first, rows.second), rows.more, strict=True):
            others = f" and {more - len(named):,} more" if more > len(named) else ""
            yield "", f"only {letter} has {', '.join(map(shown_row, named)) or 'none'}{others}"
    elif rows.steps:
        yield "rows", f"the same in all {rows.steps:,} steps (by {rows.by})"
    if rows.unknown:
        yield "rows" if not rows.steps else "", f"not compared: {rows.unknown}"


def shown_row(name: str) -> str:
    """A row without the directory of its file."""
    return name.rpartition("/")[2]


def _metrics(parted: Sequence[MetricDifference]) -> Iterator[str]:
    """A table of the metrics that part: where, with which values, by how much, and how far they come apart."""
    header = ["", "parts at step", "A", "B", "by", "at most"]
    rows = [header]
    for one in parted:
        size = "rounding" if one.size == "rounding" else "real"
        beyond = (
            f", more than rounding from step {one.beyond:,}" if size == "rounding" and one.beyond is not None else ""
        )
        most = f"{_percent(one.largest)}, step {one.largest_step or 0:,}{beyond}"
        values = [_value(one.first), _value(one.second)]
        if values[0] == values[1]:
            values = [repr(one.first), repr(one.second)]
        rows.append([one.name, f"{one.step:,}", *values, f"{_percent(one.relative)} ({size})", most])
    widths = [max(len(row[place]) for row in rows) for place in range(len(header))]
    if parted:
        for row in rows:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _value(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.10g}"


def _percent(relative: float) -> str:
    """A relative difference: in percent, or as a power of ten where it is small."""
    if math.isinf(relative):
        return "one is not finite"
    return f"{100 * relative:.3g} %" if relative >= 1e-4 else f"{relative:.1e}"


def _weights(found: Comparison) -> Iterator[tuple[str, str]]:
    weights = found.weights
    if weights.unknown:
        yield "weights", f"not compared: {weights.unknown}"
        return
    if weights.equal:
        yield "weights", f"all {weights.tensors:,} tensors of final/ are bitwise the same"
        return
    if weights.differing:
        most = "the largest differences, relative to the tensor's largest value:"
        yield "weights", f"{len(weights.differing):,} of {weights.tensors:,} tensors of final/ differ; {most}"
        width = max(len(one.name) for one in weights.differing[:SHOWN_TENSORS])
        for one in weights.differing[:SHOWN_TENSORS]:
            is_bad = one.relative == NOT_FINITE
            yield "", f"{one.name:<{width}}  {'one is not finite' if is_bad else _percent(one.relative)}"
    if weights.alone:
        yield (
            "weights" if not weights.differing else "",
            f"in one alone, or of another shape or dtype: {cut(', '.join(weights.alone))}",
        )
