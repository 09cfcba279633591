"""JSON lines, and JSON files with a list of rows."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardtune.data.encoder import Row, RowError, caused_by
from shardtune.data.files.chunk import CHUNK_BYTES, CHUNK_ROWS, Chunk, NumberedRow, RowChunk, excerpt
from shardtune.data.files.compression import COMPRESSIONS, content_of, open_uncompressed
from shardtune.data.json_rows import DECODER, RepeatedKeyError
from shardtune.errors import DataError

MOST_ROW_BYTES = 1 << 27
"""The longest line of a file of JSON lines, uncompressed; a longer one is a bad row."""
_COUNTED_BYTES = 1 << 22
_DATA_LIST = re.compile(r"\s*\{\s*\"data\"\s*:\s*(?=\[)")
_ROWS = re.compile(r"\[\s*\{")
_SPLITS = ("train", "validation", "valid", "val", "dev", "eval", "test")
_FIRST_SPLIT = re.compile(rf"\{{\s*\"({'|'.join(_SPLITS)})\"\s*:\s*\[")
_KEYS_OF_TURNS = {"role": "messages", "from": "conversations"}
"""A key of the turns in a list -> the key of a row that has such a list."""


@dataclass(frozen=True, slots=True)
class JsonChunk:
    """JSON objects as text, with their row numbers; a line that is too long as its error."""

    texts: list[tuple[int, bytes | RowError]]
    progress: float

    def rows(self) -> Iterator[NumberedRow]:
        for number, text in self.texts:
            yield number, text if isinstance(text, RowError) else _parse_json(text)


def read_jsonl(path: Path) -> Iterator[Chunk]:
    size = max(path.stat().st_size, 1)
    texts: list[tuple[int, bytes | RowError]] = []
    filled = read = 0
    # The share of a compressed file that is read is unknown; it counts as read at its end.
    compressed = path.suffix.lower() in COMPRESSIONS
    with open_uncompressed(path) as lines:
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
            if len(texts) >= CHUNK_ROWS or filled >= CHUNK_BYTES:
                yield JsonChunk(texts, 0.0 if compressed else min(read / size, 1.0))
                texts, filled = [], 0
    if texts:
        yield JsonChunk(texts, 1.0)


def count_lines(path: Path) -> int:
    number, end, is_blank = 0, b"\n", True
    with open_uncompressed(path) as file:
        while piece := file.read(_COUNTED_BYTES):
            number += piece.count(b"\n")
            end, is_blank = piece[-1:], is_blank and not piece.strip()
    return 0 if is_blank else number + (end != b"\n")


def _require_utf8(start: bytes, path: Path) -> None:
    """Raises `DataError` for a file that begins as UTF-16 or UTF-32 does: no line of it is a row."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        raise DataError("the file is UTF-16 or UTF-32, not UTF-8 text", where=str(path), remedy="convert it to UTF-8")


def _skip_line(lines: Any) -> int:
    """Read to the end of a line without keeping it; returns the number of bytes."""
    read = 0
    while piece := lines.readline(CHUNK_BYTES):
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
        return RowError(f"broken JSON: {error.msg} at character {error.pos + 1}: {excerpt(error.doc, error.pos)}")
    except RepeatedKeyError as error:
        return RowError(str(error))
    except Exception as error:  # a number of thousands of digits, thousands of brackets
        return caused_by(error)
    if not isinstance(value, dict):
        return _no_row(value, excerpt(decoded, 0))
    return value


def _no_row(value: object, shown: str) -> RowError:
    """The reason to refuse a value that is no JSON object; the turns of a chat may be listed without one."""
    first = value[0] if isinstance(value, list) and value else None
    key = next((key for name, key in _KEYS_OF_TURNS.items() if isinstance(first, dict) and name in first), None)
    hint = "" if key is None else f'; write a list of turns as {{"{key}": […]}}'
    return RowError(f"the row is {type(value).__name__}, not a JSON object: {shown}{hint}")


def read_json(path: Path) -> Iterator[Chunk]:
    """A list of objects, `{"data": [...]}`, or JSON lines under the name `.json`."""
    text = content_of(path).decode("utf-8-sig")
    start = _skip_space(text, 0)
    if text.startswith("[", start):
        end = yield from _list_chunks(text, start, path)
        _require_end(text, end, "list", path)
    elif (found := _data_list(text, start)) is not None:
        data, before = found
        end = yield from _list_chunks(text, data, path)
        end, after = _object_end(text, end, path)
        _require_end(text, end, "object", path)
        if before or after:
            yield RowChunk([], 1.0, beside=(*before, *after))
    elif splits := _splits(text[start:]):
        sizes = ", ".join(f"{name} ({len(rows):,})" for name, rows in splits.items())
        raise DataError(
            f"the file is one object with lists of rows as splits: {sizes}",
            where=str(path),
            remedy="write the list of each split into a file of its own, and name that of train in "
            "data.train_data_paths, another one in data.eval_data_paths",
        )
    elif not isinstance(_parse_json(text[start:].partition("\n")[0]), RowError):
        yield from read_jsonl(path)
    else:
        raise DataError(
            f"the file does not hold a list of rows; it begins {text[start : start + 40]!r}",
            where=str(path),
            remedy='a .json file must hold [{…}, …], {"data": [{…}, …]}, or one object per line',
        )


def _data_list(text: str, start: int) -> tuple[int, list[str]] | None:
    """Where the list of rows of an object begins, and the keys before it; None where the text is no such object.

    With other keys before the list, it is one of objects, and nothing follows on other lines: otherwise it is a field
    of rows.
    """
    if first := _DATA_LIST.match(text):
        return first.end(), []
    if not text.startswith("{", start) or _are_lines(text[start:]):
        return None
    before: list[str] = []
    try:
        place = _skip_space(text, start + 1)
        while text.startswith('"', place):
            key, place = DECODER.raw_decode(text, place)
            place = _skip_space(text, _skip_space(text, place) + 1)
            if key == "data":
                return (place, before) if _ROWS.match(text, place) else None
            before.append(key)
            place = _skip_space(text, DECODER.raw_decode(text, place)[1])
            if not text.startswith(",", place):
                return None
            place = _skip_space(text, place + 1)
    except Exception:  # of whatever kind: what the file is instead is found out below
        return None
    return None


def _are_lines(text: str) -> bool:
    """Whether a first line is a row by itself, and others follow."""
    line, _, others = text.partition("\n")
    return bool(others.strip()) and not isinstance(_parse_json(line), RowError)


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


def _object_end(text: str, place: int, path: Path) -> tuple[int, list[str]]:
    """Where the object ends whose list of rows ends at `place`, and the well-formed keys that follow the list."""
    place = _skip_space(text, place)
    try:
        pairs, end = json.JSONDecoder(object_pairs_hook=list).raw_decode('{"":0' + text[place:])
    except Exception as error:
        found = excerpt(text[place:], 0)
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
    return place + end - len('{"":0'), [key for key, _ in pairs[1:]]


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
        f"the file goes on after the {what} of its rows: {excerpt(text[place:], 0)!r}",
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
                f"broken JSON: {error.msg} at line {error.lineno}: {excerpt(text, error.pos)!r}",
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
        numbered.append((number, value if is_row else _no_row(value, excerpt(text[begin:place], 0))))
        place = _skip_space(text, place)
        if text.startswith(",", place):
            place = _skip_space(text, place + 1)
        elif not text.startswith("]", place):
            raise DataError(
                f"broken JSON: expected , or ] after this row, found {excerpt(text, place)!r}",
                where=f"{path}: row {number:,}",
                remedy="mend the file, or write one object per line (.jsonl): there data.on_bad_row=skip helps",
            )
        if len(numbered) >= CHUNK_ROWS:
            yield RowChunk(numbered, place / len(text))
            numbered = []
    if numbered:
        yield RowChunk(numbered, 1.0)
    return place + 1


def _skip_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place
