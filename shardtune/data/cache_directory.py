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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardtune.data.checksum import is_sealed, sealed
from shardtune.data.durable import naming
from shardtune.data.own_files import tag_cache
from shardtune.errors import DataError, printable

T = TypeVar("T")

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


def cache_folder(root: Path, name: str) -> Path:
    """A folder of the cache, made if need be, and the cache marked as one. Raises `DataError` as `writable` does."""
    folder = writable(root / name)
    with suppress(OSError):
        tag_cache(root)
    return folder


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

    return _remembered(_DIGESTS, str(path.absolute()), [path.stat()], root, read)


def known_digest(path: Path, root: Path) -> str | None:
    """The hash of a file's bytes, if the cache remembers it; the file is not read."""
    found = _recall(_memo(_DIGESTS, str(path.absolute()), root), _DIGESTS, _facts(path.stat()))
    return None if found is None else str(found)


def row_count(path: Path, kind: str, root: Path, count: Callable[[], int]) -> int:
    """How many rows `count` finds in a file; remembered in the cache like `file_digest`.

    Args:
        kind: of the file, and whatever else the number depends on.
    """
    return int(_remembered(_ROW_COUNTS, f"{path.absolute()} {kind}", [path.stat()], root, count))


def files_digest(folder: Path, files: Sequence[Path], root: Path) -> str:
    """The hash of the names and bytes of many files below a folder; remembered as one, and each by itself."""
    states = [file.stat() for file in files]
    names = [str(file)[len(str(folder)) :] for file in files]
    seen = [[name, *_facts(status)] for name, status in zip(names, states, strict=True)]
    whole = hashlib.blake2b(json.dumps(seen).encode(), digest_size=20).hexdigest()

    def read() -> str:
        content = [[name, file_digest(file, root)] for name, file in zip(names, files, strict=True)]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=20).hexdigest()

    return _remembered(_DIGESTS, f"{folder.absolute()}/*", states, root, read, seen=[whole])


def _facts(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


@dataclass(frozen=True, slots=True)
class _Memos:
    """Values of files that the cache remembers: the folder they are in, and the key of the value."""

    folder: str
    key: str


_DIGESTS, _ROW_COUNTS = _Memos("hashes", "digest"), _Memos("row_counts", "rows")


def _memo(memos: _Memos, name: str, root: Path) -> Path:
    return root / memos.folder / (hashlib.blake2b(name.encode(), digest_size=20).hexdigest() + ".json")


def _recall(memo: Path, memos: _Memos, seen: list[Any]) -> Any:
    """The value that was read when files looked as they do now; None if there is none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        remembered = json.loads(memo.read_text())
        if is_sealed(remembered) and remembered["seen"] == seen:
            return remembered[memos.key]
    return None


def _remembered(
    memos: _Memos,
    name: str,
    states: Sequence[os.stat_result],
    root: Path,
    read: Callable[[], T],
    seen: list[Any] | None = None,
) -> T:
    """A value that was read when files looked as they do now, or that is read."""
    facts = _facts(states[0]) if seen is None else seen
    memo = _memo(memos, name, root)
    value = _recall(memo, memos, facts)
    if value is not None:
        return value
    value = read()
    newest = max((max(status.st_mtime, status.st_ctime) for status in states), default=0.0)
    if time.time() - newest > _SETTLED_SECONDS:
        with suppress(OSError):
            memo.parent.mkdir(parents=True, exist_ok=True)
            tag_cache(root)
            # A torn one has another checksum, so there is no need to wait for the disk: 5 ms a file.
            write_atomically(memo, json.dumps(sealed({"seen": facts, memos.key: value})).encode(), sync=False)
    return value


def content_size(path: Path) -> int:
    """The bytes of a file, or of all files below a directory."""
    if not path.is_dir():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def write_atomically(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Writes a small file so that readers get the old or the new content, never a part.

    Args:
        sync: wait until it is on the disk; without that, a machine that loses power may leave a part of it.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with naming(path), partial.open("wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def spool(write: Callable[[Path], object], suffix: str, root: Path) -> Path:
    """The file that `write` makes, stored in the cache under the hash of its content."""
    folder = cache_folder(root, "spool")
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
