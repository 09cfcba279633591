"""Resolves the recipe's data paths to sources, each checked by its first rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from shardtune.config.shown import as_written
from shardtune.data.cache_directory import cache_root, print_line
from shardtune.data.encoder import FrameOptions, Row, RowError, bad_row, caused_by
from shardtune.data.robot.frames import describe_frame
from shardtune.data.robot.lerobot import unread_columns as lerobot_unread
from shardtune.data.robot.lerobot import unread_images
from shardtune.data.robot.recordings import RECORDINGS, recording_roles
from shardtune.data.robot.tables import unread_columns
from shardtune.data.row_files import read_chunks
from shardtune.data.row_formats import (
    ChatTitle,
    check_columns,
    check_columns_read,
    format_of,
    has_turns,
    in_format,
    read_example,
    replaced_columns,
    unread_keys,
)
from shardtune.data.row_shapes import CHOSEN, REJECTED, shown_key
from shardtune.data.sources import hub
from shardtune.data.sources.data_path import FILL, Search, find_files, in_memory
from shardtune.data.sources.entries import entry_of, items_of, unique_name
from shardtune.data.sources.fingerprint import fingerprints, outline
from shardtune.data.sources.hub import Purpose, Selection
from shardtune.data.sources.source import LEROBOT, ROBOT_KINDS, Source, action_names, in_columns, transformed
from shardtune.data.sources.transform import load_transform
from shardtune.errors import DataError

_SNIFFED_ROWS = 20
_SHOWN_KEYS = 5
_ONE_SIDE = (
    "rows of preferences are trained by supervised fine-tuning, on the answer that is read; "
    f"{REJECTED} ones are in no loss (losses of preferences are methods on the engine: docs/your-method.md)"
)


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
    entries = [entry_of(item) for item in items_of(spec, f"{purpose}_data")]
    search = Search(cache_root(data.cache_dir), Path(data.quarantine) if data.quarantine else None, report)
    sources: list[Source] = []
    for entry in entries:
        if purpose == "eval" and entry.get("weight") not in (None, 1.0):
            raise DataError(
                f"the weight {entry['weight']} has no effect: every row is evaluated once",
                where=f"data.eval_data_paths: {as_written(entry['path'])}",
                remedy="leave it out; max_samples takes fewer rows of a source",
            )
        selection = Selection(entry.get("name"), entry.get("split"), purpose)
        files, name = find_files(entry["path"], selection, search, robot=frames is not None)
        name = unique_name(entry.get("name") or name, [source.name for source in sources])
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
        turns = is_text and has_turns(row, source.format)
        sources.append(replace(source, title=title, is_text=is_text, has_turns=turns))
        if is_text:
            check_columns(source.columns)
            check_columns_read(row, source.columns, format_of(row, source.format))
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
    for item in items_of(spec, "data") if spec is not None else ():
        path = entry_of(item)["path"]
        held = in_memory(path, root)
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


def _title(source: Source) -> Callable[[Row], str]:
    def read(row: Row) -> str:
        if source.frames is not None:
            return describe_frame(row)
        read_example(row, source.format)
        return format_of(row, source.format).title

    return read


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
                changed = transformed(row, source)
                if changed is not None:
                    prepared = in_columns(changed, source)
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
            raise DataError("the data file holds no rows", where=file.label, remedy=FILL)
    if first is not None:  # with data.on_bad_row: skip
        remedy = "mend the rows, or let data.columns name their columns: none of the first ones can be used"
        raise DataError(first.what, where=first.where, remedy=remedy)
    raise DataError(
        f"data.transform drops each of the first {_SNIFFED_ROWS} rows",
        where=source.files[0].label,
        remedy="let it return the rows that are to be kept, None only for the others",
    )
