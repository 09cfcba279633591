"""Checksums, which reveal damage on the disk: a bit that flipped, a file of another run, a torn file.

The hash is XXH3 of 128 bits: it computes several times as fast as a disk writes, and two contents of one length differ
in it but for a chance of 1 in 10^38. It protects from accidents, not from somebody who forges a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import xxhash

SEAL = "checksum"
"""The key of a JSON document under which its own checksum is."""
BLOCK_BYTES = 1 << 20

Parts = list[tuple[int, str]]
"""A file as consecutive parts: the bytes of each and their checksum. Most files are one part."""


def checksum(content: bytes | bytearray | memoryview) -> str:
    """The checksum of some bytes, as hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(content)


def file_parts(path: Path) -> Parts:
    """A file as one part. Raises `OSError` if it cannot be read."""
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        return [(size, _sum_of(stream, size))]


def size_fault(path: Path, parts: Parts) -> str | None:
    """What is wrong with a file by its size alone; None if it has the right one."""
    expected = sum(size for size, _ in parts)
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "is missing"
    except OSError as problem:
        return f"cannot be read: {problem.strerror}"
    return None if size == expected else f"has {size:,} bytes instead of {expected:,}: it is torn"


def content_fault(path: Path, parts: Parts) -> str | None:
    """What is wrong with a file; reads all of it. None if it is what was written."""
    fault = size_fault(path, parts)
    if fault is not None:
        return fault
    try:
        with path.open("rb") as stream:
            for start, size, digest in _placed(parts):
                if _sum_of(stream, size) != digest:
                    where = "" if len(parts) == 1 else f" in bytes {start:,} to {start + size:,}"
                    return f"has another content than was written{where}: its checksum differs"
    except OSError as problem:
        return f"cannot be read: {problem.strerror}"
    return None


def read_parts(stored: Sequence[Sequence[object]]) -> Parts:
    """Parts as JSON has them. Raises `ValueError` or `TypeError` for anything else."""
    return [(int(str(size)), str(digest)) for size, digest in stored]


def sealed(document: Mapping[str, object]) -> dict[str, object]:
    """A JSON document with its own checksum."""
    # Through JSON once more, so that tuples and keys are what a reader of the file has.
    content = json.loads(json.dumps({key: value for key, value in document.items() if key != SEAL}))
    return {**content, SEAL: checksum(_canonical(content))}


def is_sealed(document: Mapping[str, object]) -> bool:
    """Whether a JSON document has a checksum of its own; documents of earlier versions have none.

    Raises:
        ValueError: it has one that is not that of its content.
    """
    if SEAL not in document:
        return False
    if checksum(_canonical({key: value for key, value in document.items() if key != SEAL})) != document[SEAL]:
        raise ValueError("its content has changed since it was written: its checksum differs")
    return True


def _canonical(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _placed(parts: Parts) -> Iterator[tuple[int, int, str]]:
    start = 0
    for size, digest in parts:
        yield start, size, digest
        start += size


def _sum_of(stream: IO[bytes], size: int) -> str:
    found = xxhash.xxh3_128()
    while size:
        block = stream.read(min(size, BLOCK_BYTES))
        if not block:
            break  # it has become shorter meanwhile
        found.update(block)
        size -= len(block)
    return found.hexdigest()
