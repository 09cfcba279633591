"""Reading rows out of files, in pieces that a worker process can decode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardtune.data.files import arrow as pa
from shardtune.data.files.arrow_table import TableChunk, read_arrow, read_parquet
from shardtune.data.files.chunk import Chunk, NumberedRow, RowChunk
from shardtune.data.files.compression import COMPRESSIONS
from shardtune.data.files.csv_table import read_csv
from shardtune.data.files.json_text import JsonChunk, count_lines, read_json, read_jsonl
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
SUPPORTED = ", ".join(KINDS) + f", and these with {', '.join(COMPRESSIONS)}"
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_READERS = {
    "jsonl": read_jsonl,
    "json": read_json,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "csv": read_csv,
}


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
            return count_lines(path)
        if kind == "parquet" and path.suffix.lower() not in COMPRESSIONS:
            return pa.parquet.read_metadata(path).num_rows
        number = 0
        for chunk in _READERS[kind](path):
            match chunk:
                case JsonChunk(texts=[*_, (number, _)]) | RowChunk(numbered=[*_, (number, _)]):
                    pass
                case RowChunk(numbered=[]):
                    pass
                case TableChunk(first=first, batch=batch):
                    number = first + batch.num_rows - 1
                case _:
                    raise TypeError(f"a chunk of {kind} is {type(chunk).__name__}")
        return number


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
