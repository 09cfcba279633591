"""Files that may be compressed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from pathlib import Path
from typing import Any

from shardtune.data.files import arrow as pa

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


def open_uncompressed(path: Path) -> Any:
    """The file's bytes, uncompressed, as a file to read from."""
    match path.suffix.lower():
        case ".gz":
            return gzip.open(path, "rb")
        case ".bz2":
            return bz2.open(path, "rb")
        case ".xz":
            return lzma.open(path, "rb")
        case ".zst":
            return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def content_of(path: Path) -> bytes:
    with open_uncompressed(path) as file:
        return file.read()
