"""Images of rows: where each one is, how large it is, and its pixels; bad ones are found before training."""

from __future__ import annotations

import base64
import binascii
import io
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from shardtune.data.encoder import RowError
from shardtune.errors import DataError

DATA, ENDS, KINDS, SIZES = "image_data", "image_ends", "image_kinds", "image_sizes"
"""The fields of a sample that hold its images: bytes end to end, where each ends, what they are, width and height."""
PROMPT_IMAGES = "prompt_images"
"""The field of a sample that says how many of its images belong to its prompt."""
MOST_PIXELS = 64_000_000
"""Of an image; decoded, that many take 192 MB."""
_TIMEOUT = 30.0
_PLAIN_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
_DRAFT = (64, 64)


class ImageKind(IntEnum):
    """What the bytes of an image in the cache are."""

    FILE = 0
    ENCODED = 1
    FRAME = 2


FrameReader = Callable[[str, float], Image.Image]


@dataclass(frozen=True, slots=True)
class StoredImage:
    """One image of a row.

    Attributes:
        kind: what `content` is.
        content: the path of a file; an encoded image (PNG, JPEG, …); or the file and the second of a video's frame.
        size: (width, height) as it is shown, after the rotation that its EXIF data asks for.
    """

    kind: ImageKind
    content: bytes
    size: tuple[int, int]

    def read(self) -> Image.Image:
        """Its pixels, RGB.

        Raises:
            DataError: it is no longer what it was when the rows were read.
        """
        try:
            image = _pixels(self.kind, self.content)
        except (OSError, RowError) as error:
            raise self._changed(str(error)) from error
        if image.size != self.size:
            raise self._changed(f"it is {_size(image.size)} now")
        return image

    def _changed(self, reason: str) -> DataError:
        return DataError(
            f"an image of {_size(self.size)} cannot be read as it was when its row was: {reason}",
            where=_named(self.kind, self.content),
            remedy="put the file back, or change the data file, so that its rows are read again",
        )


def read_image(value: Any, folder: Path) -> StoredImage:
    """An image as rows name it, looked at once: it is decoded as far as it takes to know that it is whole.

    Args:
        value: a path (relative to `folder`), a URL, a data URL, the encoded bytes, base64 text, {"bytes": …},
            {"path": …}, {"url": …}, {"base64": …}, or a video's frame {"video": path, "seconds": s}.
        folder: of the file that the row stands in.

    Raises:
        RowError: it is missing, torn, empty, too large, animated, or of a kind whose colours would change silently.
    """
    kind, content = _stored(value, folder)
    try:
        return StoredImage(kind, content, _checked_size(kind, content))
    except RowError as error:
        raise RowError(f"image {_named(kind, content)}: {error.reason}") from error


def to_fields(images: Sequence[StoredImage], in_prompt: int) -> dict[str, np.ndarray]:
    """The images of a row as fields of its sample; the first `in_prompt` of them belong to its prompt."""
    contents = [np.frombuffer(image.content, np.uint8) for image in images]
    return {
        DATA: np.concatenate([*contents, np.empty(0, np.uint8)]),
        ENDS: np.cumsum([len(content) for content in contents], dtype=np.int64),
        KINDS: np.array([image.kind for image in images], np.uint8),
        SIZES: np.array([image.size for image in images], np.int32).reshape(-1, 2),
        PROMPT_IMAGES: np.array(in_prompt, np.int32),
    }


def from_fields(fields: Mapping[str, np.ndarray]) -> list[StoredImage]:
    """The images of a row, of the fields of its sample."""
    ends = fields[ENDS].tolist()
    return [
        StoredImage(ImageKind(kind), fields[DATA][start:end].tobytes(), (int(width), int(height)))
        for kind, start, end, (width, height) in zip(
            fields[KINDS].tolist(), [0, *ends][:-1], ends, fields[SIZES].tolist(), strict=True
        )
    ]


# -- what rows say -------------------------------------------------------------------------------------------------


def _stored(value: Any, folder: Path) -> tuple[ImageKind, bytes]:
    if isinstance(value, Mapping):
        return _of_mapping(value, folder)
    if isinstance(value, bytes | bytearray | memoryview):
        return ImageKind.ENCODED, bytes(value)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1:
        return ImageKind.ENCODED, value.tobytes()
    if isinstance(value, Path):
        return _file(value, folder)
    if not isinstance(value, str):
        raise RowError(f"an image is {type(value).__name__}, not a path, URL, bytes or base64 text")
    if value.startswith("data:"):
        return ImageKind.ENCODED, _base64(value.partition(",")[2])
    if value.startswith(("http://", "https://")):
        return ImageKind.ENCODED, _fetched(value)
    if value.startswith("file://"):
        value = value.removeprefix("file://")
    if len(value) > 512 and not (folder / value[:255]).exists():
        return ImageKind.ENCODED, _base64(value)
    return _file(Path(value), folder)


def _of_mapping(value: Mapping[str, Any], folder: Path) -> tuple[ImageKind, bytes]:
    if value.get("video") is not None:
        file = str((folder / str(value["video"])).absolute())
        return ImageKind.FRAME, json.dumps([file, float(value.get("seconds", 0.0))]).encode()
    if isinstance(value.get("base64"), str):
        return ImageKind.ENCODED, _base64(value["base64"])
    for key in ("bytes", "path", "url", "image"):
        if value.get(key) is not None:
            inner = value[key]
            if key == "bytes" and isinstance(inner, str):
                return ImageKind.ENCODED, _base64(inner)
            return _stored(inner, folder)
    raise RowError(
        f"an image names none of bytes, path, url, base64 and video (its keys: {', '.join(map(str, value))})"
    )


def _file(path: Path, folder: Path) -> tuple[ImageKind, bytes]:
    place = (folder / path.expanduser()).absolute()
    if not place.is_file():
        raise RowError(f"the image {str(path)!r} does not exist (looked for {place})")
    return ImageKind.FILE, str(place).encode()


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"an image is neither a path nor base64: {text[:40]!r}…") from error


def _fetched(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:
            return answer.read()
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise RowError(f"the image {url} cannot be fetched: {error}") from error


# -- pixels --------------------------------------------------------------------------------------------------------


def _opened(kind: ImageKind, content: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(content) if kind == ImageKind.ENCODED else content.decode())
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RowError(f"it is too large: {error}") from error
    except UnidentifiedImageError as error:
        raise RowError("it is empty" if not content else "it is no image that Pillow knows") from error
    except OSError as error:
        raise RowError(f"it cannot be read: {error}") from error


def _checked_size(kind: ImageKind, content: bytes) -> tuple[int, int]:
    """(width, height) of an image that can be decoded to its end."""
    if kind == ImageKind.FRAME:
        return _frame(content).size
    if not content or (kind == ImageKind.FILE and not Path(content.decode()).stat().st_size):
        raise RowError("it is empty")
    with _opened(kind, content) as image:
        _check_kind(image)
        size = image.size
        orientation = image.getexif().get(0x0112, 1)
        try:
            if image.format == "JPEG":
                image.draft("RGB", _DRAFT)  # at an eighth of the size, but to its end
            image.load()
        except (OSError, SyntaxError, ValueError) as error:
            raise RowError(f"it is torn: {error}") from error
    return (size[1], size[0]) if orientation in (5, 6, 7, 8) else size


def _check_kind(image: Image.Image) -> None:
    if 0 in image.size:
        raise RowError(f"it is {_size(image.size)}")
    if image.width * image.height > MOST_PIXELS:
        raise RowError(
            f"it has {image.width * image.height / 1e6:,.0f} million pixels, more than {MOST_PIXELS / 1e6:g}"
        )
    if getattr(image, "n_frames", 1) > 1:
        raise RowError(f"it is animated ({image.n_frames} frames); choose one")  # pyright: ignore[reportAttributeAccessIssue]
    if image.mode not in _PLAIN_MODES:
        kinds = {"CMYK": "in CMYK", "F": "of floating numbers", "LAB": "in Lab"}
        what = kinds.get(image.mode, f"16-bit ({image.mode})" if image.mode.startswith("I") else f"in {image.mode}")
        raise RowError(f"it is {what}, which has no exact RGB form of 8 bits; convert it")


def _pixels(kind: ImageKind, content: bytes) -> Image.Image:
    if kind == ImageKind.FRAME:
        return _frame(content)
    with _opened(kind, content) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def _frame(content: bytes) -> Image.Image:
    """The frame of a video at a time."""
    from shardtune.data.robot.video import read_frame  # PyAV, which is an extra

    path, seconds = json.loads(content)
    return read_frame(path, seconds).convert("RGB")


def _named(kind: ImageKind, content: bytes) -> str:
    if kind == ImageKind.ENCODED:
        return f"of {len(content):,} bytes"
    return content.decode()


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
