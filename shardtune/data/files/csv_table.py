"""Tables of text: CSV, and TSV."""

from __future__ import annotations

import csv
import io
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shardtune.data.encoder import Row, RowError
from shardtune.data.files.chunk import CHUNK_ROWS, Chunk, NumberedRow, RowChunk, excerpt, require_distinct
from shardtune.data.files.compression import COMPRESSIONS, open_uncompressed
from shardtune.errors import DataError

_QUOTED = re.compile(r'"[^"]*+(?:""[^"]*+)*+"')
"""A whole cell in quotes."""
_SNIFFED_LINES = 20


def read_csv(path: Path) -> Iterator[Chunk]:
    """A header and rows; the first row after the header is row 1."""
    csv.field_size_limit(sys.maxsize)
    plain = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    delimiter = "\t" if plain.suffix.lower() == ".tsv" else ","
    with open_uncompressed(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        first = [*itertools.islice(text, 1 + _SNIFFED_LINES)]
        _require_delimiter(first, delimiter, path)
        record = _Record(itertools.chain(first, text))
        cells = csv.reader(record, delimiter=delimiter, strict=True)
        numbered: list[NumberedRow] = []
        try:
            header = next(cells, None) or []
            require_distinct(header, path)
            for number, row in enumerate(filter(None, record.each(cells)), 1):
                numbered.append((number, _csv_row(header, row)))
                if len(numbered) >= CHUNK_ROWS:
                    yield RowChunk(numbered, 0.0)
                    numbered = []
        except csv.Error as error:
            line, cell = record.last_quoted(delimiter)
            raise DataError(
                f"broken CSV: {error}: the quoted cell that begins with {cell!r} does not end where it should",
                where=f"{path}: line {line:,}",
                remedy='end the cell with a quote, and write a quote in it as ""; or save the table as CSV again',
            ) from error
    if numbered:
        yield RowChunk(numbered, 1.0)


def _require_delimiter(first: Sequence[str], delimiter: str, path: Path) -> None:
    """Raises `DataError` for a table that other characters divide: all its columns would be one.

    Args:
        first: lines, of which those of most rows are divided as the header; one that is text alone has a column.
        delimiter: by the file's name.
        path: of the file.
    """
    header = first[0] if first else ""
    if len(next(csv.reader([header], delimiter=delimiter), [])) > 1:
        return
    other = next((one for one in ",;\t" if _divides(one, first)), None)
    if other is not None:
        raise DataError(
            f"the columns of the header are divided by {other!r}, and not by {delimiter!r}: {excerpt(header, 0)}",
            where=str(path),
            remedy="name the file .tsv" if other == "\t" else "save the table with commas, or with tabs as .tsv",
        )


def _divides(delimiter: str, lines: Sequence[str]) -> bool:
    """Whether a character divides the header, and at least half of the rows below it into as many cells."""
    try:
        header, *rows = [*filter(None, csv.reader(lines, delimiter=delimiter))] or [[]]
    except csv.Error:
        return False
    return len(header) > 1 and 2 * sum(len(row) == len(header) for row in rows) >= len(rows)


class _Record:
    """The lines of a text, of which those of the row that is read last are kept.

    Args:
        lines: with their ends.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)
        self._kept: list[str] = []
        self._before = 0

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self._kept.append(line)
            yield line

    def each(self, rows: Iterator[list[str]]) -> Iterator[list[str]]:
        """The rows that are read from these lines."""
        while True:
            self._before += len(self._kept)
            self._kept.clear()
            row = next(rows, None)
            if row is None:
                return
            yield row

    def last_quoted(self, delimiter: str) -> tuple[int, str]:
        """Of the last quoted cell that the lines of a broken row open, the number of its line, and its beginning."""
        text, place, opened = "".join(self._kept), 0, 0
        end_of_cell = re.compile(f"[{delimiter}\r\n]")
        while place < len(text):
            if text[place] == '"':
                opened, closed = place, _QUOTED.match(text, place)
                if closed is None or not end_of_cell.match(text, closed.end()):
                    break
                place = closed.end()
            end = end_of_cell.search(text, place)
            if end is None:
                break
            place = end.end()
        number, start = self._before, 0
        for line in self._kept:
            number, start = number + 1, start + len(line)
            if start > opened:
                break
        return number, excerpt(text[opened:], 0)


def _csv_row(header: list[str], cells: list[str]) -> Row | RowError:
    if len(cells) != len(header):
        return RowError(f"the row has {len(cells)} cells, the header {len(header)}")
    return dict(zip(header, cells, strict=True))
