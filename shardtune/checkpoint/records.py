"""What identifies a run, beside its checkpoints and inside each: its recipe, its manifest, its id."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from shardtune.checkpoint.atomic import write_text
from shardtune.checkpoint.state_file import StateFile
from shardtune.config.recipe_file import read_stored
from shardtune.data.checksum import content_fault
from shardtune.errors import CheckpointError

RUN_ID = "run_id"
"""A file beside the checkpoints: the id that each of them records. Those with another id, or none, are not removed."""
RECORDS = "run"
"""The folder in a checkpoint with copies of the run's files."""
CONFIG, MANIFEST = "config.yaml", "manifest.json"
COPIED = (CONFIG, MANIFEST)
_PARSERS: Mapping[str, Callable[[str], object]] = {MANIFEST: json.loads, CONFIG: read_stored}


def copy_records(run_dir: Path, checkpoint: Path) -> None:
    """Copy a run's recipe and manifest, as far as it has them, into a checkpoint that is being written."""
    for name in COPIED:
        if (run_dir / name).is_file():
            (checkpoint / RECORDS).mkdir(exist_ok=True)
            shutil.copyfile(run_dir / name, checkpoint / RECORDS / name)


def intact_copy(checkpoint: Path, name: str) -> Path | None:
    """The copy of a run's file in a checkpoint, None if there is none or it is damaged."""
    try:
        known = StateFile.read(checkpoint)
    except CheckpointError:
        return None
    inside = f"{RECORDS}/{name}"
    if inside not in known.files or content_fault(checkpoint / inside, known.files[inside]) is not None:
        return None
    return checkpoint / inside


def is_readable(file: Path) -> bool:
    """Whether a run's recipe or manifest is there, and what it should be."""
    try:
        return isinstance(_PARSERS[file.name](file.read_text(encoding="utf-8")), dict)
    except Exception:  # whatever is wrong with it
        return False


def read_run_id(folder: Path) -> str | None:
    """The id recorded in a folder of checkpoints; None where it records none."""
    try:
        return (folder / RUN_ID).read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def write_run_id(folder: Path, known: str | None) -> str:
    """Record the id of a run in its folder of checkpoints: a known one, or else a new one."""
    run = known or uuid.uuid4().hex
    write_text(folder / RUN_ID, run + "\n")
    return run
