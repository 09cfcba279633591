"""References to images in a frame of robot data."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardtune.config.shown import as_written
from shardtune.data.encoder import RowError
from shardtune.data.images.images import decode_image, encode_picture

ImageRecord = Mapping[str, Any]
"""`{"bytes": …}` (an encoded image), `{"path": …}` or `{"video": …, "seconds": …}`; paths are absolute.
`decode_frame` gives its pixels; `shardtune.data.images.images.read_image` takes it, too."""


def decode_frame(image: ImageRecord) -> np.ndarray:
    """The pixels of a camera's image in a row of robot data, for `encode` of an adapter of your own.

        def encode(self, row):
            pixels = {camera: decode_frame(image) for camera, image in row["images"].items()}

    Args:
        image: a value of `row["images"]`: encoded bytes, a path, or the file and the second of a video's frame.

    Returns:
        uint8 [height, width, 3], RGB.

    Raises:
        RowError: it is missing or cannot be decoded, so that `data.on_bad_row` applies.
    """
    return np.asarray(decode_image(image, Path.cwd()))


def image_record(value: object, folder: Path) -> ImageRecord:
    """An image of a table or a JSON row, in one of the forms of `ImageRecord`.

    Args:
        value: bytes, a path, or a struct: of `bytes` (in JSON as base64 text) and `path`, of `video` and `seconds`, or
            of `pixels`, `height` and `width`, which become PNG.
        folder: where relative paths begin.

    Raises `RowError` for anything else and for a file that is missing.
    """
    if isinstance(value, Mapping):
        if value.get("video") is not None and value.get("seconds") is not None:
            return {"video": _file(value["video"], folder, "video"), "seconds": float(value["seconds"])}
        if isinstance(value.get("pixels"), bytes):
            pixels = np.frombuffer(value["pixels"], np.uint8)
            return {"bytes": encode_picture(pixels.reshape(int(value["height"]), int(value["width"]), 3))}
        value = _content(value["bytes"]) if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes):
        return {"bytes": value}
    if isinstance(value, str) and value:
        return {"path": _file(value, folder, "image")}
    raise RowError(f"an image is {type(value).__name__}, not bytes, a path, or a struct of these")


def _content(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise RowError(f"the bytes of an image are {type(value).__name__}, not bytes or base64 text") from error


def _file(path: str, folder: Path, kind: str) -> str:
    found = (folder / path).absolute()
    if not found.is_file():
        raise RowError(f"the {kind} file {as_written(path)} is missing (looked for {found})")
    return str(found)
