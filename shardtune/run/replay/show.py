"""A replayed step for a reader, and as JSON."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from shardtune.errors import legible
from shardtune.run.display import Display, plain, shown_path
from shardtune.run.replay.place import RowLine
from shardtune.run.replay.replay import Replay, TokenLine

SHOWN_GROUPS, SHOWN_BATCHES = 40, 16
SHOWN_LETTERS = 40
WORST_FIRST = "the row with the highest loss"


def show(found: Replay, display: Display) -> None:
    """Print a step: recorded and replayed numbers, its rows, the norms of its gradient, the worst rows whole."""
    console = display.console
    for part in _parts(found):
        console.print(part, soft_wrap=False if isinstance(part, Table) else None)
    for number, worst in enumerate(found.worst):
        rank = WORST_FIRST if not number else f"number {number + 1} by loss"
        loss = math.nan if worst.line.loss is None else worst.line.loss
        display.show_row(worst.sample, found.tokenizer, f"{worst.line.place}, {rank}: {loss:.4f}")
        if worst.tokens:
            console.print(_tokens(worst.tokens), soft_wrap=False)
    for note in found.notes:
        display.report(f"note: {note}")
    for line in _next(found):
        display.report(line)


def _parts(found: Replay) -> Iterator[Text | Table]:
    run, number = shown_path(found.run_dir), len(found.rows)
    began = "" if found.start is None else f", from {found.start}"
    ranks = f"on {found.ranks} rank{'' if found.ranks == 1 else 's'}"
    ranks = f"trained {ranks}" if found.trained else f"the one after its last, as {ranks}"
    yield plain(f"step {found.step} of {run}, {ranks}{began}", style="bold")
    if found.measured is not None:
        yield _metrics(found.recorded, found.measured.metrics)
    for passed in found.passed:
        yield plain(f"passed over before it: {_named(passed)}")
    if number:
        yield _rows(found.rows)
    for place, (batch, losses) in enumerate(_batches(found)):
        loss = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
        yield plain(f"micro-batch {place + 1}: {batch}; loss {loss}")
    if found.measured is not None and found.measured.groups:
        yield _groups(found.measured.groups)


def _batches(found: Replay) -> Iterator[tuple[str, Mapping[str, float]]]:
    if found.measured is not None:
        yield from zip(found.batches[:SHOWN_BATCHES], found.measured.batch_losses, strict=False)


def _metrics(recorded: Mapping[str, float], replayed: Mapping[str, float]) -> Table:
    table = _table(None, "metric", "recorded", "replayed", "difference")
    for name, value in replayed.items():
        before = recorded.get(name)
        if before is None and not name.startswith("train/"):
            continue
        difference = "" if before is None else f"{value - before:.2g}"
        table.add_row(plain(name), "not logged" if before is None else _number(before), _number(value), difference)
    return table


def _rows(rows: Sequence[RowLine]) -> Table:
    """The rows of a step, those with the highest losses first where they are known."""
    tokens, computed = any(line.trained for line in rows), any(line.loss is not None for line in rows)
    title = f"{len(rows):,} row{'' if len(rows) == 1 else 's'}, {sum(line.length for line in rows):,} tokens"
    title += f", {sum(line.trained for line in rows):,} trained" if tokens else ""
    heads = ["loss"] * computed + ["tokens", "trained"] if tokens else ["loss"] * computed + ["size", "weight"]
    table = _table(title if tokens else title.replace("tokens", "in size"), *heads)
    table.add_column("row", no_wrap=True)
    table.add_column("text")
    names = {line.file: Path(line.file).name for line in rows}
    alike = len(set(names.values())) < len(names)
    for line in sorted(rows, key=_by_loss) if computed else rows:
        cells = [_loss(line)] if computed else []
        weight = f"{line.trained:,}" if tokens else ", ".join(f"{value:g}" for value in line.weights.values())
        table.add_row(
            *cells,
            f"{line.length:,}",
            weight,
            plain(_place(line, whole=alike)),
            plain(line.text, no_wrap=True, overflow="ellipsis"),
        )
    return table


def _by_loss(line: RowLine) -> float:
    return -math.inf if line.loss is None or not math.isfinite(line.loss) else -line.loss


def _loss(line: RowLine) -> str:
    return "" if line.loss is None else f"{line.loss:.4f}"


def _place(line: RowLine, *, whole: bool = False) -> str:
    """A row by the name of its file; `whole`: by the end of its path, where another file has the same name."""
    if not whole:
        return f"{Path(line.file).name}:{line.row}"
    return line.place if len(line.place) <= SHOWN_LETTERS else f"…{line.place[-SHOWN_LETTERS:]}"


def _groups(groups: Mapping[str, float]) -> Table:
    table = _table("norm of the gradient", "norm")
    table.add_column("parameters")
    shown = list(groups.items())
    if len(shown) > SHOWN_GROUPS:
        largest = sorted(groups, key=lambda name: -math.inf if math.isnan(groups[name]) else -groups[name])
        kept = set(largest[:SHOWN_GROUPS])
        shown = [pair for pair in shown if pair[0] in kept]
    for name, value in shown:
        table.add_row(_number(value), plain(name))
    if len(groups) > SHOWN_GROUPS:
        table.add_row("", f"and {len(groups) - SHOWN_GROUPS} others with smaller ones (--json has all)")
    return table


def _tokens(tokens: Sequence[TokenLine]) -> Table:
    table = _table("its worst tokens", "loss", "place")
    table.add_column("token")
    table.add_column("after")
    for token in tokens:
        table.add_row(
            f"{token.loss:.4f}",
            str(token.place),
            plain(repr(legible(token.text, SHOWN_LETTERS) or token.text)),
            plain(legible(token.before, SHOWN_LETTERS)),
        )
    return table


def _table(title: str | None, *numbers: str) -> Table:
    """A table whose first columns hold numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, name in enumerate(numbers):
        table.add_column(name, justify="left" if name == "metric" and not place else "right", no_wrap=True)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) >= 1 else f"{value:.6g}"


def _named(rows: Sequence[RowLine]) -> str:
    named = ", ".join(_place(line) for line in rows[:4])
    return named + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")


def _next(found: Replay) -> list[str]:
    """What can be done with a step's rows."""
    run = shlex.quote(shown_path(found.run_dir))
    if not found.rows:
        return []
    chosen = found.worst[0].line if found.worst else found.rows[0]
    row = shlex.quote(_place(chosen))
    return [
        "to leave a row out of training, add it to a file for data.quarantine:",
        f"  shardtune replay {run} --step {found.step} --rows --row {row} --quarantine quarantine.jsonl",
    ]


def as_json(found: Replay) -> dict[str, Any]:
    """A step as JSON values; numbers that are not finite are null."""
    start, measured = found.start, found.measured
    content: dict[str, Any] = {
        "run": str(found.run_dir),
        "step": found.step,
        "ranks": found.ranks,
        "trained": found.trained,
        "recorded": dict(found.recorded),
        "rows": [line.as_json() for line in found.rows],
        "passed_over": [[line.as_json() for line in rows] for rows in found.passed],
        "notes": list(found.notes),
    }
    if start is not None:
        content["checkpoint"] = None if start.checkpoint is None else str(start.checkpoint)
        content["trained_before"] = found.step - 1 - start.step
    if measured is not None:
        content |= {"replayed": measured.metrics, "gradient_norms": measured.groups, "problem": measured.problem}
        content["micro_batches"] = [{"fields": batch, "losses": dict(losses)} for batch, losses in _batches(found)]
        content["worst"] = [
            {
                **worst.line.as_json(),
                "tokens": [{"place": one.place, "token": one.text, "loss": one.loss} for one in worst.tokens],
            }
            for worst in found.worst
        ]
    return _finite(content)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
