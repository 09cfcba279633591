"""The files of one data path: a file, a pattern, a directory, rows in memory, or a data set of the Hub."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtune.config.hub_name import split_revision
from shardtune.config.shown import as_written
from shardtune.data.robot.lerobot import is_lerobot, open_lerobot
from shardtune.data.robot.recordings import RLDS, recording_name, recording_of, recording_splits
from shardtune.data.row_files import SUPPORTED, is_description, kind_of
from shardtune.data.sources import hub
from shardtune.data.sources.found_files import files_below, fixed_part, matching, same_file
from shardtune.data.sources.hub import Selection
from shardtune.data.sources.memory_rows import is_frame, records, spool_rows
from shardtune.data.sources.remote import is_remote, remote_files
from shardtune.data.sources.source import LEROBOT, SourceFile
from shardtune.errors import DataError

ANOTHER = "leave it out, or name another file in its place"
FILL = f"write rows into it, or {ANOTHER}"
_ARRAYS = (".npz", ".npy", ".tfrecord")
_CONVERT = (
    "turn robot data into a LeRobot data set with write_lerobot, one Episode(images, state, actions, task) each: "
    "docs/robot-data.md has a loop over .npz files (TFRecords are read beside the features.json of an RLDS data set)"
)
_BESIDE = re.compile(
    r"(?i)(license|readme|notice|changelog|citation|makefile|.*\.(md|rst|pdf|html|py|ipynb|sh|toml|ya?ml|cff|log|sha256|md5"
    r"|png|jpe?g|webp|gif|bmp|tiff?|mp4|avi|mov|mkv|webm|wav|mp3|flac|ogg))"
)
"""Files that stand beside rows: documentation, code, and the images, videos and sounds that rows name."""
PIPE = "is a pipe or a device, which can be read once only"
OUT_OF_PIPE = "write its rows into a file, such as rows.jsonl, and name that"
_GLOB = re.compile(r"[*?\[]")


def in_memory(spec: Any, root: Path) -> SourceFile | None:
    """Rows that are no path, written below `root` under the hash of their content; None for a path."""
    if is_frame(spec):
        spec = records(spec)
    if hub.is_dataset(spec):
        return SourceFile(hub.spool_dataset(spec, root), "parquet", "rows in memory", Path.cwd())
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        return SourceFile(spool_rows(spec, root), "jsonl", "rows in memory", Path.cwd())
    return None


@dataclass(frozen=True, slots=True)
class Search:
    """What finding files needs beside a path.

    Attributes:
        root: of the cache.
        quarantine: the file of `data.quarantine`, whose lines are no rows; None: there is none.
        report: receives a line on what is left out.
    """

    root: Path
    quarantine: Path | None
    report: Callable[[str], None]

    def is_quarantine(self, file: Path) -> bool:
        """Whether a file is that of `data.quarantine`, under whatever name."""
        return self.quarantine is not None and same_file(file, self.quarantine)

    def rows(self, files: Sequence[Path], folder: Path) -> list[Path]:
        """Those of the files below a folder that may hold rows. Raises `DataError` for a link to nothing."""
        for file in files:
            if file.is_symlink() and not file.exists():
                raise DataError(
                    f"the data file is a link to {as_written(os.readlink(file))}, which is not there",
                    where=str(file),
                    remedy="mend the link, or remove it",
                )
        left = [file for file in files if file.is_file() and not self.is_quarantine(file)]
        self._report(folder, "as the file of data.quarantine", list(filter(self.is_quarantine, files)))
        return left

    def report_own(self, folder: Path, own: Sequence[Path]) -> None:
        """Say which runs and data caches below a folder are left out."""
        self._report(folder, "as runs and data caches", own)

    def report_unknown(self, folder: Path, files: Sequence[Path]) -> None:
        """Say which files below a folder of data files are left out because their kind is not known."""
        described = [file for file in files if is_description(file)]
        self._report(folder, "as descriptions of data sets", described)
        others = [file for file in files if not _is_data(file) and not is_description(file)]
        self._report(folder, "as files of another kind", [one for one in others if not _BESIDE.fullmatch(one.name)])

    def _report(self, folder: Path, why: str, out: Sequence[Path]) -> None:
        if out:
            shown = hub.some_of(sorted(str(each.absolute()) for each in out))
            self.report(f"data: left out of {as_written(folder.absolute())}, {why}: {shown}")


def find_files(spec: Any, selection: Selection, search: Search, *, robot: bool) -> tuple[list[SourceFile], str]:
    """The files of one data path, and a name for them."""
    root = search.root
    held = in_memory(spec, root)
    if held is not None:
        return _of_split([held], selection), "memory"
    if not isinstance(spec, (str, Path)):
        raise DataError(
            f"a data path is {type(spec).__name__}, not text",
            where=f"data: {spec!r}",
            remedy="name a file or directory",
        )
    if is_remote(str(spec)):
        copies = [_file(one.path, one.label) for one in remote_files(str(spec), selection, root, search.report)]
        if len(copies) == 1:
            return _of_split(copies, selection), _stem(copies[0].path)
        named = Path(str(spec))
        return copies, _GLOB.split(named.name)[0].strip("-_.") or named.parent.name
    path = Path(spec).expanduser()
    recorded = _recording(path, selection) if path.exists() else None
    if recorded is not None:
        return [recorded], recording_name(recorded.kind, recorded.path)
    if path.is_file():
        if search.is_quarantine(path):
            raise DataError(
                "the file is that of data.quarantine, whose lines are no rows",
                where=f"data: {as_written(path)}",
                remedy=ANOTHER,
            )
        return _of_split([_file(path)], selection), _stem(path)
    if path.is_dir():
        return _directory(path, selection, search), path.resolve().name
    if _GLOB.search(str(spec)):
        folders = [folder.name for folder in path.absolute().parents if folder.name and not _GLOB.search(folder.name)]
        name = _GLOB.split(path.name)[0].strip("-_.") or next(iter(folders), "data")
        return _matches(str(path), selection, search), name
    plain, revision = split_revision(str(spec))
    name, config = hub.parse_name(plain)
    if config is not None and Path(name).is_dir():
        return _hub_files(name, config, selection, root), Path(name).name
    if hub.is_name(plain):
        folder = hub.robot_data(name, root, revision) if robot and config is None else None
        if folder is not None:
            return _directory(folder, selection, search), name.rpartition("/")[2]
        return _hub_files(name, config, selection, root, revision), name.rpartition("/")[2]
    raise _missing(path)


def _of_split(files: list[SourceFile], selection: Selection) -> list[SourceFile]:
    """The files, if the split that the recipe names is `train`, as `datasets` calls any file, or in their names."""
    split = selection.split or "train"
    for file in files:
        if split != "train" and split not in file.path.name:
            raise DataError(
                f"a file has no splits, so there is no {split!r}",
                where=file.label,
                remedy="leave split out; for a part of the rows use max_samples, to hold some out data.eval_split",
            )
    return files


def _stem(path: Path) -> str:
    return path.name.partition(".")[0] or path.name


def _missing(path: Path) -> DataError:
    if path.exists():
        return DataError(f"{as_written(path)} {PIPE}", where="data", remedy=OUT_OF_PIPE)
    siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    if near:
        remedy = f"did you mean {path.parent / near[0]}?"
    elif siblings:
        remedy = "check the name; relative paths are relative to the recipe's directory"
    else:
        remedy = f"the directory {path.parent} does not exist or is empty either"
    return DataError(f"the data file {as_written(path)} does not exist", where="data", remedy=remedy)


def _file(path: Path, label: str | None = None) -> SourceFile:
    kind = kind_of(path)
    if kind is None:
        raise DataError(
            f"the kind of the file {as_written(path.name)} is not known",
            where=label or str(path),
            remedy=_CONVERT if path.suffix.lower() in _ARRAYS else f"use {SUPPORTED}",
        )
    if is_description(path):
        raise DataError(
            f"the file {path.name} describes a data set, and holds no rows",
            where=label or str(path),
            remedy="name the files of its rows, or their directory, of which such files are left out",
        )
    if path.stat().st_size == 0:
        raise DataError("the data file is empty", where=label or str(path), remedy=FILL)
    return SourceFile(path, kind, label or str(path))


def _matches(pattern: str, selection: Selection, search: Search) -> list[SourceFile]:
    found = matching(pattern)
    search.report_own(fixed_part(pattern), found.own)
    files = search.rows(found.files, fixed_part(pattern))
    if not files:
        raise DataError(
            f"nothing matches {as_written(pattern)}", where="data", remedy="check the pattern; ** crosses directories"
        )
    recorded = [_recording(path, selection) for path in files]
    known = [one for one in recorded if one is not None]
    if len(known) == len(files):
        return known
    folder, split = fixed_part(pattern), selection.split
    are_of_it = split is None or (split != "train" and all(split in path.name for path in files))
    if not are_of_it and len(files) > 1 and hub.names_splits(files, folder):
        return [_file(path) for path in hub.choose_files(files, folder, selection, search.report)]
    return _of_split([_file(path) for path in files], selection)


def _recording(path: Path, selection: Selection) -> SourceFile | None:
    """A recording of robots, of which a split is taken where it has splits that are usual or named; None for others."""
    if is_lerobot(path):
        return None
    found = recording_of(path)
    if found is None:
        return None
    kind, place = found
    splits, root = recording_splits(kind, place), place if place.is_dir() else None
    if not splits:
        return _of_split([SourceFile(place, kind, str(place), root)], selection)[0]
    if selection.split is None and kind != RLDS and "train" not in splits:  # any names of parts
        return SourceFile(place, kind, str(place), root)
    part = hub.choose_split(splits, selection, str(place))
    return SourceFile(place, kind, f"{place} ({part})", root, part)


def _directory(path: Path, selection: Selection, search: Search) -> list[SourceFile]:
    """A directory written by `datasets`, one laid out as on the Hub, or one of data files."""
    if is_lerobot(path):
        return [_lerobot(path, selection)]
    saved = hub.saved_files(path, selection)
    if saved is not None:
        return [SourceFile(file, "arrow", str(file)) for file in saved]
    if hub.has_card(path):
        return _hub_files(str(path), None, selection, search.root)
    below = files_below(path, _is_hidden)
    search.report_own(path, [own for own in below.own if any(map(_is_data, files_below(own, _is_hidden).files))])
    found = search.rows([file for file in below.files if _is_data(file)], path)
    if not found:
        arrays = any(file.suffix.lower() in _ARRAYS for file in below.files)
        remedy = _CONVERT if arrays else f"files named {SUPPORTED}"
        raise DataError("the directory holds no data file", where=str(path), remedy=remedy)
    search.report_unknown(path, below.files)
    return [_file(file) for file in hub.choose_files(found, path, selection, search.report)]


def _lerobot(path: Path, selection: Selection) -> SourceFile:
    described = open_lerobot(path)
    splits, whole = described.splits, f"0:{len(described.episodes)}"
    part, label = "", str(path)
    if selection.split is not None or any(one != whole for one in splits.values()):
        name = hub.choose_split(list(splits), selection, str(path))
        part = "" if splits[name] == whole else splits[name]
        label = f"{path} ({name}, episodes {part})" if part else label
    return SourceFile(path, LEROBOT, label, path, part)


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _is_data(file: Path) -> bool:
    return kind_of(file) is not None and not is_description(file)


def _hub_files(
    name: str, config: str | None, selection: Selection, root: Path, revision: str | None = None
) -> list[SourceFile]:
    label, files = hub.load_files(name, config, selection, root, revision)
    return [SourceFile(file, "arrow", f"{label} {file.name}" if len(files) > 1 else label) for file in files]
