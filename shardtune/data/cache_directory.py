"""The cache directory: its path, whether it is writable, and hashes of the files it was made from."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardtune.data.checksum import is_sealed, sealed
from shardtune.errors import DataError, printable

# A file changed this recently may change again without its time stamp moving, so its hash is not remembered.
_SETTLED_SECONDS = 2.0


def print_line(text: str) -> None:
    """The default report: one line on the error stream."""
    print(printable(text), file=sys.stderr, flush=True)


def cache_root(cache_dir: str | Path | None) -> Path:
    """`data.cache_dir`, or the user's cache directory: `$XDG_CACHE_HOME/shardtune` or `~/.cache/shardtune`."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shardtune"


def writable(folder: Path) -> Path:
    """The folder, made if need be. Raises `DataError` where nothing can be written into it."""
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise cache_error(error, folder) from error
    return folder


def cache_error(error: OSError, folder: Path) -> DataError:
    """The error for a failed write into the cache."""
    return DataError(
        f"the data cache cannot be written: {error.strerror or error}",
        where=str(folder),
        remedy="set data.cache_dir to a directory that is writable and has room",
    )


def file_digest(path: Path, root: Path) -> str:
    """The hash of a file's bytes; remembered in the cache, so that an unchanged file is read once."""

    def read() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()

    status = path.stat()
    return _remembered(str(path.absolute()), _facts(status), [status], root, read)


def files_digest(folder: Path, files: Sequence[Path], root: Path) -> str:
    """The hash of the names and bytes of many files below a folder; remembered as one, and each by itself."""
    states = [file.stat() for file in files]
    names = [str(file)[len(str(folder)) :] for file in files]
    seen = [[name, *_facts(status)] for name, status in zip(names, states, strict=True)]
    whole = hashlib.blake2b(json.dumps(seen).encode(), digest_size=20).hexdigest()

    def read() -> str:
        content = [[name, file_digest(file, root)] for name, file in zip(names, files, strict=True)]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=20).hexdigest()

    return _remembered(f"{folder.absolute()}/*", [whole], states, root, read)


def _facts(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _remembered(
    name: str, seen: list[Any], states: Sequence[os.stat_result], root: Path, read: Callable[[], str]
) -> str:
    """A hash that was read when files looked as they do now, or that is read."""
    memo = root / "hashes" / (hashlib.blake2b(name.encode(), digest_size=20).hexdigest() + ".json")
    with suppress(OSError, ValueError, KeyError, TypeError):
        remembered = json.loads(memo.read_text())
        if is_sealed(remembered) and remembered["seen"] == seen:
            return remembered["digest"]
    digest = read()
    newest = max((max(status.st_mtime, status.st_ctime) for status in states), default=0.0)
    if time.time() - newest > _SETTLED_SECONDS:
        with suppress(OSError):
            memo.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(memo, json.dumps(sealed({"seen": seen, "digest": digest})).encode())
    return digest


def content_size(path: Path) -> int:
    """The bytes of a file, or of all files below a directory."""
    if not path.is_dir():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a small file so that readers get the old or the new content, never a part."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def spool(write: Callable[[Path], object], suffix: str, root: Path) -> Path:
    """The file that `write` makes, stored in the cache under the hash of its content."""
    folder = writable(root / "spool")
    partial = folder / f".{uuid.uuid4().hex}.tmp"
    try:
        write(partial)
        with partial.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()
        target = folder / f"{digest}{suffix}"
        partial.replace(target)
    except OSError as error:
        raise cache_error(error, folder) from error
    finally:
        partial.unlink(missing_ok=True)
    return target
