"""Resolves the recipe's data paths to files: files, lists, globs, directories, data sets of the Hub."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel

from shardtune.config.hub_name import split_revision
from shardtune.config.shown import as_written
from shardtune.data.cache_directory import cache_root, print_line
from shardtune.data.encoder import FrameOptions, Row, RowError, bad_row, caused_by
from shardtune.data.robot.frames import Origin, describe_frame
from shardtune.data.robot.lerobot import is_lerobot, open_lerobot, unread_images
from shardtune.data.robot.lerobot import unread_columns as lerobot_unread
from shardtune.data.robot.lerobot_frames import read_lerobot
from shardtune.data.robot.recordings import (
    RECORDINGS,
    RLDS,
    read_recording,
    recording_name,
    recording_of,
    recording_roles,
    recording_splits,
)
from shardtune.data.robot.representation import Representation
from shardtune.data.robot.tables import read_frames, unread_columns
from shardtune.data.row_files import SUPPORTED, Chunk, NumberedRow, kind_of, read_chunks
from shardtune.data.row_formats import (
    FORMATS_BY_NAME,
    ChatTitle,
    check_columns,
    format_of,
    in_format,
    read_example,
    rename_columns,
    replaced_columns,
    unread_keys,
)
from shardtune.data.row_shapes import CHOSEN, REJECTED, shown_key
from shardtune.data.sources import hub
from shardtune.data.sources.fingerprint import fingerprints, outline
from shardtune.data.sources.found_files import files_below, fixed_part, matching, same_file
from shardtune.data.sources.hub import Purpose, Selection
from shardtune.data.sources.memory_rows import is_frame, is_table, records, spool_rows
from shardtune.data.sources.remote import is_remote, remote_files
from shardtune.data.sources.transform import Transform, load_transform
from shardtune.errors import DataError

LEROBOT = "lerobot"
"""The kind of a directory of robot data, which is one file to the rest."""
ROBOT_KINDS = (LEROBOT, *RECORDINGS)
"""The kinds of robot data that are no tables."""
ENTRY_KEYS = ("path", "name", "weight", "max_samples", "columns", "format", "split")
_SNIFFED_ROWS = 20
_SHOWN_KEYS = 5
_ONE_SIDE = (
    "rows of preferences are trained by supervised fine-tuning, on the answer that is read; "
    f"{REJECTED} ones are in no loss (losses of preferences are methods on the engine: docs/your-method.md)"
)
_FILL = "write rows into it, or take it out of data.train_data_paths and data.eval_data_paths"
_ARRAYS = (".npz", ".npy", ".tfrecord")
_CONVERT = (
    "turn robot data into a LeRobot data set with write_lerobot, one Episode(images, state, actions, task) each: "
    "docs/robot-data.md has a loop over .npz files (TFRecords are read beside the features.json of an RLDS data set)"
)
_GLOB = re.compile(r"[*?\[]")


class DataOptions(Protocol):
    """The keys of the recipe's `data` section that resolving sources needs."""

    @property
    def columns(self) -> Mapping[str, str]: ...
    @property
    def transform(self) -> str | None: ...
    @property
    def cache_dir(self) -> str | Path | None: ...
    @property
    def on_bad_row(self) -> str: ...
    @property
    def quarantine(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of rows; `label` is its name in messages, `kind` how it is read.

    Attributes:
        root: base of the relative paths in its rows; None: its own folder.
        part: of a LeRobot data set only these episodes, `first:stop`; of a recording, a split; "": all.
    """

    path: Path
    kind: str
    label: str
    root: Path | None = None
    part: str = ""

    @property
    def folder(self) -> Path:
        return (self.path.parent if self.root is None else self.root).absolute()


@dataclass(frozen=True, slots=True)
class Source:
    """One entry of the recipe's data paths.

    Attributes:
        name: unique among the sources; in logs and in `TokenDataset.sources`.
        files: its files, in the order in which their rows count.
        weight: how often its rows occur in an epoch.
        max_samples: only this many usable rows, from the start in file order.
        columns: names known here -> the file's own names.
        format: the row format the recipe names, None to recognise each row.
        title: the format of the first rows, for the log.
        transform: applied to each row before `columns`.
        frames: how robot data become rows; None: rows are read as they are in the files.
        representation: how the actions of robot data are represented in rows; None: they are absolute.
        is_text: rows have one of the formats of text and chats, whose keys are known.
    """

    name: str
    files: tuple[SourceFile, ...]
    weight: float = 1.0
    max_samples: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    format: str | None = None
    title: str = ""
    transform: Transform | None = None
    frames: FrameOptions | None = None
    representation: Representation | None = None
    is_text: bool = False

    def chunks(self, file: SourceFile) -> Iterator[Chunk]:
        """The rows of one of its files, before `transform`."""
        if self.frames is None:
            return read_chunks(file.path, file.kind)
        if file.kind == LEROBOT:
            return read_lerobot(file.path, file.part, self.columns, self.frames, self.name)
        if file.kind in RECORDINGS:
            prefix = self.prefix(file)
            return read_recording(file.kind, file.path, file.part, self.columns, self.frames, self.name, prefix)
        origin = Origin(self.name, file.label, file.folder)
        return read_frames(read_chunks(file.path, file.kind), self.columns, self.frames, origin)

    def prefix(self, file: SourceFile) -> str:
        """What distinguishes the episodes of a recording from those of others, whose numbers begin at 0, too."""
        return f"{file.path.name}:" if len(self.files) > 1 else ""

    def rows(self, file: SourceFile) -> Iterator[NumberedRow]:
        """Each row of one of its files with its number, before `transform`."""
        for chunk in self.chunks(file):
            yield from chunk.rows()


def resolve_sources(
    spec: object,
    data: DataOptions,
    *,
    purpose: Purpose = "train",
    name_format: Callable[[Row], str] | None = None,
    frames: FrameOptions | None = None,
    report: Callable[[str], None] = print_line,
) -> list[Source]:
    """The sources that `data.train_data_paths` or `data.eval_data_paths` names, each checked by its first rows.

    Args:
        spec: a file, directory, glob or Hub name; an entry `{path, name, weight, …}`; rows in memory (a list of
            dictionaries, a `datasets.Dataset` or a `pandas.DataFrame`); or a list of these.
        purpose: which split is taken where several exist and none is named.
        name_format: names a row's format for the log, raising `RowError`; by default the formats of `formats`.
        frames: how robot data become rows; None: the data are not robot data.
        report: receives one line per source.
    """
    transform = load_transform(data.transform) if data.transform else None
    entries = [_entry(item) for item in _items(spec, f"{purpose}_data")]
    place = _Place(cache_root(data.cache_dir), Path(data.quarantine) if data.quarantine else None, report)
    sources: list[Source] = []
    for entry in entries:
        if purpose == "eval" and entry.get("weight") not in (None, 1.0):
            raise DataError(
                f"the weight {entry['weight']} has no effect: every row is evaluated once",
                where=f"data.eval_data_paths: {as_written(entry['path'])}",
                remedy="leave it out; max_samples takes fewer rows of a source",
            )
        selection = Selection(entry.get("name"), entry.get("split"), purpose)
        files, name = _find(entry["path"], selection, place, robot=frames is not None)
        name = _unique(entry.get("name") or name, [source.name for source in sources])
        source = Source(
            name=name,
            files=tuple(files),
            weight=1.0 if entry.get("weight") is None else float(entry["weight"]),
            max_samples=entry.get("max_samples"),
            columns={**data.columns, **(entry.get("columns") or {})},
            format=entry.get("format"),
            transform=transform,
            frames=frames,
        )
        _check_kind(source)
        if frames is not None and frames.representation is not None:
            source = replace(source, representation=frames.representation.named(action_names(source)))
        title, row, replaced = _check_first_rows(source, name_format or _title(source), data.on_bad_row)
        is_text = frames is None and (name_format is None or isinstance(name_format, ChatTitle))
        sources.append(replace(source, title=title, is_text=is_text))
        if is_text:
            check_columns(source.columns)
        keys = unread_keys(row, format_of(row, source.format)) if is_text else _unread_columns(source)
        number = f"{len(files)} file{'s' if len(files) > 1 else ''}"
        report(f"data: {name}: {title}, {number} ({files[0].label}){_not_read([*replaced, *keys])}")
        if is_text and REJECTED in keys and CHOSEN in (*keys, *source.columns.values()):
            report(f"data: {name}: {_ONE_SIDE}")
        images = unread_images(files[0].path, source.columns) if files[0].kind == LEROBOT else []
        if images:
            report(
                f"data: {name}: not read are {', '.join(images)} (maps of depth, or data.columns names other cameras)"
            )
        if files[0].kind in RECORDINGS and frames is not None:
            roles, keys = recording_roles(files[0].kind, files[0].path, files[0].part, source.columns, frames)
            report(f"data: {name}: {roles}{_not_read(keys)}")
    return sources


def _not_read(names: Sequence[str]) -> str:
    return f"; not read: {hub.some_of([shown_key(name) for name in names], _SHOWN_KEYS)}" if names else ""


def _unread_columns(source: Source) -> list[str]:
    """The columns of frames that are not read; the arrays of recordings are named with their roles."""
    file = source.files[0]
    if source.frames is None or file.kind in RECORDINGS:
        return []
    if file.kind == LEROBOT:
        return lerobot_unread(file.path, source.columns, source.frames)
    return unread_columns(read_chunks(file.path, file.kind), source.columns, source.frames)


def data_fingerprints(
    spec: object, root: Path, *, outlines: bool = False, quarantine: str | None = None
) -> list[tuple[str, str | None]]:
    """The name and content hash of everything that a data key names or holds, without reading rows.

    Args:
        spec: as for `resolve_sources`; None: nothing.
        root: of the cache, in which rows in memory are stored under the hash of their content.
        outlines: hash a few pieces of each file, and not all of it.
        quarantine: the file of `data.quarantine`, which is no part of a directory or pattern.
    """
    without = Path(quarantine) if quarantine else None
    found: list[tuple[str, str | None]] = []
    for item in _items(spec, "data") if spec is not None else ():
        path = _entry(item)["path"]
        held = _in_memory(path, root)
        if held is not None:
            found.append((held.label, held.path.stem))
        elif outlines:
            found.append((str(path), _outline(Path(path), without)))
        else:
            found += [(str(path), file["key"]) for file in fingerprints([str(path)], root, without)]
    return found


def _outline(path: Path, without: Path | None) -> str | None:
    try:
        return outline(path, without)
    except OSError as error:
        return f"unreadable ({error.strerror})"


def action_names(source: Source) -> list[str] | None:
    """The names of the action's dimensions, where the data set has them."""
    for file in source.files:
        if file.kind == LEROBOT:
            described = open_lerobot(file.path)
            return described.names(described.columns(source.columns).require("action"))
    return None


def _check_kind(source: Source) -> None:
    label = source.files[0].label
    kind = source.files[0].kind
    if source.frames is None and kind in ROBOT_KINDS:
        raise DataError(
            f"this is a robot data set ({'LeRobot' if kind == LEROBOT else kind}), and the model takes no such rows",
            where=label,
            remedy="set actor.model.model_type to vision_language_action, or name other data",
        )
    if source.frames is not None and source.format is not None:
        raise DataError(
            f"the format {source.format!r} is for text, and the model takes robot data",
            where=label,
            remedy="leave format out; columns gives the role of each column",
        )


def named_sets(spec: object) -> dict[str, object]:
    """`data.eval_data_paths` by name: what the recipe names, or everything under the name ""; nothing for null."""
    hub.refuse_container(spec)
    if isinstance(spec, Mapping) and "path" not in spec:
        return dict(spec)
    return {} if spec is None else {"": spec}


# -- data paths ----------------------------------------------------------------------------------------------------


def _items(spec: object, where: str) -> list[object]:
    hub.refuse_container(spec)
    if isinstance(spec, Sized) and not isinstance(spec, (str, Mapping)) and not len(spec):
        raise DataError(f"the {_kind_of(spec)} of rows is empty", where=where, remedy="give it rows")
    if isinstance(spec, (str, Path, Mapping, BaseModel)) or is_table(spec):
        return [spec]
    if not isinstance(spec, Sequence):
        raise DataError(
            f"data cannot be read from {_kind_of(spec)}",
            where=where,
            remedy="name a file, directory, glob or Hub name, or give a list of dictionaries, a datasets.Dataset or a "
            "pandas.DataFrame",
        )
    rows = [item for item in spec if isinstance(item, Mapping) and not _is_entry(item)]
    if rows and len(rows) < len(spec):
        raise DataError("the list mixes rows and paths", where="data", remedy="give either rows or paths")
    return [spec] if rows else list(spec)


def _kind_of(spec: object) -> str:
    return type(spec).__name__


def _is_entry(item: Mapping[str, object]) -> bool:
    return "path" in item and set(item) <= set(ENTRY_KEYS)


def _entry(item: object) -> dict[str, Any]:
    if isinstance(item, BaseModel):
        item = item.model_dump()
    if not isinstance(item, Mapping):
        return {"path": item}
    unknown = [key for key in item if key not in ENTRY_KEYS]
    if unknown or item.get("path") is None:
        what = f"a data entry has the unknown key {unknown[0]!r}" if unknown else "a data entry names no path"
        raise DataError(what, where=f"data: {dict(item)}", remedy=f"its keys are {', '.join(ENTRY_KEYS)}")
    entry = dict(item)
    where = f"data: {entry['path']}"
    form, most = entry.get("format"), entry.get("max_samples")
    if form is not None and form not in FORMATS_BY_NAME:
        raise DataError(f"the format {form!r} is not known", where=where, remedy=f"one of {', '.join(FORMATS_BY_NAME)}")
    if most is not None and (not isinstance(most, int) or most < 1):
        raise DataError(f"max_samples is {most!r}", where=where, remedy="a whole number of at least 1, or null")
    weight = entry.get("weight")
    if weight is not None and (not isinstance(weight, (int, float)) or not 0 < weight < float("inf")):
        raise DataError(f"weight is {weight!r}", where=where, remedy="a number above 0")
    return entry


def _unique(name: str, taken: list[str]) -> str:
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}-{count}"
    return candidate


def _in_memory(spec: Any, root: Path) -> SourceFile | None:
    """Rows that are no path, written below `root` under the hash of their content; None for a path."""
    if is_frame(spec):
        spec = records(spec)
    if hub.is_dataset(spec):
        return SourceFile(hub.spool_dataset(spec, root), "parquet", "rows in memory", Path.cwd())
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        return SourceFile(spool_rows(spec, root), "jsonl", "rows in memory", Path.cwd())
    return None


@dataclass(frozen=True, slots=True)
class _Place:
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

    def _report(self, folder: Path, why: str, out: Sequence[Path]) -> None:
        if out:
            shown = hub.some_of(sorted(str(each.absolute()) for each in out))
            self.report(f"data: left out of {as_written(folder.absolute())}, {why}: {shown}")


def _find(spec: Any, selection: Selection, place: _Place, *, robot: bool) -> tuple[list[SourceFile], str]:
    """The files of one data path, and a name for them."""
    root = place.root
    held = _in_memory(spec, root)
    if held is not None:
        return _of_split([held], selection), "memory"
    if not isinstance(spec, (str, Path)):
        raise DataError(
            f"a data path is {type(spec).__name__}, not text",
            where=f"data: {spec!r}",
            remedy="name a file or directory",
        )
    if is_remote(str(spec)):
        copies = [_file(one.path, one.label) for one in remote_files(str(spec), selection, root, place.report)]
        if len(copies) == 1:
            return _of_split(copies, selection), _stem(copies[0].path)
        named = Path(str(spec))
        return copies, _GLOB.split(named.name)[0].strip("-_.") or named.parent.name
    path = Path(spec).expanduser()
    recorded = _recording(path, selection) if path.exists() else None
    if recorded is not None:
        return [recorded], recording_name(recorded.kind, recorded.path)
    if path.is_file():
        if place.is_quarantine(path):
            raise DataError(
                "the file is that of data.quarantine, whose lines are no rows",
                where=f"data: {as_written(path)}",
                remedy="take it out of data.train_data_paths and data.eval_data_paths",
            )
        return _of_split([_file(path)], selection), _stem(path)
    if path.is_dir():
        return _directory(path, selection, place), path.resolve().name
    if _GLOB.search(str(spec)):
        folders = [folder.name for folder in path.absolute().parents if folder.name and not _GLOB.search(folder.name)]
        name = _GLOB.split(path.name)[0].strip("-_.") or next(iter(folders), "data")
        return _matches(str(path), selection, place), name
    plain, revision = split_revision(str(spec))
    name, config = hub.parse_name(plain)
    if config is not None and Path(name).is_dir():
        return _hub_files(name, config, selection, root), Path(name).name
    if hub.is_name(plain):
        folder = hub.robot_data(name, root, revision) if robot and config is None else None
        if folder is not None:
            return _directory(folder, selection, place), name.rpartition("/")[2]
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
    if path.stat().st_size == 0:
        raise DataError("the data file is empty", where=label or str(path), remedy=_FILL)
    return SourceFile(path, kind, label or str(path))


def _matches(pattern: str, selection: Selection, place: _Place) -> list[SourceFile]:
    found = matching(pattern)
    place.report_own(fixed_part(pattern), found.own)
    files = place.rows(found.files, fixed_part(pattern))
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
        return [_file(path) for path in hub.choose_files(files, folder, selection, place.report)]
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


def _directory(path: Path, selection: Selection, place: _Place) -> list[SourceFile]:
    """A directory written by `datasets`, one laid out as on the Hub, or one of data files."""
    if is_lerobot(path):
        return [_lerobot(path, selection)]
    saved = hub.saved_files(path, selection)
    if saved is not None:
        return [SourceFile(file, "arrow", str(file)) for file in saved]
    if hub.has_card(path):
        return _hub_files(str(path), None, selection, place.root)
    below = files_below(path, _is_hidden)
    place.report_own(path, [own for own in below.own if any(map(_is_data, files_below(own, _is_hidden).files))])
    found = place.rows([file for file in below.files if _is_data(file)], path)
    if not found:
        arrays = any(file.suffix.lower() in _ARRAYS for file in below.files)
        remedy = _CONVERT if arrays else f"files named {SUPPORTED}"
        raise DataError("the directory holds no data file", where=str(path), remedy=remedy)
    return [_file(file) for file in hub.choose_files(found, path, selection, place.report)]


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
    return kind_of(file) is not None


def _hub_files(
    name: str, config: str | None, selection: Selection, root: Path, revision: str | None = None
) -> list[SourceFile]:
    label, files = hub.load_files(name, config, selection, root, revision)
    return [SourceFile(file, "arrow", f"{label} {file.name}" if len(files) > 1 else label) for file in files]


# -- the first rows ------------------------------------------------------------------------------------------------


def _title(source: Source) -> Callable[[Row], str]:
    def read(row: Row) -> str:
        if source.frames is not None:
            return describe_frame(row)
        read_example(row, source.format)
        return format_of(row, source.format).title

    return read


def prepare_row(row: Row, source: Source) -> Row | None:
    """The encoder's input for a row: transformed, its columns renamed; None if the transform drops it.

    The columns of robot data are mapped earlier, when frames are built, and their actions are converted last.
    """
    prepared = _transformed(row, source)
    return None if prepared is None else _in_columns(prepared, source)


def _transformed(row: Row, source: Source) -> Row | None:
    return row if source.transform is None else source.transform.applied(row)


def _in_columns(prepared: Row, source: Source) -> Row:
    """A transformed row under the names that encoders know, with its actions as they are represented."""
    if source.frames is None:
        return rename_columns(prepared, source.columns)
    if source.representation is None:
        return prepared
    describe_frame(prepared)
    return source.representation.converted(prepared)


def usable_rows(source: Source) -> Iterator[Row]:
    """The rows of a source as encoders get them, without those that cannot be used or that the transform drops."""
    for file in source.files:
        for _, row in source.rows(file):
            try:
                prepared = None if isinstance(row, RowError) else prepare_row(row, source)
            except Exception as error:
                caused_by(error, row)
                continue
            if prepared is not None:
                yield prepared


def _check_first_rows(source: Source, title: Callable[[Row], str], on_bad_row: str) -> tuple[str, Row, list[str]]:
    """The first row, or with `on_bad_row: skip` the first that can be used, after its format.

    Returns:
        The format, the row, and the columns in whose place `data.columns` puts others.
    """
    first: DataError | None = None
    for file in source.files:
        seen = 0
        for number, row in source.rows(file):
            seen += 1
            try:
                if isinstance(row, RowError):
                    raise row
                changed = _transformed(row, source)
                if changed is not None:
                    prepared = _in_columns(changed, source)
                    named = prepared if source.format is None else in_format(prepared, source.format)
                    replaced = replaced_columns(changed, source.columns) if source.frames is None else []
                    return title(named), prepared, replaced
            except Exception as error:
                first = first or bad_row(file.label, number, caused_by(error, row).reason)
                if on_bad_row == "fail":
                    raise first from error
            if seen == _SNIFFED_ROWS:
                break
        if seen == 0:
            raise DataError("the data file holds no rows", where=file.label, remedy=_FILL)
    raise first or DataError(
        f"data.transform drops each of the first {_SNIFFED_ROWS} rows",
        where=source.files[0].label,
        remedy="let it return the rows that are to be kept, None only for the others",
    )
