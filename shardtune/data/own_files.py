"""Runs and data caches below a directory of rows or of a model: they are read from there, not a part of it.

Whoever trains in the directory of the data has `runs/` in it, with answers to evaluation prompts as JSONL. They are no
training rows, and a run that writes them does not change its own inputs.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

CACHE_TAG = "CACHEDIR.TAG"
"""Marks a cache for programs that make backups (https://bford.info/cachedir)."""
CACHE_NOTE = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# The data cache of shardtune. What is missing is made again, so it may be deleted and need not be saved.\n"
)
_SIGNS = ((CACHE_TAG, "shardtune"), ("manifest.json", '"shardtune"'))
"""Files in a folder of ours, with what is in the beginning of each."""
_BEGINNING = 4096


def is_own(folder: Path) -> bool:
    """Whether a folder is a data cache or the directory of a run."""
    for name, sign in _SIGNS:
        with suppress(OSError), open(folder / name, encoding="utf-8", errors="replace") as file:
            if sign in file.read(_BEGINNING):
                return True
    return False


def tag_cache(root: Path) -> None:
    """Mark a data cache."""
    with suppress(FileExistsError), open(root / CACHE_TAG, "x", encoding="utf-8") as file:
        file.write(CACHE_NOTE)
