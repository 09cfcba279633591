"""The files below a directory and those that a pattern matches: links are followed, and no folder counts twice."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtune.data.own_files import OwnFolders, is_own


@dataclass(frozen=True, slots=True)
class Found:
    """Files, and what was left out beside them.

    Attributes:
        files: in order; links to nothing are among them.
        own: runs and data caches of ours, whose files are left out.
    """

    files: Sequence[Path]
    own: Sequence[Path]


def files_below(folder: Path, skip: Callable[[str], bool]) -> Found:
    """The files below a directory, in the order of their paths.

    Links to directories are followed once all that lies in the directory itself is known, so that a link back, or a
    second one to the same place, adds nothing.

    Args:
        folder: counts whatever it is.
        skip: whether a file or folder of this name does not count.
    """
    files, own = list[Path](), list[Path]()
    seen, tops = set[tuple[int, int]](), [folder]
    for top in tops:  # which grows by the links that are found
        for place, folders, names in os.walk(top):
            status = os.stat(place)
            if (status.st_dev, status.st_ino) in seen:
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            inner = sorted(Path(place, name) for name in folders if not skip(name))
            ours = {path for path in inner if is_own(path)}
            own += sorted(ours)
            others = [path for path in inner if path not in ours]
            folders[:] = [path.name for path in others]  # of which links are not entered
            tops += [path for path in others if path.is_symlink()]
            files += [Path(place, name) for name in names if not skip(name)]
    return Found(sorted(files), own)


def matching(pattern: str) -> Found:
    """The files that a pattern matches, in the order of their names, without hidden ones.

    What `**` crosses may be a run or a data cache of ours, which is left out, and a link to a folder that is crossed
    anyway, of which each file counts once.
    """
    matches = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]
    files = [path for path in matches if not path.name.startswith(".") and not path.is_dir()]
    parts = Path(pattern).parts
    if "**" not in parts:
        return Found(files, [])
    named = parts.index("**")  # whoever writes runs/*/… before it means the runs
    homes: dict[Path, OwnFolders] = {}
    left = list[Path]()
    for file in _once(files, fixed_part(pattern)):
        home = Path(*file.parts[:named]).absolute()
        if homes.setdefault(home, OwnFolders(home)).of(file.absolute()) is None:
            left.append(file)
    return Found(left, [own for folders in homes.values() for own in folders.found()])


def _once(files: Sequence[Path], base: Path) -> list[Path]:
    """The files without those that links to folders lead to again; of a file's paths the one without a link counts."""
    real, folders = os.path.realpath(base), {file.parent: os.path.realpath(file.parent) for file in files}

    def rank(file: Path) -> tuple[bool, int, Path]:
        plain = os.path.normpath(os.path.join(real, os.path.relpath(file.parent, base)))
        return plain != folders[file.parent], len(file.parts), file

    kept: dict[tuple[str, str], Path] = {}
    for file in files:
        key = (folders[file.parent], file.name)
        kept[key] = min(kept.get(key, file), file, key=rank)
    chosen = set(kept.values())
    return [file for file in files if file in chosen]


def fixed_part(pattern: str) -> Path:
    """The folders of a pattern before the first one with a wildcard."""
    parts = Path(pattern).parts
    return Path(*parts[: next((place for place, part in enumerate(parts) if glob.has_magic(part)), len(parts))])


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file that is there."""
    try:
        return one.samefile(other)
    except OSError:
        return False
