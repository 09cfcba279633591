"""The checkpoints of a run: complete or absent, the last few of them, the newest and the best by name.

    checkpoints/
      global_step_10/  ... state.json     written last, with the size and checksum of every file
      global_step_10/run/                 the recipe and the manifest of the run, of which a copy is in each
      latest                              a text file with the newest one's name
      best -> global_step_10              a link (or a text file), never a copy, so it always is a complete checkpoint
      run_id                              the id of the run; only checkpoints that record the same one are ever removed
      .global_step_20.tmp-1a2b3c4d/       being written

Rank 0 calls `begin` and sends the folder to all ranks; all write into it; when all are done, rank 0 calls
`commit`. The store uses no process group. A resumed run calls `clean` before it looks for a checkpoint.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shardtune.checkpoint.atomic import (
    free_bytes,
    point_to,
    pointed_to,
    publish,
    recover,
    remove_files,
    remove_tree,
    size_text,
    write_text,
)
from shardtune.checkpoint.checksums import CHECKSUMS, relative_files, take_checksums
from shardtune.checkpoint.records import copy_records, read_run_id, write_run_id
from shardtune.checkpoint.state_file import FOLDER, STATE, StateFile, fault_of, written_by
from shardtune.data.cache_directory import content_size
from shardtune.data.checksum import Parts, file_parts
from shardtune.data.durable import sync_folder
from shardtune.errors import CheckpointError

_LEFT = re.compile(r"\.global_step_\d+(\.(tmp|old|removed)-[0-9a-f]{8})*\.(tmp|removed)-[0-9a-f]{8}")
_POINTERS = ("latest", "best")


class CheckpointStore:
    """The checkpoints in one folder.

    Args:
        folder: `checkpoints` of a run directory; made when the first checkpoint begins. The recipe and the manifest
            beside it are copied into each checkpoint.
        keep_last: how many of the newest stay.
        keep_every: those at multiples of this many steps stay too.
        sizes: whether checkpoints with a missing or torn file are incomplete; False: only `state.json` is read of each.
    """

    def __init__(
        self, folder: str | Path, *, keep_last: int = 3, keep_every: int | None = None, sizes: bool = True
    ) -> None:
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self._sizes = sizes
        self._begun: set[str] = set()
        self._opened = False

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return self.folder / f"global_step_{step}"

    def all(self) -> list[Path]:
        """Every folder with the name of a checkpoint, whatever is in it, by step."""
        return [path for _, path in sorted(self._folders().items())]

    def run(self) -> str | None:
        """The id of the run that these are the checkpoints of: as recorded beside them, or else in the newest.

        None if none is recorded, or if the id is gone and they have different ones.
        """
        known = read_run_id(self.folder)
        if known is not None:
            return known
        found = {_run_of(path) for path in self._folders().values()} - {None}
        return found.pop() if len(found) == 1 else None

    def steps(self, faults: Mapping[str, str] | None = None) -> list[int]:
        """The steps with a complete checkpoint of this run, ascending; file contents are not read.

        Args:
            faults: of the checkpoints, where they are known; otherwise all files are looked at.
        """
        faults = self.faults() if faults is None else faults
        return [step for step, path in sorted(self._folders().items()) if path.name not in faults]

    def latest(self) -> Path | None:
        """The first of `newest_first`."""
        return next(iter(self.newest_first()), None)

    def newest_first(self, faults: Mapping[str, str] | None = None) -> list[Path]:
        """The complete checkpoints that the run can be continued from.

        First the one that `latest` names, then those before it. Later ones belong to a course that was given up; they
        count only where `latest` is gone or names none that is there.

        Args:
            faults: as for `steps`.
        """
        named, steps = self._pointed(), self.steps(faults)
        if named is not None and named.is_dir():
            before = [step for step in steps if step <= _step_of(named)]
            steps = before or steps
        return [self.path(step) for step in reversed(steps)]

    def best(self) -> Path | None:
        """The best checkpoint under its own name, None where none was marked."""
        best = pointed_to(self.folder / "best")
        while best is not None and fault_of(best) is not None:
            found, best = best, pointed_to(self.folder / "best")
            if best == found:  # otherwise a run in progress has found a better one, and removed that
                return None
        return best

    def lost(self) -> dict[str, str]:
        """Of `latest` and `best` those that name a checkpoint which is not there, and its name."""
        named = {name: pointed_to(self.folder / name) for name in _POINTERS}
        return {name: path.name for name, path in named.items() if path is not None and not path.is_dir()}

    def open(self) -> None:
        """Make the folder, with an id of the run; from now on it is not made again if it disappears (rank 0).

        Raises:
            CheckpointError: it cannot be written.
        """
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if read_run_id(self.folder) is None:
                write_run_id(self.folder, self.run())
        self._opened = True

    def require_space(self, needed: int) -> None:
        """Refuses to save `needed` bytes that would have no room once those beyond `keep_last` are removed (rank 0).

        Raises:
            CheckpointError: less space is free.
        """
        free = free_bytes(self.folder)
        if free >= needed or free + sum(map(content_size, self._beyond(self.keep_last))) >= needed:
            return
        lower = "lower runner.keep_last, " if self.keep_last > 1 and self._beyond(1) else ""
        raise CheckpointError(
            f"not enough room on the disk: {size_text(needed)} needed, {size_text(free)} free",
            where=str(self.folder),
            remedy=f"make room, {lower}or set runner.logger.log_path to another disk",
        )

    def note_on_space(self, checkpoint: int, model: int, saves: int, steps: int, *, best: bool) -> str:
        """A line if the disk has no room for all checkpoints of a run at a time, "" if it has (rank 0).

        With `keep_last: 3` there are four while the fourth and each later one is written, and one more if the best is
        an older one. Those that there are already count as well.

        Args:
            checkpoint: bytes of one.
            model: bytes of the model that is saved in the end.
            saves: checkpoints that the run writes.
            steps: of the run.
            best: whether the best one is kept too.
        """
        lasting = min(saves, self.keep_last)
        at_multiples = min(saves, steps // self.keep_every) if self.keep_every else 0
        for_good = max(0, at_multiples - lasting) if saves > lasting else 0
        number = lasting + for_good + (saves > lasting) * (1 + best)
        needed = number * checkpoint + (model if saves <= lasting else 0)
        needed -= sum(map(content_size, self.all()))
        free = free_bytes(self.folder)
        if number < 2 or free >= needed:
            return ""
        kept = f"runner.keep_last: {self.keep_last}, and one while it is written" if saves > lasting else "the run's"
        return (
            f"disk: {number} checkpoints of about {size_text(checkpoint)} ({kept}) need {size_text(needed)}, and "
            f"{size_text(free)} are free in {self.folder.parent}: a later save would end the run; make room, lower "
            "runner.keep_last, or set runner.logger.log_path to another disk"
        )

    def begin(self, step: int, *, needed_bytes: int = 0) -> Path:
        """A fresh folder to write the checkpoint of `step` into (rank 0). Removes what an interrupted save left.

        Where room is short, those beyond `keep_last` are removed first: after a commit none is, unless it was lowered.

        Raises:
            CheckpointError: no room for `needed_bytes`, or the folder cannot be written.
        """
        self.require_space(needed_bytes)
        temporary = self.folder / f".global_step_{step}.tmp-{uuid.uuid4().hex[:8]}"
        with _writing(self.folder):
            if not self._opened:
                self.open()
            elif not self.folder.is_dir():
                raise directory_is_gone(self.folder if self.folder.parent.is_dir() else self.folder.parent)
            self.clean()
            if free_bytes(self.folder) < needed_bytes:
                self.prune()
            temporary.mkdir()
            self._begun.add(temporary.name)
        return temporary

    def commit(self, temporary: Path, step: int, state: Mapping[str, object], *, best: bool = False) -> Path:
        """Makes the files of all ranks the checkpoint of `step`, then removes the oldest (rank 0).

        Args:
            temporary: the folder from `begin`.
            state: JSON values, for `read_state`.
            best: also point `best` at it.

        Raises:
            CheckpointError: the disk is full or cannot be written.
        """
        target = self.path(step)
        with _writing(temporary):
            copy_records(self.folder.parent, temporary)
            known = _known_checksums(temporary)
            StateFile(step, dict(state), _checksums(temporary, known), self.run()).write(temporary)
            self._step_aside(target)
            publish(temporary, target, durable=known.keys())
            self._begun.discard(temporary.name)
            write_text(self.folder / "latest", target.name + "\n")
            if best:
                self.mark_best(step)
            self.prune()
        return target

    def _step_aside(self, target: Path) -> None:
        """Rename what has the name of a new checkpoint and was not provably written by this run."""
        if target.exists() and not written_by(target, self.run()):
            target.rename(target.with_name(f"{target.name}.kept-{uuid.uuid4().hex[:8]}"))

    def update(self, step: int, state: Mapping[str, object], *, best: bool = False) -> Path:
        """Replaces the state in a complete checkpoint; its tensors remain. Removes the best one before (rank 0).

        Args:
            step: of the checkpoint.
            state: as for `commit`.
            best: also point `best` at it.

        Raises:
            CheckpointError: there is none of `step`, or the disk is full or cannot be written.
        """
        target = open_checkpoint(self.path(step))
        known = StateFile.read(target)
        with _writing(target):
            if known.state != dict(state):
                known.with_state(state).write(target)
            if best:
                self.mark_best(step)
                self.prune()  # of the best one before
        return target

    def mark_best(self, step: int) -> None:
        """Points `best` at a complete checkpoint.

        Raises:
            CheckpointError: there is none of `step`, or the disk is full or cannot be written.
        """
        target = open_checkpoint(self.path(step))
        with _writing(self.folder):
            point_to(self.folder / "best", target.name)

    def go_back_to(self, step: int) -> None:
        """Makes the checkpoint of `step` the latest; later ones are abandoned, and removed at the next save.

        Raises:
            CheckpointError: there is none of `step`, or the disk is full or cannot be written.
        """
        name = open_checkpoint(self.path(step)).name
        with _writing(self.folder):
            if self._pointed() != self.path(step):
                write_text(self.folder / "latest", name + "\n")
            best = self.best()
            if best is not None and _step_of(best) > step:
                (self.folder / "best").unlink()

    def faults(self) -> dict[str, str]:
        """The incomplete checkpoints and those of other runs: name to what is wrong, without reading contents."""
        run = self.run()
        faults = {path.name: fault_of(path, run, sizes=self._sizes) for path in self.all()}
        return {name: fault for name, fault in faults.items() if fault is not None}

    def not_provably_own(self) -> list[str]:
        """The checkpoints that do not record this run's id; they are never removed."""
        run = self.run()
        return [path.name for path in self.all() if not written_by(path, run)]

    def abandon(self, temporary: Path) -> None:
        """Removes a checkpoint that was begun and will not be committed."""
        self._begun.discard(temporary.name)
        remove_tree(temporary)

    def clean(self) -> None:
        """Removes the remains of interrupted saves and removals, except saves begun by this store."""
        if not self.folder.is_dir():
            return
        recover(self.folder)
        for left in self.folder.glob(".*"):
            if left.name in self._begun:
                continue
            if _LEFT.fullmatch(left.name):
                remove_files(left)
            elif re.fullmatch(r"\.(latest|best|run_id)\.[0-9a-f]{8}", left.name):
                left.unlink(missing_ok=True)

    def prune(self) -> None:
        """Removes checkpoints beyond `keep_last` and `keep_every`, torn ones, and abandoned ones.

        The latest and the best stay in any case, and so does whatever does not record the id of this run.
        """
        for path in self._beyond(self.keep_last):
            remove_tree(path)
        sync_folder(self.folder)

    def _beyond(self, keep_last: int) -> list[Path]:
        """Those that `prune` removes where so many of the newest stay."""
        run, faults = self.run(), self.faults()
        latest = next(iter(self.newest_first(faults)), None)
        steps = [step for step in self.steps(faults) if latest is None or step <= _step_of(latest)]
        protected = {path.name for path in (latest, self.best()) if path is not None}
        kept = set(steps[-keep_last:] if keep_last > 0 else ())
        if self.keep_every:
            kept |= {step for step in steps if step % self.keep_every == 0}
        beyond = [(step, path) for step, path in self._folders().items() if step not in kept]
        return [path for _, path in beyond if path.name not in protected and written_by(path, run)]

    def resolve(self, which: str | int | Path) -> Path:
        """The checkpoint a user means: "latest", "best", a step, or a path (also to a run directory).

        Raises:
            CheckpointError: it is not there or not complete; lists those that are.
        """
        text = str(which).rstrip("/")
        if text in ("latest", "best"):
            found = self.latest() if text == "latest" else self.best()
            if found is None:
                raise self._unknown(f"there is no {text} checkpoint")
            return found
        if text.isdigit():
            path = self.path(int(text))
            if not path.is_dir():
                raise self._unknown(f"there is no checkpoint of step {text}")
            return open_checkpoint(path)
        path = Path(text).expanduser()
        if not path.is_dir() and (self.folder / text).is_dir():
            path = self.folder / text
        if not path.is_dir():
            raise self._unknown(f"there is no checkpoint '{which}'")
        return open_checkpoint(path)

    def _unknown(self, what: str) -> CheckpointError:
        steps = ", ".join(map(str, self.steps())) or "none"
        best = self.best()
        marked = f"; best: {best.name.rpartition('_')[2]}" if best is not None else ""
        return CheckpointError(
            what,
            where=f"{self.folder}: complete checkpoints: {steps}{marked}",
            remedy="name one of those, latest, or the path of a checkpoint",
        )

    def _pointed(self) -> Path | None:
        named = pointed_to(self.folder / "latest")
        return named if named is not None and FOLDER.fullmatch(named.name) else None

    def _folders(self) -> dict[int, Path]:
        if not self.folder.is_dir():
            return {}
        matches = ((FOLDER.fullmatch(path.name), path) for path in self.folder.iterdir() if path.is_dir())
        return {int(match.group(1)): path for match, path in matches if match}


def open_checkpoint(path: str | Path, *, sizes: bool = True) -> Path:
    """A complete checkpoint: `path` itself, or the newest of the run or `checkpoints` directory that `path` is.

    Args:
        path: of any of them.
        sizes: as for `CheckpointStore`.

    Raises:
        CheckpointError: there is none, or it is torn (names the file).
    """
    folder = Path(path)
    if folder.name in _POINTERS and folder.is_file():
        folder = pointed_to(folder) or folder
    for candidate in (folder, folder / "checkpoints"):
        if not (candidate / STATE).exists() and CheckpointStore(candidate)._folders():
            latest = CheckpointStore(candidate, sizes=sizes).latest()
            if latest is not None:
                return latest
            raise CheckpointError(f"none of the checkpoints in '{candidate}' is complete", where=str(candidate))
    fault = fault_of(folder, sizes=sizes)
    if fault is not None:
        raise CheckpointError(
            f"'{folder.name}' is not a complete checkpoint: {fault}",
            where=str(folder),
            remedy="continue from another checkpoint of the run",
        )
    return folder.resolve()


def directory_is_gone(folder: Path) -> CheckpointError:
    """The error for a directory of a run that disappears while the run is trained."""
    return CheckpointError(
        f"{folder} is gone: it was deleted or moved during training, which ends here",
        where=str(folder),
        remedy="put it back and run the same command, or train again under another runner.logger.experiment_name",
    )


def _run_of(checkpoint: Path) -> str | None:
    try:
        return StateFile.read(checkpoint).run
    except CheckpointError:
        return None


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("_")[2])


def _known_checksums(folder: Path) -> dict[str, Parts]:
    """The checksums of tensors, known since their ranks have written and synced them; they are moved out of there."""
    known: dict[str, Parts] = {}
    for noted in sorted(folder.rglob(CHECKSUMS)):
        parent = noted.parent.relative_to(folder)
        known |= {(parent / name).as_posix(): parts for name, parts in take_checksums(noted.parent).items()}
    return known


def _checksums(folder: Path, known: Mapping[str, Parts]) -> dict[str, Parts]:
    """The checksums of all files of a checkpoint; those that are not known are read."""
    names = (name for name in relative_files(folder) if name != STATE)
    return {name: known.get(name) or file_parts(folder / name) for name in names}


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn an error of the disk into one that names the file, or else the folder."""
    try:
        yield
    except OSError as problem:
        raise CheckpointError(
            f"the checkpoint cannot be written: {problem.strerror or problem}",
            where=str(problem.filename or folder),
            remedy="make room or give write permission, or set runner.logger.log_path to another directory",
        ) from problem
