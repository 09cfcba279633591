"""Files and folders that are either complete or absent, even after a power failure."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardtune.checkpoint.at_once import at_once
from shardtune.data.durable import naming, sync_folder, write_text
from shardtune.errors import CheckpointError

_ASIDE = re.compile(r"\.(.+)\.old-[0-9a-f]{8}")


def sync_file(path: Path) -> None:
    """Waits until a file's bytes are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path, durable: Collection[str] = ()) -> None:
    """Waits until everything under `folder` is on the disk, folders after what they hold.

    Args:
        folder: which.
        durable: paths in it of files that are on the disk already.
    """
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            file = Path(parent) / name
            if file.relative_to(folder).as_posix() not in durable:
                sync_file(file)
        sync_folder(Path(parent))


def write_output(path: Path, text: str) -> None:
    """Replaces a file that a user names, as `write_text`: of a link what it leads to; into a device it is written."""
    target = path.resolve()
    if target.is_file() or not target.exists():
        write_text(target, text, durably=False)
        return
    with naming(path):
        path.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object, *, durably: bool = True) -> None:
    """Replaces a JSON file in one step, as `write_text`. Floats come back bit for bit."""
    write_text(path, json.dumps(value, indent=1) + "\n", durably=durably)


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        CheckpointError: it is not there or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise CheckpointError(f"{path.name} cannot be read: {problem.strerror}", where=str(path)) from problem
    except ValueError as problem:
        raise CheckpointError(
            f"{path.name} is damaged: {problem}", where=str(path), remedy="continue from another checkpoint"
        ) from problem


def point_to(pointer: Path, target: str) -> None:
    """Makes `pointer` name another folder beside it in one step: as a symbolic link, or else as a text file.

    What is in the way must be a pointer, or nothing. `pointed_to` reads both forms.
    """
    temporary = pointer.with_name(f".{pointer.name}.{uuid.uuid4().hex[:8]}")
    try:
        temporary.symlink_to(target)
    except OSError:  # a file system without links; where nothing can be written, this fails as well
        write_text(pointer, target + "\n")
        return
    try:
        os.replace(temporary, pointer)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(pointer.parent)


def pointed_to(pointer: Path) -> Path | None:
    """The folder that a pointer names; None where there is no pointer."""
    if pointer.is_symlink():
        return pointer.resolve()
    try:
        return pointer.parent / pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None
    except (OSError, UnicodeDecodeError):
        return None


def publish(temporary: Path, target: Path, durable: Collection[str] = ()) -> None:
    """Makes a finished folder durable and gives it its name; a folder or link of that name is replaced.

    Both lie in the same parent folder. The old one is moved aside first, to `.<name>.old-…`, and removed last: between
    the two renames it has that name, and `recover` renames it back. What a link leads to stays as it is.

    Args:
        temporary: the finished folder.
        target: its name.
        durable: as for `sync_tree`.
    """
    sync_tree(temporary, durable)
    aside: Path | None = None
    if target.is_symlink():
        target.unlink()
    elif target.exists():
        aside = target.with_name(f".{target.name}.old-{uuid.uuid4().hex[:8]}")
        target.rename(aside)
    temporary.rename(target)
    sync_folder(target.parent)
    if aside is not None:
        remove_tree(aside)


def recover(parent: Path) -> None:
    """Undoes a `publish` that was interrupted between its two renames, and completes one interrupted after them."""
    for aside in sorted(parent.iterdir()):
        match = _ASIDE.fullmatch(aside.name)
        if match is None:
            continue
        target = parent / match.group(1)
        if target.exists():
            remove_tree(aside)
        else:
            aside.rename(target)


def remove_tree(folder: Path) -> None:
    """Removes a folder; it is renamed first, so that a part of it is never taken for the whole."""
    doomed = folder.with_name(f".{folder.name.lstrip('.')}.removed-{uuid.uuid4().hex[:8]}")
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return
    remove_files(doomed)


def remove_files(folder: Path) -> None:
    """Removes a folder with as much in it as can be removed."""

    def remove(file: str) -> None:
        with suppress(OSError):
            os.unlink(file)

    at_once(remove, [os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names])
    shutil.rmtree(folder, ignore_errors=True)


def free_bytes(folder: Path) -> int:
    """The bytes that are free on the disk of a folder, which need not exist yet."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def size_text(count: float) -> str:
    """Bytes as a person reads them: 17.08 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
