"""The files that are opened meanwhile, by whatever function of Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_watched: list[tuple[Path, list[str]]] = []
_hooked: list[bool] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open" or not _watched or not isinstance(arguments[0], str | os.PathLike):
        return
    path = Path(arguments[0])
    for folder, names in _watched:
        if path.is_relative_to(folder):
            names.append(path.relative_to(folder).as_posix())


@contextmanager
def opened_in(folder: Path) -> Iterator[list[str]]:
    """The names of the files below a folder that are opened inside, once for each time."""
    if not _hooked:  # one hook for the process: Python has no way to remove it
        sys.addaudithook(_note)
        _hooked.append(True)
    entry: tuple[Path, list[str]] = (folder, [])
    _watched.append(entry)
    try:
        yield entry[1]
    finally:
        _watched.remove(entry)
