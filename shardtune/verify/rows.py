"""The rows of the checks: from the recipe's training data, or the adapter's own examples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardtune.batch import Sample
from shardtune.config import Recipe
from shardtune.data.encoder import Encoder, FrameOptions, Row, RowDropped, RowError, frames_of
from shardtune.data.images.chat_encoder import with_absolute_paths
from shardtune.data.row_files import kind_of, read_rows
from shardtune.data.row_formats import in_format
from shardtune.data.sources.resolve import resolve_sources
from shardtune.data.sources.source import Source, prepare_row
from shardtune.errors import ConfigError, DataError, counted
from shardtune.models.adapter import Adapter

WANTED, FEWEST = 12, 2
LOOKED_AT = 1000
"""The most rows that are read to find usable ones."""


def rows_for(adapter: Adapter, recipe: Recipe) -> list[Row]:
    """The first rows that the adapter can use: of the recipe's training data, or else of its own `examples`.

    Raises:
        ConfigError: there are neither.
        DataError: too few of them can be used; with the first reason.
    """
    encoder = adapter.encoder(with_prompts=False)
    if recipe.data.train_data_paths is not None:
        found, label = _training_rows(recipe, frames_of(encoder)), "data.train_data_paths"
    else:
        found, label = (_plain_row(row) for row in adapter.examples()), f"{type(adapter).__name__}.examples"
    usable: list[Row] = []
    seen, reason = 0, ""
    for row in found:
        seen += 1
        problem = _unusable(encoder, row)
        if problem is None:
            usable.append(row)
        reason = reason or problem or ""
        if len(usable) == WANTED or seen == LOOKED_AT:
            break
    if not seen and recipe.data.train_data_paths is None:
        raise ConfigError(
            f"there are no rows to try {type(adapter).__name__} on",
            where="shardtune verify adapter",
            remedy="name a recipe with data.train_data_paths (shardtune verify adapter file.py:Class recipe.yaml), or "
            "let the adapter's method examples() return a dozen rows",
        )
    if len(usable) < FEWEST:
        raise DataError(
            f"{len(usable)} of the first {counted(seen, 'row')} can be used{': ' + reason if reason else ''}",
            where=label,
            remedy=f"give {FEWEST} usable rows at least, better {WANTED}",
        )
    return usable


def keep_rows(rows: Sequence[Row], folder: Path) -> Path:
    """The rows as a data file: JSON lines, or Parquet where they hold more than JSON can."""
    try:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except (TypeError, ValueError):
        path = folder / "rows.parquet"
        try:
            pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise DataError(
                f"the rows cannot be kept in a file: {error}",
                where="examples",
                remedy="give text, numbers, bytes, lists and dictionaries, the same columns in every row",
            ) from error
        return path
    path = folder / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def kept_rows(file: Path) -> list[Row]:
    """The rows that `keep_rows` wrote, in the form that the encoder takes."""
    found = [row for _, row in read_rows(file, kind_of(file) or "")]
    return [row for row in found if not isinstance(row, RowError)]


def _training_rows(recipe: Recipe, frames: FrameOptions | None) -> Iterator[Row]:
    """Rows in the form that the encoder takes, without those that cannot be read."""
    data = recipe.data
    sources = resolve_sources(
        data.train_data_paths, data, name_format=lambda row: "rows", frames=frames, report=lambda text: None
    )
    for source in sources:
        for file in source.files:
            for _, row in source.rows(file):
                prepared = None if isinstance(row, RowError) else _prepared(row, source)
                if prepared is not None:
                    placed = with_absolute_paths(prepared, file.folder)
                    yield placed if frames is None else _plain_row(placed)


def _prepared(row: Row, source: Source) -> Row | None:
    try:
        prepared = prepare_row(row, source)
        if prepared is not None and source.format is not None:
            return in_format(prepared, source.format)
    except RowError:
        return None
    return prepared


def _unusable(encoder: Encoder, row: Row) -> str | None:
    """Why a row cannot be used; None if it can, or if the checks will find the reason."""
    try:
        fitted = encoder.fit(encoder.encode(row))
        parts = [fitted] if isinstance(fitted, Sample) else fitted
        weights = {name: 1.0 for part in parts for name, weight in encoder.weights(part).items() if weight}
    except RowError as error:
        return error.reason
    except RowDropped as error:
        return f"dropped: {error.reason}"
    except Exception:  # a fault of the adapter, which a check will report
        return None
    return None if any(weights.values()) else "it weighs nothing: it has no target"


def _plain_row(row: Row) -> Row:
    return {key: _plain(value) for key, value in row.items()}


def _plain(value: object) -> object:
    """A value in the form of a data file: arrays as lists."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
