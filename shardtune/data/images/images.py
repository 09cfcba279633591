"""Images of rows: where each one is, how large it is, and its pixels; bad ones are found before training."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import math
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import SupportsFloat

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from shardtune.config.shown import as_written
from shardtune.data.encoder import RowError, caused_by
from shardtune.data.images.web import fetch
from shardtune.errors import DataError

DATA, ENDS, KINDS = "image_data", "image_ends", "image_kinds"
"""The fields of a sample that hold its images: bytes end to end, where each ends, what they are."""
SIZES, DIGESTS = "image_sizes", "image_digests"
"""The fields of a sample that describe its images when it was read: width and height, hashes of files."""
PROMPT_IMAGES = "prompt_images"
"""The field of a sample with the number of images in its prompt."""
SPANS = "image_spans"
"""The field of a sample with the first token of each image and the one after its last: int32 [images, 2]."""
IMAGE_STOP = "image_stop"
"""The field of a sample with the end of its last image, in tokens; no row is cut before that."""
ROW_TEXT, PROMPT_TEXT, SUFFIX_START = "row_text", "prompt_text", "suffix_start"
"""The fields of a sample that its processor makes inputs of as a whole: its text and its prompt's, UTF-8, and the
character at which the part of the text begins that is to be predicted."""
IMAGE_FIELDS = frozenset(
    (DATA, ENDS, KINDS, SIZES, DIGESTS, PROMPT_IMAGES, SPANS, IMAGE_STOP, ROW_TEXT, PROMPT_TEXT, SUFFIX_START)
)
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF")
"""The formats of images that are read. Pillow knows more, some of which start other programs (EPS: Ghostscript)."""
MOST_PIXELS = 64_000_000
"""The most pixels of an image; decoded, they take 192 MB."""
_PLAIN_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
_DRAFT = (64, 64)
_LONGEST_PATH, _LONGEST_NAME, _SHOWN = 4095, 255, 60
_LARGEST = 255
_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)
# The first characters of base64 text of an image: BMP, GIF, JPEG, PNG, RIFF (WebP), TIFF of both byte orders.
_BASE64_STARTS = ("Qk", "R0lGOD", "/9j/", "iVBORw0KGgo", "UklGR", "SUkq", "TU0A")


class ImageKind(IntEnum):
    """The kind of the bytes of an image in the cache."""

    FILE = 0
    ENCODED = 1
    FRAME = 2
    PIXELS = 3
    """Changed for one step of training, and never in the cache: height x width x 3 bytes."""


FrameReader = Callable[[str, float], Image.Image]


@dataclass(frozen=True, slots=True)
class StoredImage:
    """One image of a row.

    Attributes:
        kind: what `content` is.
        content: the path of a file; an encoded image (PNG, JPEG, …); or the file and the second of a video's frame.
        size: (width, height) as shown, after the rotation of its EXIF data.
        digest: of the bytes of a file; 0: not compared.
    """

    kind: ImageKind
    content: bytes
    size: tuple[int, int]
    digest: int = 0

    def read(self) -> Image.Image:
        """Its pixels, RGB.

        Raises:
            DataError: it has changed since the rows were read.
        """
        try:
            if self.kind == ImageKind.PIXELS:
                return Image.frombytes("RGB", self.size, self.content)
            encoded = _bytes(self.kind, self.content)
            if self.digest and _digest(encoded) != self.digest:
                raise RowError("its file has changed")
            image = _frame(self.content) if self.kind == ImageKind.FRAME else _pixels(encoded)
        except RowError as error:
            raise self._changed(error.reason) from error
        if image.size != self.size:
            raise self._changed(f"it is {_size(image.size)} now")
        return image

    def key(self) -> str:
        """A hash of its content: of a file's bytes when its row was read; the file is not read again.

        Of a video's frame: of the file's name, size and time of change.
        """
        seen: list[object] = [*self.size, self.digest]
        if self.kind == ImageKind.FRAME:
            try:
                status = Path(json.loads(self.content)[0]).stat()
            except OSError as error:
                raise self._changed(f"it cannot be read: {error.strerror}") from error
            seen += [status.st_size, status.st_mtime_ns]
        shown = hashlib.blake2b(json.dumps([int(self.kind), *seen]).encode(), digest_size=16)
        if self.kind != ImageKind.FILE or not self.digest:
            shown.update(self.content)
        return shown.hexdigest()

    def _changed(self, reason: str) -> DataError:
        return DataError(
            f"an image of {_size(self.size)} cannot be read as it was when its row was: {reason}",
            where=_named(self.kind, self.content),
            remedy="put the file back, or let all rows be read again: name another data.cache_dir, or empty this one",
        )


def read_image(value: object, folder: Path, hosts: Sequence[str] = ()) -> StoredImage:
    """Reads and checks an image of a row: it is decoded at a reduced size to check that it is complete.

    Args:
        value: a path (relative to `folder`), a URL, a data URL, the encoded bytes, base64 text, {"bytes": …},
            {"path": …}, {"url": …}, {"base64": …}, a video's frame {"video": path, "seconds": s}, an image of Pillow's
            or uint8 [height, width, 3].
        folder: of the file that contains the row.
        hosts: from which URLs are fetched.

    Raises:
        RowError: it is missing, torn, empty, too large, animated, or of a kind whose colours would change silently.
    """
    try:
        kind, content = _stored(value, folder, hosts)
    except Exception as error:  # of a value that is no reference: a time that is no number, a name that no file has
        raise caused_by(error) from error
    try:
        if kind == ImageKind.FRAME:
            return StoredImage(kind, content, _frame(content).size)
        encoded = _bytes(kind, content)
        return StoredImage(kind, content, _checked_size(encoded), _digest(encoded) if kind == ImageKind.FILE else 0)
    except Exception as error:
        raise RowError(f"image {_named(kind, content)}: {caused_by(error).reason}") from error


def decode_image(value: object, folder: Path, hosts: Sequence[str] = ()) -> Image.Image:
    """The pixels of an image of a row, RGB, as `read_image(…).read()` gives them, decoded once.

    Args:
        value, folder, hosts: as `read_image` has them.

    Raises:
        RowError: as `read_image`.
    """
    try:
        kind, content = _stored(value, folder, hosts)
    except Exception as error:
        raise caused_by(error) from error
    try:
        return _frame(content) if kind == ImageKind.FRAME else _pixels(_bytes(kind, content), check=True)
    except Exception as error:
        raise RowError(f"image {_named(kind, content)}: {caused_by(error).reason}") from error


def encode_picture(picture: Image.Image | np.ndarray) -> bytes:
    """Pixels in memory as PNG, which is lossless; an array is uint8 [height, width, 3] or [height, width].

    Raises:
        RowError: it is no such array, or of a kind that `read_image` refuses.
    """
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or not (picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] in (3, 4))):
            raise RowError(
                f"an image is an array of {picture.dtype} {list(picture.shape)}, not uint8 [height, width, 3]"
            )
        if not picture.size:
            raise RowError(f"an image is {_size((picture.shape[1], picture.shape[0]))}")
        picture = Image.fromarray(np.ascontiguousarray(picture))
    _check_kind(picture)
    sink = io.BytesIO()
    try:
        shown = ImageOps.exif_transpose(picture)
        (shown.convert("RGBA") if shown.mode == "PA" else shown).save(sink, "PNG", compress_level=1)
    except Exception as error:  # Pillow reads a file's pixels lazily
        raise RowError(f"an image in memory cannot be read: {error}") from error
    return sink.getvalue()


def to_fields(images: Sequence[StoredImage], in_prompt: int) -> dict[str, np.ndarray]:
    """The images of a row as fields of its sample; the first `in_prompt` of them belong to its prompt."""
    contents = [np.frombuffer(image.content, np.uint8) for image in images]
    return {
        DATA: np.concatenate([*contents, np.empty(0, np.uint8)]),
        ENDS: np.cumsum([len(content) for content in contents], dtype=np.int64),
        KINDS: np.array([image.kind for image in images], np.uint8),
        SIZES: np.array([image.size for image in images], np.int32).reshape(-1, 2),
        DIGESTS: np.array([image.digest for image in images], np.int64),
        PROMPT_IMAGES: np.array(in_prompt, np.int32),
    }


def from_fields(fields: Mapping[str, np.ndarray]) -> list[StoredImage]:
    """The images of a row, of the fields of its sample."""
    ends = fields[ENDS].tolist()
    columns = (fields[KINDS], [0, *ends][:-1], ends, fields[SIZES], fields[DIGESTS])
    return [
        StoredImage(ImageKind(kind), fields[DATA][start:end].tobytes(), (int(size[0]), int(size[1])), int(digest))
        for kind, start, end, size, digest in zip(*columns, strict=True)
    ]


# -- references in rows --------------------------------------------------------------------------------------------


def _stored(value: object, folder: Path, hosts: Sequence[str]) -> tuple[ImageKind, bytes]:
    if isinstance(value, Mapping):
        return _of_mapping(value, folder, hosts)
    if isinstance(value, bytes | bytearray | memoryview):
        return ImageKind.ENCODED, bytes(value)
    if isinstance(value, np.ndarray | Image.Image):
        flat = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1
        return ImageKind.ENCODED, value.tobytes() if flat else encode_picture(value)
    if isinstance(value, Path):
        return _file(value, folder)
    if not isinstance(value, str):
        raise RowError(f"an image is {type(value).__name__}, not a path, URL, bytes or base64 text")
    if not value.strip():
        raise RowError("an image is an empty text, not a path, URL, bytes or base64 text")
    if value[:5].lower() == "data:":
        return ImageKind.ENCODED, _of_data_url(value)
    if value.startswith(("http://", "https://")):
        return ImageKind.ENCODED, fetch(value, hosts)
    if value.startswith("file:"):
        return _file(Path(urllib.request.url2pathname(urllib.parse.urlsplit(value).path)), folder)
    if value.startswith(_BASE64_STARTS) and not _is_file(folder / value):
        return ImageKind.ENCODED, _base64(value)
    return _file(Path(value), folder)


# Beside the image itself: its name, and what data sets note of it.
_NOTES = ("type", "path", "name", "filename", "file_name", "format", "mode", "size", "width", "height", "id")
_SOURCES = ("bytes", "path", "url", "image", "base64", "video")
_OF_REFERENCES = (*_SOURCES, "seconds")


def _check_keys(value: Mapping[str, object]) -> None:
    """Refuse keys of a reference that would have no effect, such as limits of its size."""
    is_frame = value.get("video") is not None
    if value.get("seconds") not in (None, "") and not is_frame:
        raise RowError("an image has seconds and no video: the frame of a video is {video, seconds}")
    for key, given in value.items():
        as_ever = key == "detail" and given == "auto"
        if key not in (*_NOTES, *_OF_REFERENCES) and not as_ever and given not in (None, "", []):
            why = "an image is as large as the processor makes it (preprocessor_config.json of the model)"
            raise RowError(
                f"an image has {key!r} ({given!r:.40}), which is not read: "
                f"{'a frame has video and seconds alone' if is_frame else why}; data.transform leaves the key out"
            )


def _check_sources(value: Mapping[str, object]) -> None:
    """Refuse a second image; beside the image itself a path is its name."""
    given = [
        key for key in _SOURCES if value.get(key) is not None and not (isinstance(value[key], str) and not value[key])
    ]
    if len(given) == 2 and "path" in given and {"bytes", "base64"} & {*given}:
        return
    if len(given) > 1:
        raise RowError(f"an image has {given[0]} and {given[1]}; data.transform leaves one out")


def _of_mapping(value: Mapping[str, object], folder: Path, hosts: Sequence[str]) -> tuple[ImageKind, bytes]:
    if any(value.get(key) is not None for key in _OF_REFERENCES):
        _check_keys(value)
        _check_sources(value)
    if value.get("video") is not None:
        file = str((folder / str(value["video"])).absolute())
        return ImageKind.FRAME, json.dumps([file, _seconds(value.get("seconds"))]).encode()
    encoded = value.get("base64")
    if isinstance(encoded, str):
        return ImageKind.ENCODED, _base64(encoded)
    for key in ("bytes", "path", "url", "image"):
        if value.get(key) is not None:
            inner = value[key]
            if key == "bytes" and isinstance(inner, str):
                return ImageKind.ENCODED, _base64(inner)
            return _stored(inner, folder, hosts)
    raise RowError(
        f"an image names none of bytes, path, url, base64 and video (its keys: {', '.join(map(str, value))})"
    )


def _seconds(value: object) -> float:
    """The time of a video's frame."""
    if value is None:
        raise RowError("an image names a video and no seconds: an image is one frame of it, {video, seconds}")
    try:
        seconds = float(value) if isinstance(value, str | SupportsFloat) else math.nan
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise RowError(f"the time of a video's frame is {value!r:.40}, not a number of seconds")
    return seconds


def _file(path: Path, folder: Path) -> tuple[ImageKind, bytes]:
    place = (folder / path.expanduser()).absolute()
    if not _is_file(place):
        if len(str(path)) > _LONGEST_PATH or max(map(len, path.parts), default=0) > _LONGEST_NAME:
            start = as_written(str(path)[:_SHOWN])
            raise RowError(f"the image {start}… is no path of a file, and no base64 text of an image")
        raise RowError(f"the image {as_written(path)} does not exist (looked for {place})")
    return ImageKind.FILE, str(place).encode()


def _is_file(place: Path) -> bool:
    try:
        return place.is_file()
    except OSError:  # the name is too long
        return False


def _of_data_url(url: str) -> bytes:
    head, _, body = url.partition(",")
    return _base64(body) if head.endswith(";base64") else urllib.parse.unquote_to_bytes(body)


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"an image is no valid base64 text ({error}): {text[:40]!r}…") from error


# -- pixels --------------------------------------------------------------------------------------------------------


def _bytes(kind: ImageKind, content: bytes) -> bytes:
    """The encoded image; empty for a video's frame."""
    if kind != ImageKind.FILE:
        return content if kind == ImageKind.ENCODED else b""
    try:
        return Path(content.decode()).read_bytes()
    except OSError as error:
        raise RowError(f"it cannot be read: {error.strerror}") from error


def _digest(encoded: bytes) -> int:
    """A hash that is never 0."""
    found = hashlib.blake2b(encoded, digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True) or 1


def _opened(encoded: bytes) -> Image.Image:
    if not encoded:
        raise RowError("it is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `MOST_PIXELS` is the lower bound
            return Image.open(io.BytesIO(encoded), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise RowError(f"it is too large: {error}") from error
    except UnidentifiedImageError as error:
        raise RowError(f"it is not an image that Pillow can read as {', '.join(FORMATS)}") from error
    except Exception as error:
        raise _torn(error) from error


def _torn(error: Exception) -> RowError:
    """Pillow's decoders may raise anything for unexpected bytes."""
    return RowError(f"it is torn: {error or type(error).__name__}")


def _checked_size(encoded: bytes) -> tuple[int, int]:
    """(width, height) of an image that can be decoded to its end."""
    with _opened(encoded) as image:
        _check_kind(image)
        whole = image.size
        try:
            if image.format != "JPEG":
                return _as_shown(image).size
            image.draft("RGB", _DRAFT)  # at an eighth of the size, but to the end of the file
            _as_shown(image)
            return (whole[1], whole[0]) if image.getexif().get(_ORIENTATION, 1) in _TURNED else whole
        except Exception as error:
            raise _torn(error) from error


def _check_kind(image: Image.Image) -> None:
    if 0 in image.size:
        raise RowError(f"it is {_size(image.size)}")
    if image.width * image.height > MOST_PIXELS:
        raise RowError(
            f"it has {image.width * image.height / 1e6:,.0f} million pixels, more than {MOST_PIXELS / 1e6:g}"
        )
    frames = getattr(image, "n_frames", 1)  # Pillow sets it only for formats that may have several
    if frames > 1 and image.format != "MPO":  # phones add a smaller picture to a JPEG
        raise RowError(f"it is animated ({frames} frames); choose one")
    if image.mode not in _PLAIN_MODES:
        kinds = {"CMYK": "in CMYK", "F": "of floating numbers", "LAB": "in Lab"}
        what = kinds.get(image.mode, f"16-bit ({image.mode})" if image.mode.startswith("I") else f"in {image.mode}")
        raise RowError(f"it is {what}, which has no exact RGB form of 8 bits; convert it")
    if _is_deep(image):  # Pillow opens coloured ones as RGB, and leaves out half of the bits
        raise RowError(f"it is 16-bit (a {image.format} file), which has no exact RGB form of 8 bits; convert it")


def _is_deep(image: Image.Image) -> bool:
    """Whether the file of an image whose pixels are not read yet has more than 8 bits for a colour."""
    if not isinstance(image, ImageFile.ImageFile):
        return False
    given = [part.args if isinstance(part.args, tuple) else (part.args,) for part in image.tile]
    if image.format == "PPM":  # (mode, largest value)
        return any(isinstance(value, int) and value > _LARGEST for args in given for value in args[1:2])
    return any(isinstance(args[0], str) and ";16" in args[0] and "BGR" not in args[0] for args in given if args)


def _pixels(encoded: bytes, *, check: bool = False) -> Image.Image:
    with _opened(encoded) as image:
        if check:
            _check_kind(image)
        try:
            return _as_shown(image)
        except Exception as error:
            raise _torn(error) from error


def _as_shown(image: Image.Image) -> Image.Image:
    """RGB, rotated by its EXIF data; transparent pixels keep their colour."""
    image.load()
    turned = ImageOps.exif_transpose(image)
    return (turned.convert("RGBA") if "transparency" in turned.info else turned).convert("RGB")


def _frame(content: bytes) -> Image.Image:
    """The frame of a video at a time."""
    from shardtune.data.images.video_frame import read_frame  # PyAV, which is an extra

    path, seconds = json.loads(content)
    return read_frame(path, seconds).convert("RGB")


def _named(kind: ImageKind, content: bytes) -> str:
    if kind == ImageKind.ENCODED:
        return f"of {len(content):,} bytes"
    return content.decode()


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
