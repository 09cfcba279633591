"""Tables of Arrow: Parquet, and Arrow IPC as a stream or a file."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtune.data.encoder import Row, RowError, caused_by
from shardtune.data.files import arrow as pa
from shardtune.data.files.chunk import CHUNK_ROWS, Chunk, NumberedRow, require_distinct
from shardtune.data.files.compression import COMPRESSIONS, content_of


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


def read_parquet(path: Path) -> Iterator[Chunk]:
    compressed = path.suffix.lower() in COMPRESSIONS
    source = io.BytesIO(content_of(path)) if compressed else path
    with pa.parquet.ParquetFile(source) as file:
        require_distinct(file.schema_arrow.names, path)
        yield from _table_chunks(file.iter_batches(batch_size=CHUNK_ROWS), file.metadata.num_rows)


def read_arrow(path: Path) -> Iterator[Chunk]:
    """Arrow IPC as a stream (what `datasets` writes) or as a file."""
    if path.suffix.lower() in COMPRESSIONS:
        source: Any = pa.BufferReader(content_of(path))
    else:
        source = pa.memory_map(str(path))
    with source:
        try:
            batches: Any = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            source.seek(0)
            file = pa.ipc.open_file(source)
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
            require_distinct(file.schema.names, path)
        else:
            require_distinct(batches.schema.names, path)
        yield from _table_chunks(batches, None)


def _table_chunks(batches: Any, total: int | None) -> Iterator[Chunk]:
    first = 1
    for batch in batches:
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            piece = batch.slice(start, CHUNK_ROWS)
            done = first + piece.num_rows - 1
            yield TableChunk(first, piece, done / total if total else 0.0)
            first += piece.num_rows


def _plain(row: Mapping[str, Any]) -> Row:
    return {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    """Nested objects without their null fields: Arrow gives every object of a column the fields of all of them."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
