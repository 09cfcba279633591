"""The files below a directory and those that a pattern matches: links are followed, and no folder counts twice."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from shardtune.data.own_files import is_own


@dataclass(frozen=True, slots=True)
class Found:
    """Files, and what was left out beside them.

    Attributes:
        files: in order; links to nothing are among them.
        own: runs and data caches of ours, whose files are left out.
    """

    files: Sequence[Path]
    own: Sequence[Path]


def files_below(folder: Path, skip: Callable[[str], bool], *, links: bool = True) -> Found:
    """The files below a directory, in the order of their paths.

    Links to directories are followed once all that lies in the directory itself is known, so that a link back, or a
    second one to the same place, adds nothing.

    Args:
        folder: counts whatever it is.
        skip: whether a file or folder of this name does not count.
        links: whether links to directories are followed.
    """
    return _below([folder], skip, links=links)


def _below(folders: Sequence[Path], skip: Callable[[str], bool], *, links: bool = True) -> Found:
    """As `files_below`, of several directories: what lies in one of them counts there, not where a link leads to it."""
    files, own = list[Path](), list[Path]()
    seen, tops = set[tuple[int, int]](), list(folders)
    for top in tops:  # which grows by the links that are found
        for place, inner, names in os.walk(top):
            status = os.stat(place)
            if (status.st_dev, status.st_ino) in seen:
                inner.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            counted = sorted(Path(place, name) for name in inner if not skip(name))
            ours = {path for path in counted if is_own(path)}
            own += sorted(ours)
            others = [path for path in counted if path not in ours]
            inner[:] = [path.name for path in others]  # of which links are not entered
            tops += [path for path in others if links and path.is_symlink()]
            files += [Path(place, name) for name in names if not skip(name)]
    return Found(sorted(files), own)


def matching(pattern: str) -> Found:
    """The files that a pattern matches, in the order of their names, without hidden ones.

    What `**` crosses is as `files_below` finds it; of runs and data caches of ours, those with such a file are named.
    """
    parts = _parts(pattern)
    if "**" not in parts:
        matches = [Path(match) for match in sorted(glob.glob(str(Path(*parts))))]
        return Found([path for path in matches if not path.name.startswith(".") and not path.is_dir()], [])
    named = parts.index("**")  # whoever writes runs/*/… before it means the runs
    homes = [Path(match) for match in glob.glob(str(Path(*parts[:named])))]
    hidden = any(part.startswith(".") for part in parts[named:])

    def skip(name: str) -> bool:
        return name.startswith(".") and not hidden

    def fits(file: Path) -> bool:
        return not file.name.startswith(".") and _fits(file.parts[named:], parts[named:])

    found = _below(sorted(homes, key=lambda home: (home.is_symlink(), str(home))), skip)
    own = [folder for folder in found.own if any(map(fits, files_below(folder, skip).files))]
    return Found(sorted(filter(fits, found.files), key=str), own)


def _fits(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether the names of a path fit the parts of a pattern, as `glob` has it."""
    if not parts:
        return not names
    if parts[0] == "**":
        open_names = next((place for place, name in enumerate(names) if name.startswith(".")), len(names))
        return any(_fits(names[place:], parts[1:]) for place in range(open_names + 1))
    if not names or (names[0].startswith(".") and not parts[0].startswith(".")):
        return False
    return fnmatchcase(names[0], parts[0]) and _fits(names[1:], parts[1:])


def _parts(pattern: str) -> list[str]:
    """The parts of a pattern; brackets in the name of a folder that is there are no wildcards: data[1]/*.jsonl."""
    written = Path(pattern).parts
    folder = len(fixed_part(pattern).parts)
    return [*map(glob.escape, written[:folder]), *written[folder:]]


def fixed_part(pattern: str) -> Path:
    """The folders of a pattern before the first one with a wildcard."""
    found = Path()
    for part in Path(pattern).parts:
        if glob.has_magic(part) and not (found / part).is_dir():
            break
        found /= part
    return found


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file that is there."""
    try:
        return one.samefile(other)
    except OSError:
        return False
