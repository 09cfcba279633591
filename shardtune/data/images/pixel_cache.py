"""Pixels of images stored on disk, as bytes, one file per image, so that none is decoded twice."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from shardtune.data.cache_directory import cache_error
from shardtune.data.checksum import checksum
from shardtune.data.images.images import StoredImage
from shardtune.data.images.pixel_bytes import ImageBytes
from shardtune.data.images.placeholders import AppliedImages

_MAGIC = b"pixels2\n"
_BODY = len(_MAGIC) + 16


class PixelCache:
    """Files `<root>/pixels/<processor>/<2 digits>/<2 digits>/<image>`: 65,536 folders, and no index of them.

    Any number of processes may read and write at once: a file is written under a temporary name and renamed when done.

    Args:
        root: the cache directory.
        key: a hash of the settings that pixels depend on.
    """

    def __init__(self, root: Path, key: str) -> None:
        self._root = root
        self._folder = root / "pixels" / key

    def get(self, name: str) -> ImageBytes | None:
        """The pixels stored under a name; None if there are none, or the file is corrupt or of another image."""
        try:
            content = self._path(name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise cache_error(error, self._root) from error
        try:
            return _read(name, content)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def put(self, name: str, made: ImageBytes) -> None:
        """Store the pixels of an image.

        Raises:
            DataError: the cache cannot be written.
        """
        path = self._path(name)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_bytes(_written(name, made))
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise cache_error(error, self._root) from error

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name[2:4] / name


class PixelReader:
    """From a row's images to a model's inputs, as bytes where these are equivalent.

    Args:
        images: applies the model's processor.
        cache: stores pixels; None: each image is decoded whenever it is read.
    """

    def __init__(self, images: AppliedImages, cache: PixelCache | None) -> None:
        self._images = images
        self._cache = cache

    def inputs(self, stored: Sequence[StoredImage], counts: Sequence[int] | None = None) -> dict[str, torch.Tensor]:
        """The tensors of images, in their order: bytes and their table (`PixelBytes.joined`), or else numbers.

        Args:
            stored: images of all rows.
            counts: how many of them each row has; None: all belong to one row.
        """
        if self._images.pixel_bytes is not None:
            parts = [part for part in map(self._part, stored) if part is not None]
            joined = self._images.pixel_bytes.joined(parts) if len(parts) == len(stored) else None
            if joined is not None:
                return joined
        return self._images.pixels([image.read() for image in stored], counts)

    def _part(self, image: StoredImage) -> ImageBytes | None:
        if self._cache is None:
            return self._images.bytes_of(image.read())
        name = image.key()
        kept = self._cache.get(name)
        if kept is not None:
            return kept
        made = self._images.bytes_of(image.read())
        if made is not None:
            self._cache.put(name, made)
        return made


# -- files -------------------------------------------------------------------------------------------------------------
# Magic bytes, a checksum of the name and the rest, the header's length, the header (JSON), the arrays end to end.


def _written(name: str, made: ImageBytes) -> bytes:
    arrays, header = [made.pixels], {"pixels": list(made.pixels.shape), "further": {}}
    for key, array in made.further.items():
        is_one = not any(array.strides)
        header["further"][key] = [array.dtype.str, list(array.shape), is_one]
        arrays.append(array.reshape(-1)[:1] if is_one else array)
    text = json.dumps(header).encode()
    body = b"".join([len(text).to_bytes(4, "little"), text, *(array.tobytes() for array in arrays)])
    return b"".join([_MAGIC, _sum(name, body), body])


def _sum(name: str, body: bytes | memoryview) -> bytes:
    """The checksum of a file's content, which that of another image does not have."""
    return hashlib.blake2b(f"{name} {checksum(body)}".encode(), digest_size=_BODY - len(_MAGIC)).digest()


def _read(name: str, content: bytes) -> ImageBytes | None:
    if not content.startswith(_MAGIC) or _sum(name, memoryview(content)[_BODY:]) != content[len(_MAGIC) : _BODY]:
        return None
    text_end = _BODY + 4 + _number(content, _BODY)
    header = json.loads(content[_BODY + 4 : text_end])
    place = text_end

    def array(dtype: str, shape: list[int], is_one: bool) -> np.ndarray:
        nonlocal place
        count = 1 if is_one else int(np.prod(shape))
        values = np.frombuffer(content, dtype, count, place)
        place += values.nbytes
        return np.broadcast_to(values[0], shape) if is_one else values.reshape(shape)

    pixels = array("|u1", header["pixels"], False)
    return ImageBytes(pixels, {key: array(*form) for key, form in header["further"].items()})


def _number(content: bytes, place: int) -> int:
    return int.from_bytes(content[place : place + 4], "little")


def pixel_key(settings: Mapping[str, object]) -> str:
    """The name of a folder, a hash of everything that the pixels of an image depend on."""
    return hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
