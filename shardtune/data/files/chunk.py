"""Some rows of a file, which a worker process can decode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardtune.data.encoder import Row, RowError
from shardtune.errors import DataError

NumberedRow = tuple[int, Row | RowError]

CHUNK_ROWS = 256
CHUNK_BYTES = 1 << 20


class Chunk(Protocol):
    """Some consecutive rows of a file, still encoded; picklable."""

    @property
    def progress(self) -> float:
        """The share of the file that has been read after this chunk, 0 if unknown."""
        ...

    def rows(self) -> Iterator[NumberedRow]:
        """Each row with its number in the file, from 1; for JSON lines the number of the line."""
        ...


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Rows that had to be decoded while reading.

    Attributes:
        beside: keys of the file beside its list of rows, which are not read.
    """

    numbered: list[NumberedRow]
    progress: float
    beside: tuple[str, ...] = ()

    def rows(self) -> Iterator[NumberedRow]:
        yield from self.numbered


def require_distinct(columns: Sequence[str], path: Path) -> None:
    """Refuse two columns of one name, of which a row could have only the last; cells without a name are not read."""
    twice = next((name for name, count in Counter(filter(None, columns)).items() if count > 1), None)
    if twice is not None:
        raise DataError(
            f"{Counter(columns)[twice]} columns have the name {twice!r}",
            where=str(path),
            remedy="rename all but one of them",
        )


def excerpt(text: str, place: int) -> str:
    """Up to sixty characters of a text around a place, for a message."""
    start = max(place - 30, 0)
    piece = text[start : place + 30].strip()
    return ("…" if start else "") + piece + ("…" if place + 30 < len(text.rstrip()) else "")
