"""What ranks leave for their launcher in a directory: their exit codes, for one that is not their parent."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

EXIT_DIR = "SHARDTUNE_EXIT_DIR"
"""The directory in which each rank notes its exit code."""
REPORT_DIR = "SHARDTUNE_REPORT_DIR"
"""The directory to which a rank writes its error, for the launcher to show."""
REPORTS = "shardtune-rank"
"""How the name of such a directory begins."""


def note_exit_code(code: int) -> None:
    """Note this rank's exit code as it ends, if somebody reads it."""
    folder = os.environ.get(EXIT_DIR)
    if folder is not None:
        with suppress(OSError):  # the launcher is gone
            file = Path(folder, os.environ.get("RANK", "0"))
            partial = file.with_suffix(".partial")
            partial.write_text(str(code))
            partial.replace(file)


def read_exit_codes(folder: Path) -> dict[int, int]:
    """By rank."""
    return {int(file.name): int(file.read_text()) for file in folder.iterdir() if file.name.isdigit()}


def remove_reports() -> None:
    """Remove the directory of the reports to a launcher that is gone, which removes it otherwise."""
    folder = Path(os.environ.get(REPORT_DIR, ""))
    if folder.name.startswith(REPORTS):
        shutil.rmtree(folder, ignore_errors=True)
