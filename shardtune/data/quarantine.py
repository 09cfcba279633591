"""`data.quarantine`: a file of rows that are left out of training, each named by the hash of its content.

A line is a JSON object with `hash`, and optionally `file`, `row`, `reason` and `text`:

    {"hash": "9f3c0a61d2b4e577", "file": "train.jsonl", "row": 17, "reason": "loss 14.2 in step 120 of runs/recipe"}

The hash is of the row as its file stores it, so that it holds under every tokenizer and template and wherever the file
lies. `file` narrows it to files of that name; `row`, `reason` and `text` are for readers. Rows of equal content are
left out together, and so are all frames of an episode, which have one hash.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardtune.data.cache.dataset import TokenDataset
from shardtune.errors import DataError

KEY = "data.quarantine"
FIELDS = ("hash", "file", "row", "reason", "text")
SHOWN = 3
"""How many lines without a row are named."""


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """A line of the file.

    Attributes:
        line: its number.
        digest: the hash of the row.
        file: the name of its file; "": any.
        row: its number there, when it was written; None: not known.
        reason: for a reader.
    """

    line: int
    digest: int
    file: str
    row: int | None
    reason: str

    def __str__(self) -> str:
        place = f" ({self.file or 'row'}{'' if self.row is None else f':{self.row}'})" if self.file or self.row else ""
        return f"line {self.line}{place}"


def read_quarantine(path: Path) -> list[QuarantinedRow]:
    """The rows that a file names.

    Raises:
        DataError: it cannot be read, or a line names no row.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{KEY} cannot be read: {error}", where=str(path), remedy="give a file of JSON lines"
        ) from error
    return [_row(line, number, path) for number, line in enumerate(lines, 1) if line.strip()]


def _row(line: str, number: int, path: Path) -> QuarantinedRow:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise _no_row(f"it is no JSON ({error})", number, path) from error
    if not isinstance(content, dict):
        raise _no_row(f"it is a {type(content).__name__}, not an object", number, path)
    unknown = [name for name in content if name not in FIELDS]
    if unknown:
        raise _no_row(f"it has {', '.join(map(repr, unknown))}", number, path)
    digest, row = content.get("hash"), content.get("row")
    if not isinstance(digest, str) or not _is_hash(digest):
        raise _no_row("its hash is not 16 hexadecimal digits in quotes", number, path)
    texts = {name: content.get(name) or "" for name in ("file", "reason", "text")}
    wrong = [name for name, text in texts.items() if not isinstance(text, str)]
    if wrong or not (row is None or (isinstance(row, int) and not isinstance(row, bool))):
        raise _no_row(f"its {', '.join(wrong) or 'row'} has another type", number, path)
    return QuarantinedRow(number, int(digest, 16), Path(texts["file"]).name, row, texts["reason"])


def _is_hash(text: str) -> bool:
    return len(text) == 16 and all(letter in "0123456789abcdef" for letter in text)


def _no_row(what: str, number: int, path: Path) -> DataError:
    return DataError(
        f"the line names no row: {what}",
        where=f"{path}:{number}",
        remedy=f'write {{"hash": "16 digits", "file": …, "row": …, "reason": …}}, of which {FIELDS[0]} alone has to be '
        "there; shardtune replay RUN --step N --row R --quarantine FILE writes such lines",
    )


def without_quarantined(
    rows: TokenDataset, path: Path, *, held_out: TokenDataset | None, report: Callable[[str], None]
) -> TokenDataset:
    """The training rows, with those left out that a file names.

    Evaluation rows stay, so that evaluations can be compared with those of other runs.

    Args:
        rows: of training.
        path: of the file.
        held_out: the evaluation rows that are a part of the same files (`data.eval_split`).
        report: receives a line on what is not found among the training rows.

    Raises:
        DataError: the file cannot be used, or no row is left.
    """
    named = read_quarantine(path)
    found = {one.line: _matching(rows, one) for one in named}
    reasons: dict[int, str] = {}
    for one in named:
        for row in found[one.line]:
            reasons.setdefault(row, one.reason)
    missing = [one for one in named if not found[one.line]]
    kept = [one for one in missing if held_out is not None and _matching(held_out, one)]
    _report(kept, "an evaluation row, which stays", "evaluation rows, which stay", path, named, report)
    gone = [one for one in missing if one not in kept]
    what = "that {} trained: content that has changed, or another file"
    _report(gone, f"no row {what.format('is')}", f"no row {what.format('is')}", path, named, report)
    if len(reasons) == len(rows):
        raise DataError(
            f"all {len(rows):,} training rows are left out",
            where=f"{KEY} = {path}",
            remedy="take lines out of the file",
        )
    return rows.leave_out(reasons)


def _matching(rows: TokenDataset, one: QuarantinedRow) -> Sequence[int]:
    """The rows that a line names."""
    found = np.flatnonzero(rows.hashes == np.uint64(one.digest)).tolist()
    return [row for row in found if one.file in ("", Path(rows.origin(row)[0]).name)]


def _report(
    lines: Sequence[QuarantinedRow],
    of_one: str,
    of_more: str,
    path: Path,
    named: Sequence[QuarantinedRow],
    report: Callable[[str], None],
) -> None:
    if not lines:
        return
    shown = ", ".join(map(str, lines[:SHOWN])) + (", …" if len(lines) > SHOWN else "")
    verb = f"names {of_one}" if len(lines) == 1 else f"name {of_more}"
    report(f"{KEY}: {len(lines):,} of {len(named):,} lines of {path} {verb}: {shown}")


def line_of(content: Mapping[str, object]) -> str:
    """A line of the file."""
    return json.dumps({name: content[name] for name in FIELDS if content.get(name) not in (None, "")}) + "\n"
