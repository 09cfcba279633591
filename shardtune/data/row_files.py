"""Reading rows out of files, in pieces that a worker process can decode."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import itertools
import json
import lzma
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from shardtune.data.encoder import Row, RowError, caused_by
from shardtune.data.json_rows import DECODER, RepeatedKeyError
from shardtune.errors import DataError

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
SUPPORTED = ", ".join(KINDS) + f", and these with {', '.join(COMPRESSIONS)}"
_DATA_LIST = re.compile(r"\s*\{\s*\"data\"\s*:\s*(?=\[)")
_SPLITS = ("train", "validation", "valid", "val", "dev", "eval", "test")
_FIRST_SPLIT = re.compile(rf"\{{\s*\"({'|'.join(_SPLITS)})\"\s*:\s*\[")
_QUOTED = re.compile(r'"[^"]*+(?:""[^"]*+)*+"')
"""A whole cell in quotes."""
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_KEYS_OF_TURNS = {"role": "messages", "from": "conversations"}
"""A key of the turns in a list -> the key of a row that has such a list."""
_SNIFFED_LINES = 20
_CHUNK_ROWS = 256
_CHUNK_BYTES = 1 << 20
_COUNTED_BYTES = 1 << 22
MOST_ROW_BYTES = 1 << 27
"""The longest line of a file of JSON lines, uncompressed; a longer one is a bad row."""

NumberedRow = tuple[int, Row | RowError]


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
class JsonChunk:
    """JSON objects as text, with their row numbers; a line that is too long as its error."""

    texts: list[tuple[int, bytes | RowError]]
    progress: float

    def rows(self) -> Iterator[NumberedRow]:
        for number, text in self.texts:
            yield number, text if isinstance(text, RowError) else _parse_json(text)


@dataclass(frozen=True, slots=True)
class TableChunk:
    """An Arrow record batch whose first row has the number `first`."""

    first: int
    batch: pa.RecordBatch
    progress: float

    def rows(self) -> Iterator[NumberedRow]:
        try:
            rows: list[Row | RowError] = [_plain(row) for row in self.batch.to_pylist()]
        except Exception:  # of one row
            rows = [self._row(index) for index in range(self.batch.num_rows)]
        yield from enumerate(rows, self.first)

    def _row(self, index: int) -> Row | RowError:
        try:
            return _plain(self.batch.slice(index, 1).to_pylist()[0])
        except Exception as error:  # Python has no such value: text that is no UTF-8, a date beyond its range
            return caused_by(error)


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Rows that had to be decoded while reading."""

    numbered: list[NumberedRow]
    progress: float

    def rows(self) -> Iterator[NumberedRow]:
        yield from self.numbered


def kind_of(path: Path) -> str | None:
    """jsonl, json, parquet, csv or arrow by the file's name; None for any other name."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return KINDS.get(suffixes[-1]) if suffixes else None


def is_description(path: Path) -> bool:
    """Whether a file describes a data set, by its name, as `datasets` and others write it: it holds no rows."""
    return path.name in _DESCRIPTIONS


def read_chunks(path: Path, kind: str) -> Iterator[Chunk]:
    """The rows of a file in order. Raises `DataError` for a file that cannot be read as what it is named."""
    with _readable(path, kind):
        yield from _READERS[kind](path)


@contextmanager
def _readable(path: Path, kind: str) -> Iterator[None]:
    """Turns what reading raises into a `DataError`."""
    try:
        yield
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(
            f"the file is not UTF-8 text: {error}", where=str(path), remedy="convert it to UTF-8"
        ) from error
    except Exception as error:  # decompressors and Arrow raise many kinds for bytes that are not theirs
        raise DataError(
            f"the file cannot be read as {kind}: {error or type(error).__name__}",
            where=str(path),
            remedy="the file name selects the format: rename it, or write it again",
        ) from error


def read_rows(path: Path, kind: str) -> Iterator[NumberedRow]:
    """Each row of a file with its number."""
    for chunk in read_chunks(path, kind):
        yield from chunk.rows()


def last_number(path: Path, kind: str) -> int:
    """The number of a file's last row, 0 for a file without rows; JSON lines and Parquet are not decoded for it.

    Of JSON lines, blank ones at the end count.

    Raises:
        DataError: the file cannot be read as what it is named.
    """
    with _readable(path, kind):
        if kind == "jsonl":
            return _count_lines(path)
        if kind == "parquet" and path.suffix.lower() not in COMPRESSIONS:
            return pq.read_metadata(path).num_rows
        number = 0
        for chunk in _READERS[kind](path):
            match chunk:
                case JsonChunk(texts=[*_, (number, _)]) | RowChunk(numbered=[*_, (number, _)]):
                    pass
                case TableChunk(first=first, batch=batch):
                    number = first + batch.num_rows - 1
                case _:
                    raise TypeError(f"a chunk of {kind} is {type(chunk).__name__}")
        return number


def _count_lines(path: Path) -> int:
    number, end, is_blank = 0, b"\n", True
    with _open(path) as file:
        while piece := file.read(_COUNTED_BYTES):
            number += piece.count(b"\n")
            end, is_blank = piece[-1:], is_blank and not piece.strip()
    return 0 if is_blank else number + (end != b"\n")


def _open(path: Path) -> Any:
    """The file's uncompressed bytes."""
    match path.suffix.lower():
        case ".gz":
            return gzip.open(path, "rb")
        case ".bz2":
            return bz2.open(path, "rb")
        case ".xz":
            return lzma.open(path, "rb")
        case ".zst":
            return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def _content(path: Path) -> bytes:
    with _open(path) as file:
        return file.read()


def _read_jsonl(path: Path) -> Iterator[Chunk]:
    size = max(path.stat().st_size, 1)
    texts: list[tuple[int, bytes | RowError]] = []
    filled = read = 0
    # The share of a compressed file that is read is unknown; it counts as read at its end.
    compressed = path.suffix.lower() in COMPRESSIONS
    with _open(path) as lines:
        for number, line in enumerate(iter(partial(lines.readline, MOST_ROW_BYTES + 1), b""), 1):
            read += len(line)
            if number == 1:
                _require_utf8(line, path)
                line = line.removeprefix(codecs.BOM_UTF8)
            if len(line) > MOST_ROW_BYTES:
                too_long = RowError(f"the line is longer than {MOST_ROW_BYTES >> 20} MB, so it is not one row")
                yield JsonChunk([*texts, (number, too_long)], 0.0)
                texts, filled = [], 0
                read += _skip_line(lines)
                continue
            if not line.strip():
                continue
            texts.append((number, line))
            filled += len(line)
            if len(texts) >= _CHUNK_ROWS or filled >= _CHUNK_BYTES:
                yield JsonChunk(texts, 0.0 if compressed else min(read / size, 1.0))
                texts, filled = [], 0
    if texts:
        yield JsonChunk(texts, 1.0)


def _require_utf8(start: bytes, path: Path) -> None:
    """Raises `DataError` for a file that begins as UTF-16 or UTF-32 does: no line of it is a row."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        raise DataError("the file is UTF-16 or UTF-32, not UTF-8 text", where=str(path), remedy="convert it to UTF-8")


def _skip_line(lines: Any) -> int:
    """Read to the end of a line without keeping it; returns the number of bytes."""
    read = 0
    while piece := lines.readline(_CHUNK_BYTES):
        read += len(piece)
        if piece.endswith(b"\n"):
            break
    return read


def _parse_json(text: bytes | str) -> Row | RowError:
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        value = DECODER.decode(decoded)
    except UnicodeDecodeError as error:
        return RowError(f"not UTF-8 text: {error.reason} at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return RowError(f"broken JSON: {error.msg} at character {error.pos + 1}: {_excerpt(error.doc, error.pos)}")
    except RepeatedKeyError as error:
        return RowError(str(error))
    except Exception as error:  # a number of thousands of digits, thousands of brackets
        return caused_by(error)
    if not isinstance(value, dict):
        return _no_row(value, _excerpt(decoded, 0))
    return value


def _no_row(value: object, shown: str) -> RowError:
    """The reason to refuse a value that is no JSON object; the turns of a chat may be listed without one."""
    first = value[0] if isinstance(value, list) and value else None
    key = next((key for name, key in _KEYS_OF_TURNS.items() if isinstance(first, dict) and name in first), None)
    hint = "" if key is None else f'; write a list of turns as {{"{key}": […]}}'
    return RowError(f"the row is {type(value).__name__}, not a JSON object: {shown}{hint}")


def _excerpt(text: str, place: int) -> str:
    start = max(place - 30, 0)
    piece = text[start : place + 30].strip()
    return ("…" if start else "") + piece + ("…" if place + 30 < len(text.rstrip()) else "")


def _read_json(path: Path) -> Iterator[Chunk]:
    """A list of objects, `{"data": [...]}`, or JSON lines under the name `.json`."""
    text = _content(path).decode("utf-8-sig")
    start = _skip_space(text, 0)
    if text.startswith("[", start):
        end = yield from _list_chunks(text, start, path)
        _require_end(text, end, "list", path)
    elif data := _DATA_LIST.match(text):
        end = yield from _list_chunks(text, data.end(), path)
        _require_end(text, _object_end(text, end, path), "object", path)
    elif splits := _splits(text[start:]):
        sizes = ", ".join(f"{name} ({len(rows):,})" for name, rows in splits.items())
        raise DataError(
            f"the file is one object with lists of rows as splits: {sizes}",
            where=str(path),
            remedy="write the list of each split into a file of its own, and name that of train in "
            "data.train_data_paths, another one in data.eval_data_paths",
        )
    elif not isinstance(_parse_json(text[start:].partition("\n")[0]), RowError):
        yield from _read_jsonl(path)
    else:
        raise DataError(
            f"the file does not hold a list of rows; it begins {text[start : start + 40]!r}",
            where=str(path),
            remedy='a .json file must hold [{…}, …], {"data": [{…}, …]}, or one object per line',
        )


def _splits(text: str) -> dict[str, list[Any]] | None:
    """The lists of rows of an object whose keys are all names of splits; None for any other text."""
    if _FIRST_SPLIT.match(text) is None:
        return None
    value = _parse_json(text)
    if isinstance(value, RowError):
        return None
    splits = {name: rows for name, rows in value.items() if name in _SPLITS and isinstance(rows, list)}
    are_rows = any(splits.values()) and all(isinstance(row, dict) for rows in splits.values() for row in rows)
    return splits if len(splits) == len(value) and are_rows else None


def _object_end(text: str, place: int, path: Path) -> int:
    """Where the object ends whose list of rows ends at `place`; well-formed keys other than its own may follow it."""
    place = _skip_space(text, place)
    try:
        pairs, end = json.JSONDecoder(object_pairs_hook=list).raw_decode('{"":0' + text[place:])
    except Exception as error:
        found = _excerpt(text[place:], 0)
        raise DataError(
            "the object that holds the list of rows does not end"
            + (f": after the list comes {found!r}" if found else ", so the file may be cut"),
            where=f"{path}: line {_line(text, place):,}",
            remedy='end it with }, so that it is {"data": [{…}, …]}, or write the file again',
        ) from error
    if any(key == "data" for key, _ in pairs):
        raise DataError(
            "the key 'data' is there twice, so rows would be lost",
            where=str(path),
            remedy="make it one list of rows",
        )
    return place + end - len('{"":0')


def _require_end(text: str, place: int, what: str, path: Path) -> None:
    """Raise `DataError` for whatever follows the rows of a file."""
    place = _skip_space(text, place)
    if place == len(text):
        return
    if text[place] in "[{":
        remedy = "make it one list of rows, or write one object per line (.jsonl); such files may be joined by cat"
    else:
        remedy = "take out what follows, or write the file again"
    raise DataError(
        f"the file goes on after the {what} of its rows: {_excerpt(text[place:], 0)!r}",
        where=f"{path}: line {_line(text, place):,}",
        remedy=remedy,
    )


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _decode(text: str, place: int) -> tuple[Any, int]:
    """The value at a place, and the place behind it."""
    try:
        return DECODER.raw_decode(text, place)
    except RepeatedKeyError as error:
        return RowError(str(error)), json.JSONDecoder().raw_decode(text, place)[1]


def _list_chunks(text: str, start: int, path: Path) -> Generator[Chunk, None, int]:
    """The elements of the JSON list at `start`, one by one, so that a fault is reported with its row.

    Returns:
        The place behind the list.
    """
    place, number = _skip_space(text, start + 1), 0
    numbered: list[NumberedRow] = []
    while not text.startswith("]", place):
        number += 1
        try:
            begin = place
            value, place = _decode(text, place)
        except json.JSONDecodeError as error:
            raise DataError(
                f"broken JSON: {error.msg} at line {error.lineno}: {_excerpt(text, error.pos)!r}",
                where=f"{path}: row {number:,}",
                remedy="mend the file, or write one object per line (.jsonl): there data.on_bad_row=skip helps",
            ) from error
        except Exception as error:
            raise DataError(
                caused_by(error).reason,
                where=f"{path}: row {number:,}",
                remedy="mend the file, or write one object per line (.jsonl): there data.on_bad_row=skip helps",
            ) from error
        is_row = isinstance(value, dict | RowError)
        numbered.append((number, value if is_row else _no_row(value, _excerpt(text[begin:place], 0))))
        place = _skip_space(text, place)
        if text.startswith(",", place):
            place = _skip_space(text, place + 1)
        elif not text.startswith("]", place):
            raise DataError(
                f"broken JSON: expected , or ] after this row, found {_excerpt(text, place)!r}",
                where=f"{path}: row {number:,}",
                remedy="mend the file, or write one object per line (.jsonl): there data.on_bad_row=skip helps",
            )
        if len(numbered) >= _CHUNK_ROWS:
            yield RowChunk(numbered, place / len(text))
            numbered = []
    if numbered:
        yield RowChunk(numbered, 1.0)
    return place + 1


def _skip_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place


def _read_parquet(path: Path) -> Iterator[Chunk]:
    compressed = path.suffix.lower() in COMPRESSIONS
    source = io.BytesIO(_content(path)) if compressed else path
    with pq.ParquetFile(source) as file:
        _require_distinct(file.schema_arrow.names, path)
        yield from _table_chunks(file.iter_batches(batch_size=_CHUNK_ROWS), file.metadata.num_rows)


def _read_arrow(path: Path) -> Iterator[Chunk]:
    """Arrow IPC as a stream (what `datasets` writes) or as a file."""
    if path.suffix.lower() in COMPRESSIONS:
        source: Any = pa.BufferReader(_content(path))
    else:
        source = pa.memory_map(str(path))
    with source:
        try:
            batches: Any = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            source.seek(0)
            file = pa.ipc.open_file(source)
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
            _require_distinct(file.schema.names, path)
        else:
            _require_distinct(batches.schema.names, path)
        yield from _table_chunks(batches, None)


def _table_chunks(batches: Any, total: int | None) -> Iterator[Chunk]:
    first = 1
    for batch in batches:
        for start in range(0, batch.num_rows, _CHUNK_ROWS):
            piece = batch.slice(start, _CHUNK_ROWS)
            done = first + piece.num_rows - 1
            yield TableChunk(first, piece, done / total if total else 0.0)
            first += piece.num_rows


def _require_distinct(columns: Sequence[str], path: Path) -> None:
    """Refuse two columns of one name, of which a row could have only the last; cells without a name are not read."""
    twice = next((name for name, count in Counter(filter(None, columns)).items() if count > 1), None)
    if twice is not None:
        raise DataError(
            f"{Counter(columns)[twice]} columns have the name {twice!r}",
            where=str(path),
            remedy="rename all but one of them",
        )


def _plain(row: Mapping[str, Any]) -> Row:
    return {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    """Nested objects without their null fields: Arrow gives every object of a column the fields of all of them."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _read_csv(path: Path) -> Iterator[Chunk]:
    """A header and rows; the first row after the header is row 1."""
    csv.field_size_limit(sys.maxsize)
    plain = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    delimiter = "\t" if plain.suffix.lower() == ".tsv" else ","
    with _open(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        first = [*itertools.islice(text, 1 + _SNIFFED_LINES)]
        _require_delimiter(first, delimiter, path)
        record = _Record(itertools.chain(first, text))
        cells = csv.reader(record, delimiter=delimiter, strict=True)
        numbered: list[NumberedRow] = []
        try:
            header = next(cells, None) or []
            _require_distinct(header, path)
            for number, row in enumerate(filter(None, record.each(cells)), 1):
                numbered.append((number, _csv_row(header, row)))
                if len(numbered) >= _CHUNK_ROWS:
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
            f"the columns of the header are divided by {other!r}, and not by {delimiter!r}: {_excerpt(header, 0)}",
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
        return number, _excerpt(text[opened:], 0)


def _csv_row(header: list[str], cells: list[str]) -> Row | RowError:
    if len(cells) != len(header):
        return RowError(f"the row has {len(cells)} cells, the header {len(header)}")
    return dict(zip(header, cells, strict=True))


_READERS = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "csv": _read_csv,
}
