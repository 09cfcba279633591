"""Files and folders that are either complete or absent, even after a power failure."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

from shardtune.errors import CheckpointError

_ASIDE = re.compile(r"\.(.+)\.old-[0-9a-f]{8}")


def sync_file(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Waits until everything under `folder` is on the disk, folders after what they hold."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync_file(Path(parent) / name)
        sync_file(Path(parent))


def write_text(path: Path, text: str) -> None:
    """Replaces a file in one step: a reader sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_file(path.parent)


def write_json(path: Path, value: object) -> None:
    """Replaces a JSON file in one step. Floats come back bit for bit."""
    write_text(path, json.dumps(value, indent=1) + "\n")


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


def swap_link(link: Path, target: str) -> None:
    """Points a symbolic link elsewhere in one step. What is in the way must be a link, or nothing."""
    temporary = link.with_name(f".{link.name}.{uuid.uuid4().hex[:8]}")
    temporary.symlink_to(target)
    try:
        os.replace(temporary, link)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_file(link.parent)


def publish(temporary: Path, target: Path) -> None:
    """Makes a finished folder durable and gives it its name; a folder of that name is replaced.

    Both lie in the same parent folder. The old one is moved aside first, to `.<name>.old-…`, and removed last: between
    the two renames it has that name, and `recover` renames it back.
    """
    sync_tree(temporary)
    aside: Path | None = None
    if target.exists():
        aside = target.with_name(f".{target.name}.old-{uuid.uuid4().hex[:8]}")
        target.rename(aside)
    temporary.rename(target)
    sync_file(target.parent)
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
    shutil.rmtree(doomed, ignore_errors=True)


def require_space(folder: Path, needed: int) -> None:
    """Refuses a save that does not fit on the disk.

    Args:
        folder: where the bytes will go; need not exist yet.
        needed: bytes.

    Raises:
        CheckpointError: less space is free.
    """
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise CheckpointError(
            f"not enough room on the disk: {_size(needed)} needed, {_size(free)} free",
            where=str(folder),
            remedy="make room, lower runner.keep_last, or set runner.logger.log_path to another disk",
        )


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
