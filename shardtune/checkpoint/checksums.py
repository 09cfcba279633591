"""`checksums.json` of a directory: the size and checksum of every file in it, taken while the files were written."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from shardtune.checkpoint.atomic import read_json, write_json
from shardtune.data.checksum import Parts, content_fault, file_parts, is_sealed, read_parts, sealed, size_fault
from shardtune.errors import CheckpointError

CHECKSUMS = "checksums.json"
FILES = "files"
SMALL_BYTES = 64 << 20
_SHARD = re.compile(r"shard-(\d+)-.*")


def add_checksums(folder: Path, files: Mapping[str, Parts], *, durably: bool = True) -> None:
    """Add files to a directory's checksums, or replace theirs.

    Args:
        folder: the directory.
        files: their sizes and checksums.
        durably: wait until they are on the disk; False where the directory is synced as a whole.
    """
    known = read_checksums(folder) or {}
    write_json(folder / CHECKSUMS, sealed({FILES: {**known, **files}}), durably=durably)


def complete_checksums(folder: Path, known: Mapping[str, Parts]) -> None:
    """Record every file of a directory; those whose checksum is not known are read.

    Args:
        folder: the directory; what its `checksums.json` has of it already is kept.
        known: of further files.
    """
    before = {**known, **(read_checksums(folder) or {})}
    files = {name: before.get(name) or file_parts(folder / name) for name in relative_files(folder)}
    write_json(folder / CHECKSUMS, sealed({FILES: files}))


def read_checksums(folder: Path) -> dict[str, Parts] | None:
    """The checksums of a directory; None if it has none.

    Raises:
        CheckpointError: they are damaged.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        return None
    try:
        document = read_json(path)
        if not is_sealed(document):
            raise ValueError("it has no checksum of its own")
        return {name: read_parts(parts) for name, parts in document[FILES].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise CheckpointError(f"{CHECKSUMS} is damaged: {problem}", where=str(path)) from problem


def sum_of_checksums(folder: Path) -> str | None:
    """The checksum of a directory's `checksums.json`, by which another directory's is told apart; None without one."""
    try:
        return file_parts(folder / CHECKSUMS)[0][1]
    except OSError:
        return None


def unlike_written(folder: Path, recorded: str | None) -> str | None:
    """How a directory differs, at a look, from the one that was written: gone, empty, with other checksums.

    Args:
        folder: the directory.
        recorded: the checksum of its `checksums.json`, as the run has it; None: it was not recorded.
    """
    if not any(path.is_file() for path in folder.rglob("*")):
        return "is empty" if folder.is_dir() else "is gone"
    if recorded is not None and recorded != sum_of_checksums(folder):
        return f"is not what was written: its {CHECKSUMS} is another one, or gone"
    return None


def take_checksums(folder: Path) -> dict[str, Parts]:
    """The checksums of a directory, whose own file is removed; none if it has none."""
    known = read_checksums(folder)
    (folder / CHECKSUMS).unlink(missing_ok=True)
    return known or {}


def directory_faults(folder: Path, *, content: bool) -> dict[str, str]:
    """The damaged files of a directory by name, with what is wrong; files beside the recorded ones do not matter.

    Args:
        folder: with `checksums.json`, or without, and then nothing is found.
        content: whether to read the files; otherwise only their sizes are compared.
    """
    try:
        files = read_checksums(folder)
    except CheckpointError as problem:
        return {CHECKSUMS: problem.what}
    fault_of = content_fault if content else size_fault
    faults = {name: fault_of(folder / name, parts) for name, parts in (files or {}).items()}
    return {name: fault for name, fault in faults.items() if fault is not None}


def was_changed(folder: Path, without: Collection[str] = ()) -> bool:
    """Whether a directory holds anything besides what was written into it; of large files the size is compared.

    Args:
        folder: the directory.
        without: files that may have no checksum.
    """
    known = read_checksums(folder) if folder.is_dir() else None
    if known is None:
        return folder.is_dir() and any(folder.iterdir())
    files = relative_files(folder)
    small = (name for name in files if name in known and (folder / name).stat().st_size <= SMALL_BYTES)
    return bool(
        set(files) - known.keys() - set(without)
        or directory_faults(folder, content=False)
        or any(content_fault(folder / name, known[name]) for name in small)
    )


def share(files: Mapping[str, Parts], rank: int, num_ranks: int) -> dict[str, Parts]:
    """The files that a rank verifies: those of its shard number, the others dealt out."""
    found: dict[str, Parts] = {}
    for place, (name, parts) in enumerate(sorted(files.items())):
        shard = _SHARD.fullmatch(Path(name).name)
        owner = int(shard.group(1)) - 1 if shard else place
        if owner % num_ranks == rank:
            found[name] = parts
    return found


def relative_files(folder: Path) -> list[str]:
    """The files below a directory by their paths in it, sorted, without `checksums.json` of its own."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != CHECKSUMS)
