"""TFRecord files of `tf.train.Example`, read without tensorflow: framing with checksums, and fields of protobuf."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardtune.errors import DataError

_HEAD, _FOOT = 12, 4
_BYTES_LIST, _FLOAT_LIST, _INT_LIST = 1, 2, 3
_COPY = "copy the file completely, or download it again"


def read_records(path: Path, *, check: bool = True) -> Iterator[tuple[memoryview, float]]:
    """The records of a file, and the share of the file that ends with each; only what is used of them is read.

    Args:
        check: compare the checksum of each record, which reads all of it.

    Raises:
        DataError: the file is torn or damaged, or the package for checksums is missing.
    """
    checksum = _checksum()
    size = path.stat().st_size
    if not size:
        return
    with path.open("rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    place = 0
    while place < size:
        head = whole[place : place + _HEAD]
        length = int.from_bytes(head[:8], "little")
        if len(head) < _HEAD or int.from_bytes(head[8:], "little") != _masked(checksum(bytes(head[:8]))):
            raise _damaged(path, place, "its length does not match its checksum, or the file ends there")
        start = place + _HEAD
        record, foot = whole[start : start + length], whole[start + length : start + length + _FOOT]
        if len(foot) < _FOOT:
            raise _damaged(path, place, "the file ends within it")
        if check and int.from_bytes(foot, "little") != _masked(checksum(bytes(record))):
            raise _damaged(path, place, "its content does not match its checksum")
        place = start + length + _FOOT
        yield record, place / size


@dataclass(frozen=True, slots=True)
class Feature:
    """The values of one feature of an example, decoded when they are read. Raises `ValueError` for torn ones.

    Attributes:
        kind: bytes, floats or integers; 0 for none.
        content: the encoded list.
    """

    kind: int
    content: memoryview

    def byte_strings(self) -> list[memoryview]:
        self._require(_BYTES_LIST)
        return [value for number, value in _fields(self.content) if number == 1]

    def numbers(self) -> np.ndarray:
        """float32 or int64 [values]."""
        self._require(_FLOAT_LIST, _INT_LIST)
        packed = [value for number, value in _fields(self.content) if number == 1]
        if self.kind == _FLOAT_LIST:
            return np.frombuffer(b"".join(packed), "<f4")
        return np.concatenate([_varints(one) for one in packed] or [np.empty(0, np.int64)])

    def _require(self, *kinds: int) -> None:
        if self.kind not in (0, *kinds):
            names = {_BYTES_LIST: "bytes", _FLOAT_LIST: "floats", _INT_LIST: "integers"}
            raise ValueError(f"it holds {names.get(self.kind, 'an unknown kind')}")


def example_features(record: memoryview) -> dict[str, Feature]:
    """The features of an example by name. Raises `ValueError` for a record that is none."""
    found: dict[str, Feature] = {}
    for number, features in _fields(record):
        for _, entry in _fields(features) if number == 1 else ():
            name, content = "", memoryview(b"")
            for part, value in _fields(entry):
                if part == 1:
                    name = bytes(value).decode()
                elif part == 2:
                    content = value
            kind, values = next(_fields(content), (0, memoryview(b"")))
            found[name] = Feature(kind, values)
    return found


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The number and the encoded value of each field of a message."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        start = place
        match key & 7:
            case 0:
                _, place = _varint(message, place)
            case 1:
                place += 8
            case 2:
                length, start = _varint(message, place)
                place = start + length
            case 5:
                place += 4
            case other:
                raise ValueError(f"a field has the type {other}, which does not exist")
        if place > len(message):
            raise ValueError("a field goes on behind its end")
        yield key >> 3, message[start:place]


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """A number, and where the next one begins."""
    number = shift = 0
    while place < len(message) and shift < 64:
        byte = message[place]
        number |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return number, place
    raise ValueError("a number has no end")


def _varints(packed: memoryview) -> np.ndarray:
    """int64 [values] of numbers end to end."""
    content = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(content < 128)
    if len(content) and (not len(ends) or ends[-1] != len(content) - 1):
        raise ValueError("a number has no end")
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)[: len(ends)]
    lengths = ends - starts + 1
    values = np.zeros(len(ends), np.uint64)
    for byte in range(int(lengths.max(initial=0))):
        longer = lengths > byte
        values[longer] |= (content[starts[longer] + byte] & 127).astype(np.uint64) << np.uint64(7 * byte)
    return values.view(np.int64)


def _masked(checksum: int) -> int:
    """As TFRecord stores a CRC."""
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _checksum() -> Callable[[bytes], int]:
    try:
        from google_crc32c import value
    except ImportError as error:
        raise DataError(
            "the data are in TFRecord files, and google-crc32c, which checks them, is not installed",
            remedy="pip install 'shardtune[recordings]'",
        ) from error
    return value


def _damaged(path: Path, place: int, what: str) -> DataError:
    return DataError(f"the record at byte {place:,} is torn or damaged: {what}", where=str(path), remedy=_COPY)
