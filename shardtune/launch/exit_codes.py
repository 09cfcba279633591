"""The exit codes of ranks, noted for a launcher that is not their parent."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

EXIT_DIR = "SHARDTUNE_EXIT_DIR"
"""The directory in which each rank notes its exit code."""


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
