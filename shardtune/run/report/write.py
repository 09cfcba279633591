"""Writes `report.html`: at the end of a run, and by `shardtune report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shardtune.checkpoint.atomic import write_text
from shardtune.errors import ConfigError
from shardtune.run.display import shown_path
from shardtune.run.report.page import GENERATOR, page
from shardtune.run.stored_run import StoredRun

REPORT = "report.html"
_HEAD_BYTES = 2000


def write_report(runs: Sequence[Path], to: Path | None = None) -> Path:
    """Write a page about one or several runs, finished or not; an older page is replaced.

    Args:
        runs: their directories.
        to: the file; None: `report.html` in the directory of a single run, or in the working directory.

    Returns:
        The file.

    Raises:
        CheckpointError: one of them is not a run directory.
        ConfigError: the file exists and is none of ours, or cannot be written.
    """
    stored = [StoredRun.read(run) for run in runs]
    if len({run.name for run in stored}) < len(stored):
        stored = [replace(run, label=str(run.path)) for run in stored]
    file = to or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    _require_own(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, page(stored), durably=False)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}", where="--out") from error
    return file


def _require_own(file: Path) -> None:
    """Refuse to replace a file that is no report."""
    if not file.exists():
        return
    if file.is_file():
        with open(file, "rb") as content:
            if f'content="{GENERATOR}"'.encode() in content.read(_HEAD_BYTES):
                return
    raise ConfigError(
        f"{file} exists and is no report of shardtune", where="--out", remedy="name another file: --out FILE"
    )


def report_at_end(run_dir: Path, report: Callable[[str], None]) -> None:
    """Write the page of a run that has ended; whatever prevents it is a line of the output, not an error."""
    try:
        report(f"its curves, answers, data and recipe on one page: {shown_path(write_report([run_dir]))}")
    except Exception as error:  # of any kind: the run is complete without it
        why = f"{type(error).__name__}: {error}"
        report(f"{REPORT} is not written ({why}); shardtune report {shown_path(run_dir)} tries again")
