"""Rows in memory, written to a file of the cache, so that everything else reads files."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from PIL.Image import Image

from shardtune.data.cache_directory import spool
from shardtune.data.encoder import RowError
from shardtune.data.images.images import encode_picture
from shardtune.errors import DataError


def spool_rows(rows: Iterable[Mapping[str, object]], root: Path) -> Path:
    """Rows from memory as a JSON-lines file in the cache, named by its content; pixels in them become PNG."""

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            for number, row in enumerate(rows, 1):
                try:
                    file.write(json.dumps(row, ensure_ascii=False, default=_as_json) + "\n")
                except (TypeError, ValueError, RowError) as error:
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
