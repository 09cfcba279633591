"""Adds rows of a step to a file for `data.quarantine`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from shardtune.checkpoint.atomic import write_output
from shardtune.config.paths import user_path
from shardtune.data.quarantine import KEY, line_of, read_quarantine
from shardtune.errors import ConfigError
from shardtune.run.display import shown_path
from shardtune.run.identity import CONFIG
from shardtune.run.replay.place import RowLine
from shardtune.run.replay.replay import Replay


def add_rows(found: Replay, chosen: Sequence[str], file: Path, reason: str | None) -> list[str]:
    """Add rows to a file, which is made if it is not there; returns lines for the user.

    Args:
        found: the step.
        chosen: a number, or file:number, of each row.
        file: of `data.quarantine`.
        reason: why; None: the run, the step and the loss.

    Raises:
        ConfigError: the step has no such row, or several; then nothing is written.
    """
    target = user_path(file, "--quarantine").absolute()
    lines = list({line.place: line for line in (_chosen(found, text) for text in chosen)}.values())
    known = {(one.digest, one.file) for one in read_quarantine(target)} if target.exists() else set()
    new = [line for line in lines if not {(int(line.digest, 16), name) for name in ("", _name(line))} & known]
    written = "".join(line_of(_content(found, line, reason)) for line in new)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        before = target.read_text(encoding="utf-8") if target.exists() else ""
        torn = before != "" and not before.endswith("\n")
        write_output(target, before + "\n" * torn + written)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}", where="--quarantine") from error
    told = [f"{shown_path(target)}: {len(new)} added" + (f", {len(lines) - len(new)} known" if new != lines else "")]
    return told + _how_to_use(found, target)


def _chosen(found: Replay, text: str) -> RowLine:
    """The row of a step that a user names."""
    name, _, number = text.rpartition(":")
    same = [line for line in found.rows if str(line.row) == number and line.file.endswith(name)]
    if len({line.place for line in same}) == 1:
        return same[0]
    places = ", ".join(line.place for line in same or found.rows[:8])
    more = f" and {len(found.rows) - 8} more" if not same and len(found.rows) > 8 else ""
    raise ConfigError(
        f"step {found.step} has {'several rows' if same else 'no row'} {text}: {places or 'none is numbered'}{more}",
        where=f"--row {text}",
        remedy="give the file and the number of one of them: --row file:number",
    )


def _name(line: RowLine) -> str:
    return Path(line.file).name


def _content(found: Replay, line: RowLine, reason: str | None) -> dict[str, object]:
    if reason is None:
        lost = "" if line.loss is None else f"loss {line.loss:.4g} in " if math.isfinite(line.loss) else "no loss in "
        reason = f"{lost}step {found.step} of {found.run_dir.name}"
    return {"hash": line.digest, "file": _name(line), "row": line.row, "reason": reason, "text": line.text}


def _how_to_use(found: Replay, target: Path) -> list[str]:
    override = shlex.quote(f"{KEY}={shown_path(target)}")
    return [
        f"to train without these rows: shardtune train RECIPE.yaml {override}",
        f"to continue {shown_path(found.run_dir)} without them, from its last checkpoint: shardtune train "
        f"{shlex.quote(shown_path(found.run_dir / CONFIG))} {override} 'runner.allow_changes=[{KEY}]'",
    ]
