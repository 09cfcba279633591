"""`shardtune verify checkpoint`: every file of a run's checkpoints and of `final/` against its checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardtune.checkpoint.atomic import pointed_to, read_json
from shardtune.checkpoint.checksums import CHECKSUMS, directory_faults, read_checksums, relative_files, unlike_written
from shardtune.checkpoint.records import COPIED, MANIFEST, intact_copy, is_readable
from shardtune.checkpoint.state_file import FOLDER, STATE, StateFile, fault_of
from shardtune.checkpoint.store import CheckpointStore
from shardtune.checkpoint.verified import damage, described
from shardtune.data.checksum import Parts
from shardtune.errors import CheckpointError, counted

FINAL, CHECKPOINTS = "final", "checkpoints"
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one directory or file.

    Attributes:
        name: relative to the run directory.
        what: files and bytes that were read, or what is wrong.
        sound: whether nothing is wrong.
    """

    name: str
    what: str
    sound: bool


def verify_checkpoints(directory: Path, report: Callable[[Finding], None]) -> bool:
    """Read a run, a single checkpoint, or a directory that `export` wrote; returns whether all of it is sound.

    Args:
        directory: of any of them.
        report: receives each finding as soon as it is known.

    Raises:
        CheckpointError: it is none of them, or cannot be read.
    """
    try:
        return _verified(directory, report)
    except OSError as problem:
        raise CheckpointError(
            f"{problem.filename or directory} cannot be read: {problem.strerror}",
            where=str(directory),
            remedy="verify it as a user who may read all of it",
        ) from problem


def _verified(directory: Path, report: Callable[[Finding], None]) -> bool:
    if (directory / STATE).is_file() or (FOLDER.fullmatch(directory.name) and directory.is_dir()):
        found = _checkpoint(directory, None)
        report(found)
        return found.sound
    if (directory / CHECKSUMS).is_file():
        found = _directory(directory)
        report(found)
        return found.sound
    if not directory.exists():
        raise CheckpointError(
            f"{directory} does not exist", where=str(directory), remedy="give a run directory: runs/<experiment_name>"
        )
    store = CheckpointStore(directory / CHECKPOINTS)
    folders = store.all()
    if not folders and not (directory / FINAL).is_dir():
        raise CheckpointError(
            f"{directory} holds no checkpoints and no {FINAL}/",
            where=str(directory),
            remedy="give a run directory (runs/<experiment_name>), a checkpoint of one, or an exported directory",
        )
    sound = True
    for finding in _findings(directory, store, folders):
        report(finding)
        sound = sound and finding.sound
    return sound


def _findings(directory: Path, store: CheckpointStore, folders: list[Path]) -> Iterator[Finding]:
    for name in COPIED:
        if not is_readable(directory / name):
            copies = [path.name for path in folders if intact_copy(path, name) is not None]
            what = "cannot be read" if (directory / name).exists() else "is gone"
            yield Finding(name, f"{what}; {', '.join(copies) or 'no checkpoint'} has a copy", sound=False)
    run = store.run()
    for folder in folders:
        yield _checkpoint(folder, run)
    if not folders:
        yield Finding(CHECKPOINTS, "there are none", sound=True)
    lost = store.lost()
    for name, path in (("latest", store.latest()), ("best", store.best())):
        if name in lost:
            yield Finding(f"{CHECKPOINTS}/{name}", f"names {lost[name]}, which is gone", sound=False)
        elif path is not None and pointed_to(store.folder / name) is None:
            yield Finding(f"{CHECKPOINTS}/{name}", f"is gone or names none: {path.name} is the newest", sound=True)
        elif path is not None:
            yield Finding(f"{CHECKPOINTS}/{name}", f"is {path.name}", sound=True)
    what = _unreadable(directory / FINAL)
    if what is not None:
        yield Finding(FINAL, what, sound=False)
        return
    what = _unlike_finished(directory)
    if what is not None:
        yield Finding(FINAL, f"{what}; the command that trained the run writes it again", sound=False)
    elif (directory / FINAL).is_dir():
        yield _directory(directory / FINAL)


def _unreadable(folder: Path) -> str | None:
    """Why a folder's files cannot be listed; None where they can, or where there is none."""
    try:
        if folder.is_dir():
            next(folder.iterdir(), None)
    except OSError as problem:
        return f"cannot be read: {problem.strerror}"
    return None


def _unlike_finished(directory: Path) -> str | None:
    """How `final/` differs, at a look, from what the run recorded when it finished; None for one that has not."""
    if not is_readable(directory / MANIFEST):
        return None
    finished = read_json(directory / MANIFEST).get("finished")
    return None if finished is None else unlike_written(directory / FINAL, finished.get(FINAL))


def _checkpoint(folder: Path, run: str | None) -> Finding:
    name = f"{CHECKPOINTS}/{folder.name}"
    fault = fault_of(folder, run)
    if fault is not None:
        return Finding(name, fault, sound=False)
    found = damage(folder)
    if found:
        return Finding(name, described(found), sound=False)
    known = StateFile.read(folder)
    if not known.has_checksums:
        return Finding(name, "saved by an earlier version, without checksums; sizes and headers are right", sound=True)
    return Finding(name, _extent(folder, known.files, STATE), sound=True)


def _directory(folder: Path) -> Finding:
    faults = directory_faults(folder, content=True)
    if faults:
        return Finding(folder.name, described(faults), sound=False)
    known = read_checksums(folder)
    if known is None:
        empty = not any(folder.iterdir())
        what = "is empty" if empty else "written by an earlier version, without checksums"
        return Finding(folder.name, what, sound=not empty)
    return Finding(folder.name, _extent(folder, known, CHECKSUMS), sound=True)


def _extent(folder: Path, files: Mapping[str, Parts], of_files: str) -> str:
    """How many files and bytes were read; and the names of files that were not written with them."""
    size = sum(count for parts in files.values() for count, _ in parts)
    further = [name for name in relative_files(folder) if name not in files and name != of_files]
    more = f", … ({len(further)} in all)" if len(further) > SHOWN else ""
    beside = f"; beside them, not written by the run: {', '.join(further[:SHOWN])}{more}" if further else ""
    return f"{counted(len(files), 'file')}, {size:,} bytes{beside}"
