"""Fingerprints of the files that a user's task reads by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardtune.data.cache_directory import file_digest


def fingerprints(paths: Sequence[str], root: Path) -> list[dict[str, str | None]]:
    """Each path with a hash: of a file's bytes, of the names and sizes of the files in a directory.

    A path that is neither (a name on a hub, a pattern) has none: only the task can resolve it.

    Args:
        paths: as the recipe names them.
        root: of the cache, which remembers the hashes of files that have not changed.
    """
    return [{"file": path, "rows": None, "key": _key(Path(path), root)} for path in paths]


def _key(path: Path, root: Path) -> str | None:
    if path.is_file():
        return file_digest(path, root)
    if not path.is_dir():
        return None
    digest = hashlib.blake2b(digest_size=20)
    for name, size in sorted(_sizes(path)):
        digest.update(f"{name}\0{size}\0".encode())
    return digest.hexdigest()


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    for file in folder.rglob("*"):
        if file.is_file():
            yield str(file.relative_to(folder)), file.stat().st_size
