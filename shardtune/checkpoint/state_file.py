"""`state.json` of a checkpoint: its step, its run, the state of the run, and the size and checksum of every file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardtune.checkpoint.at_once import at_once
from shardtune.checkpoint.atomic import read_json, write_json
from shardtune.data.checksum import Parts, is_sealed, read_parts, sealed, size_fault
from shardtune.errors import CheckpointError

STATE = "state.json"
FOLDER = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True, slots=True)
class StateFile:
    """What `state.json` says of a checkpoint.

    Attributes:
        step: optimizer steps done.
        state: of the run, for `read_state`.
        files: size and checksum of each file by its path in the checkpoint; of earlier versions "" in place of
            checksums.
        run: the id of the run that wrote it; None if none is recorded.
        has_checksums: False for checkpoints of earlier versions.
    """

    step: int
    state: dict[str, Any]
    files: dict[str, Parts]
    run: str | None = None
    has_checksums: bool = True

    def write(self, checkpoint: Path) -> None:
        document = {"step": self.step, "run": self.run, "state": self.state, "files": self.files}
        if self.has_checksums:
            write_json(checkpoint / STATE, sealed(document))
        else:
            sizes = {name: sum(size for size, _ in parts) for name, parts in self.files.items()}
            write_json(checkpoint / STATE, {"step": self.step, "state": self.state, "files": sizes})

    def with_state(self, state: Mapping[str, object]) -> StateFile:
        return replace(self, state=dict(state))

    @classmethod
    def read(cls, checkpoint: Path) -> StateFile:
        """Read and check it; the files it lists are not looked at.

        Raises:
            CheckpointError: it is gone or damaged.
        """
        try:
            status = (checkpoint / STATE).stat()
        except OSError as problem:
            raise CheckpointError(
                f"{STATE} cannot be read: {problem.strerror}", where=str(checkpoint / STATE)
            ) from problem
        # Every save looks at each kept checkpoint several times; of many ranks the file has megabytes.
        return _read(checkpoint, (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))


@lru_cache(maxsize=64)
def _read(checkpoint: Path, stamps: tuple[int, ...]) -> StateFile:
    document = read_json(checkpoint / STATE)
    try:
        files, has_checksums = dict(document["files"]), is_sealed(document)
        if has_checksums:
            parts = {name: read_parts(stored) for name, stored in files.items()}
        else:
            parts = {name: [(_size(size), "")] for name, size in files.items()}
        return StateFile(int(document["step"]), dict(document["state"]), parts, document.get("run"), has_checksums)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise CheckpointError(
            f"{STATE} is damaged: {problem}",
            where=str(checkpoint / STATE),
            remedy="continue from another checkpoint",
        ) from problem


def _size(stored: object) -> int:
    if not isinstance(stored, int):  # lists of checksums without the document's own: the seal is gone
        raise ValueError("it has no checksum of its own")
    return stored


def fault_of(checkpoint: Path, run: str | None = None, *, sizes: bool = True) -> str | None:
    """What is wrong with a checkpoint by `state.json` and the sizes of files; None for a complete one.

    Args:
        checkpoint: its folder.
        run: the id of the run that it must be of; None: of any.
        sizes: whether to look at the files that `state.json` lists, of which there are some for every rank.
    """
    if not checkpoint.is_dir():
        return "there is no such folder"
    try:
        known = StateFile.read(checkpoint)
    except CheckpointError as problem:
        return f"it has no valid {STATE}: {problem.what}"
    named = FOLDER.fullmatch(checkpoint.name)
    if named and int(named.group(1)) != known.step:
        return f"its {STATE} is that of step {known.step}"
    if run is not None and known.run is not None and known.run != run:
        return "it was written by another run"
    files = [*known.files.items()] if sizes else []
    faults = at_once(lambda file: size_fault(checkpoint / file[0], file[1]), files)
    return next((f"{name} {fault}" for (name, _), fault in zip(files, faults, strict=True) if fault is not None), None)


def written_by(checkpoint: Path, run: str | None) -> bool:
    """Whether a checkpoint was provably written by the run with an id; its other files may be damaged."""
    try:
        known = StateFile.read(checkpoint)
    except CheckpointError:
        return False
    return run is not None and known.run == run


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The state that `commit` saved, from a complete checkpoint.

    Raises:
        CheckpointError: state.json is gone or damaged.
    """
    return deepcopy(StateFile.read(checkpoint).state)


def saved_step(checkpoint: Path) -> int:
    """The step of a complete checkpoint.

    Raises:
        CheckpointError: state.json is gone or damaged.
    """
    return StateFile.read(checkpoint).step
