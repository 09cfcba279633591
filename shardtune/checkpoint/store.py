"""The checkpoints of a run: complete or absent, the last few of them, the newest and the best by name.

    checkpoints/
      global_step_10/  ... state.json     written last, with the size of every file, which reveals a torn folder
      latest                              a text file with the newest one's name
      best -> global_step_10              a link, never a copy, so it always is a complete checkpoint
      .global_step_20.tmp-1a2b3c4d/       being written

Rank 0 calls `begin` and sends the folder to all ranks; all write into it; when all are done, rank 0 calls
`commit`. The store uses no process group. A resumed run calls `clean` before it looks for a checkpoint.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtune.checkpoint.atomic import (
    publish,
    read_json,
    recover,
    remove_tree,
    require_space,
    swap_link,
    sync_file,
    write_json,
    write_text,
)
from shardtune.errors import CheckpointError

STATE = "state.json"
_FOLDER = re.compile(r"global_step_(\d+)")


class CheckpointStore:
    """The checkpoints in one folder.

    Args:
        folder: `checkpoints` of a run directory; made when the first checkpoint begins.
        keep_last: how many of the newest stay.
        keep_every: those at multiples of this many steps stay too.
    """

    def __init__(self, folder: str | Path, *, keep_last: int = 3, keep_every: int | None = None) -> None:
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self._begun: set[str] = set()

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return self.folder / f"global_step_{step}"

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, ascending."""
        return [step for step, path in sorted(self._folders().items()) if _fault(path) is None]

    def latest(self) -> Path | None:
        """The checkpoint that `latest` names; where that is gone or torn, the complete one of most steps."""
        named = self._pointed()
        if named is not None and _fault(named) is None:
            return named
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def best(self) -> Path | None:
        """The best checkpoint under its own name, None where none was marked."""
        link = self.folder / "best"
        return link.resolve() if link.is_symlink() and _fault(link) is None else None

    def begin(self, step: int, *, needed_bytes: int = 0) -> Path:
        """A fresh folder to write the checkpoint of `step` into (rank 0). Removes what an interrupted save left.

        Raises:
            CheckpointError: no room for `needed_bytes`, or the folder cannot be written.
        """
        require_space(self.folder, needed_bytes)
        temporary = self.folder / f".global_step_{step}.tmp-{uuid.uuid4().hex[:8]}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.clean()
            temporary.mkdir()
            self._begun.add(temporary.name)
        except OSError as problem:
            raise _unwritable(self.folder, problem) from problem
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
        try:
            files = {path.relative_to(temporary).as_posix(): path.stat().st_size for path in _files(temporary)}
            write_json(temporary / STATE, {"step": step, "state": dict(state), "files": files})
            publish(temporary, target)
            self._begun.discard(temporary.name)
            write_text(self.folder / "latest", target.name + "\n")
            if best:
                self.mark_best(step)
            self.prune()
        except OSError as problem:
            raise _unwritable(temporary, problem) from problem
        return target

    def update(self, step: int, state: Mapping[str, object], *, best: bool = False) -> Path:
        """Replaces the state in a complete checkpoint; its tensors remain (rank 0).

        Args:
            step: of the checkpoint.
            state: as for `commit`.
            best: also point `best` at it.

        Raises:
            CheckpointError: there is none of `step`.
        """
        target = open_checkpoint(self.path(step))
        known = read_json(target / STATE)
        if known["state"] != dict(state):
            write_json(target / STATE, {**known, "state": dict(state)})
        if best:
            self.mark_best(step)
        return target

    def mark_best(self, step: int) -> None:
        """Points `best` at a complete checkpoint.

        Raises:
            CheckpointError: there is none of `step`.
        """
        target = open_checkpoint(self.path(step))
        swap_link(self.folder / "best", target.name)

    def go_back_to(self, step: int) -> None:
        """Makes the checkpoint of `step` the latest; later ones are abandoned, and removed at the next save.

        Raises:
            CheckpointError: there is none of `step`.
        """
        name = open_checkpoint(self.path(step)).name
        if self._pointed() != self.path(step):
            write_text(self.folder / "latest", name + "\n")
        best = self.best()
        if best is not None and _step_of(best) > step:
            (self.folder / "best").unlink()

    def torn(self) -> dict[str, str]:
        """The incomplete checkpoints: name to what is missing."""
        faults = {path.name: _fault(path) for _, path in sorted(self._folders().items())}
        return {name: fault for name, fault in faults.items() if fault is not None}

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
            if re.search(r"\.(tmp|removed)-\w+$", left.name):
                shutil.rmtree(left, ignore_errors=True)
            elif re.match(r"\.(latest|best)\.\w+$", left.name):
                left.unlink(missing_ok=True)

    def prune(self) -> None:
        """Removes checkpoints beyond `keep_last` and `keep_every`, torn ones, and abandoned ones.

        The latest and the best stay in any case.
        """
        latest = self.latest()
        steps = [step for step in self.steps() if latest is None or step <= _step_of(latest)]
        protected = {path.name for path in (latest, self.best()) if path is not None}
        kept = set(steps[-self.keep_last :] if self.keep_last > 0 else ())
        if self.keep_every:
            kept |= {step for step in steps if step % self.keep_every == 0}
        for step, path in self._folders().items():
            if step not in kept and path.name not in protected:
                remove_tree(path)
        sync_file(self.folder)

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
        try:
            name = (self.folder / "latest").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return self.folder / name if _FOLDER.fullmatch(name) else None

    def _folders(self) -> dict[int, Path]:
        if not self.folder.is_dir():
            return {}
        matches = ((_FOLDER.fullmatch(path.name), path) for path in self.folder.iterdir() if path.is_dir())
        return {int(match.group(1)): path for match, path in matches if match}


def open_checkpoint(path: str | Path) -> Path:
    """A complete checkpoint: `path` itself, or the newest of the run or `checkpoints` directory that `path` is.

    Raises:
        CheckpointError: there is none, or it is torn (names the file).
    """
    folder = Path(path)
    for candidate in (folder, folder / "checkpoints"):
        if not (candidate / STATE).exists() and CheckpointStore(candidate)._folders():
            latest = CheckpointStore(candidate).latest()
            if latest is not None:
                return latest
            raise CheckpointError(f"none of the checkpoints in '{candidate}' is complete", where=str(candidate))
    fault = _fault(folder)
    if fault is not None:
        raise CheckpointError(
            f"'{folder.name}' is not a complete checkpoint: {fault}",
            where=str(folder),
            remedy="continue from another checkpoint of the run",
        )
    return folder.resolve()


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The state that `commit` saved, from a complete checkpoint.

    Raises:
        CheckpointError: state.json is gone or damaged.
    """
    return read_json(checkpoint / STATE)["state"]


def saved_step(checkpoint: Path) -> int:
    """The step of a complete checkpoint.

    Raises:
        CheckpointError: state.json is gone or damaged.
    """
    return int(read_json(checkpoint / STATE)["step"])


def _fault(checkpoint: Path) -> str | None:
    """What is missing in a checkpoint, None for a complete one. Reads only state.json and file sizes."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    try:
        manifest = read_json(checkpoint / STATE)
        files = dict(manifest["files"])
        _ = manifest["step"], manifest["state"]
    except (CheckpointError, KeyError, TypeError, ValueError):
        return f"it has no valid {STATE}"
    for name, size in files.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}: it is torn"
    return None


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("_")[2])


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / STATE)


def _unwritable(folder: Path, problem: OSError) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint cannot be written: {problem.strerror or problem}",
        where=str(problem.filename or folder),
        remedy="make room or give write permission, or set runner.logger.log_path to another directory",
    )
