"""The columns of rows: which one holds the text, the second text, the label; by the names that data sets use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shardtune.data.encoder import Row, RowError
from shardtune.data.row_formats import present

TEXT = ("text", "sentence", "content")
PAIRS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("question", "answer"),
    ("query", "document"),
    ("query", "passage"),
    ("sentence_A", "sentence_B"),
    ("text1", "text2"),
)
LABEL = ("label", "labels")
SCORE = ("label", "score", "labels")
QUERY = ("query", "question", "anchor", "sentence1", "sentence_A", "text1")
POSITIVE = ("positive", "passage", "document", "answer", "sentence2", "sentence_B", "text2", "pos")
NEGATIVES = ("negatives", "negative", "hard_negatives", "neg")
WORDS = ("tokens", "words")
TAGS = ("ner_tags", "tags", "labels", "pos_tags", "chunk_tags")
SOURCE = ("source", "text", "document", "article", "input", "prompt", "question")
TARGET = ("target", "summary", "highlights", "output", "completion", "answer")


def value_of(row: Row, names: Sequence[str], what: str, form: str) -> Any:
    """The value of the first of these columns that a row has.

    Args:
        row: of the data.
        names: of columns, the usual one first.
        what: is in it, for messages.
        form: of the task's rows, for messages.

    Raises:
        RowError: it has none of them.
    """
    empty = next((name for name in names if name in row), None)
    row, name = present(row), column_of(row, names)
    if name is not None:
        return row[name]
    if empty is not None:
        raise RowError(f"{empty!r} ({what}) is null")
    raise RowError(
        f"the row has no {names[0]!r} ({what}), it has {', '.join(map(str, row)) or 'no column'}.\n"
        f"    Rows of this task are {form}.\n"
        f"    Name its column in the recipe, data.columns: {{{names[0]}: YOUR_COLUMN}}"
    )


def column_of(row: Row, names: Sequence[str]) -> str | None:
    """The first of these columns that a row has."""
    row = present(row)
    return next((name for name in names if row.get(name) is not None), None)


def has(row: Row, names: Sequence[str]) -> bool:
    """Whether a row has one of these columns."""
    return column_of(row, names) is not None


def text_of(row: Row, names: Sequence[str], what: str, form: str) -> str:
    """`value_of`, which has to be a text."""
    return as_text(value_of(row, names, what, form), what)


def as_text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{what} is {value!r:.60}, not a text")
    return value


def text_columns(row: Row) -> tuple[str, ...]:
    """The column of the text of a row, or those of its pair of texts; empty where it has none."""
    pair = next((pair for pair in PAIRS if all(has(row, [name]) for name in pair)), None)
    single = column_of(row, TEXT)
    return pair or (() if single is None else (single,))


def texts_of(row: Row, form: str) -> tuple[str, ...]:
    """The text of a row, or its pair of texts."""
    columns = text_columns(row)
    if len(columns) < 2:
        return (text_of(row, TEXT, "the text", form),)
    return tuple(as_text(row[name], f"{name!r}") for name in columns)


def number_of(value: object, what: str) -> float:
    """A number that a row gives."""
    try:
        if isinstance(value, str | int | float | np.number):
            found = float(value)
            if found == found and abs(found) != float("inf"):
                return found
    except ValueError:
        pass
    raise RowError(f"{what} is {value!r:.60}, not a number")


def list_of(value: object, what: str) -> list[Any]:
    """A list that a row gives; arrays of numpy and Arrow among them."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise RowError(f"{what} is {value!r:.60}, not a list")
    return list(value)
