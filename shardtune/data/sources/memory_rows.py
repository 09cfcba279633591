"""Rows in memory, written to a file of the cache, so that everything else reads files."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image

from shardtune.data.cache_directory import spool
from shardtune.data.encoder import RowError
from shardtune.data.images.images import encode_picture
from shardtune.data.sources.hub import is_dataset
from shardtune.errors import DataError


def is_frame(value: object) -> bool:
    """Whether a value is a `pandas.DataFrame`; without importing that library for those who do not use it."""
    library = sys.modules.get("pandas")
    return library is not None and isinstance(value, library.DataFrame)


def is_table(value: object) -> bool:
    """Whether a value holds rows as a data set or a table does."""
    return is_dataset(value) or is_frame(value)


def records(frame: Any) -> list[dict[str, Any]]:
    """The rows of a `pandas.DataFrame`, without its index; NaN and NA become null.

    Raises:
        DataError: two columns have one name, or a name is no text.
    """
    names = list(frame.columns)
    wrong = [name for name in names if not isinstance(name, str) or names.count(name) > 1]
    if wrong:
        raise DataError(
            f"the column {wrong[0]!r} {'is there twice' if isinstance(wrong[0], str) else 'has no name that is text'}",
            where="the rows in memory: a DataFrame",
            remedy="rename it: frame.columns = […]",
        )
    columns = {name: [_or_none(value) for value in frame[name].tolist()] for name in names}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _or_none(value: object) -> object:
    """The value, or None for one that pandas counts as missing."""
    missing = sys.modules["pandas"].isna(value)
    return None if isinstance(missing, bool | np.bool_) and missing else value


def spool_rows(rows: Iterable[Mapping[str, object]], root: Path) -> Path:
    """Rows from memory as a JSON-lines file in the cache, named by its content; pixels in them become PNG."""

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            for number, row in enumerate(rows, 1):
                try:
                    file.write(json.dumps(row, ensure_ascii=False, default=_as_json) + "\n")
                except (TypeError, ValueError, RecursionError, RowError) as error:
                    raise DataError(
                        f"the row cannot be kept as JSON: {error}",
                        where=f"the rows in memory: row {number:,}",
                        remedy="give text, numbers, lists, dictionaries and images only",
                    ) from error

    return spool(write, ".jsonl", root)


def _as_json(value: object) -> object:
    """Bytes, paths, Pillow images and arrays of pixels, in a form that `shardtune.data.images.images` reads.

    Other arrays of one or two dimensions (a robot's state and actions) become lists.
    """
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.dtype != np.uint8 and value.ndim < 3):
        return value.tolist()
    if isinstance(value, (np.ndarray, Image)):
        return {"bytes": base64.b64encode(encode_picture(value)).decode()}
    raise TypeError(f"{type(value).__name__} has no JSON form")
