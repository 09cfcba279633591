"""The images of a camera in an episode to be written: pixels, or files and encoded bytes, which stay as they are."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardtune.data.encoder import RowError
from shardtune.data.images.images import ImageKind, StoredImage, decode_image, encode_picture, read_image
from shardtune.errors import DataError

Picture = bytes | str | Path | Mapping[str, Any]
"""One image: encoded bytes, a path, or what `row["images"]` of robot data holds; of a video's frame its pixels are
stored."""
Pictures = np.ndarray | Sequence[Picture]
"""Of T frames: uint8 [T, H, W, 3], RGB, or T images in another form, all of one size."""


def picture_shape(pictures: Pictures, camera: str) -> tuple[int, int, int]:
    """(height, width, 3) of all images of a camera.

    Raises:
        DataError: an image is missing, torn, or of another size than the first.
    """
    if isinstance(pictures, np.ndarray):
        return pictures.shape[1], pictures.shape[2], 3
    sizes = [_read(picture, camera, frame).size for frame, picture in enumerate(pictures)]
    for frame, size in enumerate(sizes):
        if size != sizes[0]:
            raise DataError(
                f"the image is {size[0]} x {size[1]}, the first one {sizes[0][0]} x {sizes[0][1]}",
                where=f"episode: camera {camera!r}, frame {frame}",
                remedy="give images of one size",
            )
    return sizes[0][1], sizes[0][0], 3


def stored_pictures(pictures: Pictures, form: str) -> Iterator[tuple[bytes, str]]:
    """The bytes and the suffix of each image: pixels in the given form, png or jpeg, others as they came."""
    for picture in pictures:
        if isinstance(picture, np.ndarray):
            yield encode_image(picture, form), form
            continue
        stored = read_image(picture, Path.cwd())
        if stored.kind == ImageKind.FRAME:
            yield encode_image(np.asarray(stored.read()), form), form
            continue
        content = Path(stored.content.decode()).read_bytes() if stored.kind == ImageKind.FILE else stored.content
        with Image.open(io.BytesIO(content)) as opened:
            yield content, str(opened.format).lower()


def picture_pixels(pictures: Pictures, frame: int) -> np.ndarray:
    """One image, uint8 [H, W, 3]."""
    picture = pictures[frame]
    return picture if isinstance(picture, np.ndarray) else np.asarray(decode_image(picture, Path.cwd()))


def encode_image(pixels: np.ndarray, form: str) -> bytes:
    """uint8 [H, W, 3] as the bytes of a file; PNG is lossless."""
    if form == "png":
        return encode_picture(pixels)
    sink = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(sink, "JPEG", quality=95, subsampling=0)
    return sink.getvalue()


def _read(picture: Picture, camera: str, frame: int) -> StoredImage:
    try:
        return read_image(picture, Path.cwd())
    except RowError as error:
        raise DataError(
            error.reason,
            where=f"episode: camera {camera!r}, frame {frame}",
            remedy="give encoded bytes, a path, or uint8 [frames, height, width, 3]",
        ) from error
