"""`shardtune verify checkpoint`: every file of a run's checkpoints and of `final/` against its checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardtune.checkpoint.atomic import read_json
from shardtune.checkpoint.checksums import CHECKSUMS, directory_faults, read_checksums, unlike_written
from shardtune.checkpoint.records import COPIED, MANIFEST, intact_copy, is_readable
from shardtune.checkpoint.state_file import STATE, StateFile, fault_of
from shardtune.checkpoint.store import CheckpointStore
from shardtune.checkpoint.verified import damage, described
from shardtune.data.checksum import Parts
from shardtune.errors import CheckpointError

FINAL, CHECKPOINTS = "final", "checkpoints"


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
        CheckpointError: it is none of them.
    """
    if (directory / STATE).is_file():
        found = [_checkpoint(directory, None)]
        report(found[0])
        return found[0].sound
    if (directory / CHECKSUMS).is_file():
        found = [_directory(directory)]
        report(found[0])
        return found[0].sound
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
    lost = store.lost()
    for name, path in (("latest", store.latest()), ("best", store.best())):
        if name in lost:
            yield Finding(f"{CHECKPOINTS}/{name}", f"names {lost[name]}, which is gone", sound=False)
        elif path is not None:
            yield Finding(f"{CHECKPOINTS}/{name}", f"is {path.name}", sound=True)
    what = _unlike_finished(directory)
    if what is not None:
        yield Finding(FINAL, f"{what}; the command that trained the run writes it again", sound=False)
    elif (directory / FINAL).is_dir():
        yield _directory(directory / FINAL)


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
    return Finding(name, _extent(known.files), sound=True)


def _directory(folder: Path) -> Finding:
    faults = directory_faults(folder, content=True)
    if faults:
        return Finding(folder.name, described(faults), sound=False)
    known = read_checksums(folder)
    if known is None:
        empty = not any(folder.iterdir())
        what = "is empty" if empty else "written by an earlier version, without checksums"
        return Finding(folder.name, what, sound=not empty)
    return Finding(folder.name, _extent(known), sound=True)


def _extent(files: dict[str, Parts]) -> str:
    size = sum(count for parts in files.values() for count, _ in parts)
    return f"{len(files)} files, {size:,} bytes"
