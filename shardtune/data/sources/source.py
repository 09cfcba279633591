"""A source of rows: its files, and how their rows come to an encoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardtune.data.encoder import FrameOptions, Row, RowError, caused_by
from shardtune.data.files.chunk import Chunk, NumberedRow
from shardtune.data.robot.frames import Origin, describe_frame
from shardtune.data.robot.lerobot import open_lerobot
from shardtune.data.robot.lerobot_frames import read_lerobot
from shardtune.data.robot.recordings import RECORDINGS, read_recording
from shardtune.data.robot.representation import Representation
from shardtune.data.robot.tables import read_frames
from shardtune.data.row_files import read_chunks
from shardtune.data.row_formats import rename_columns
from shardtune.data.sources.transform import Transform

LEROBOT = "lerobot"
"""The kind of a directory of robot data, which is one file to the rest."""
ROBOT_KINDS = (LEROBOT, *RECORDINGS)
"""The kinds of robot data that are no tables."""


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
        has_turns: its first row is a conversation, which a chat template writes.
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
    has_turns: bool = False

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


def action_names(source: Source) -> list[str] | None:
    """The names of the action's dimensions, where the data set has them."""
    for file in source.files:
        if file.kind == LEROBOT:
            described = open_lerobot(file.path)
            return described.names(described.columns(source.columns).require("action"))
    return None


def prepare_row(row: Row, source: Source) -> Row | None:
    """The encoder's input for a row: transformed, its columns renamed; None if the transform drops it.

    The columns of robot data are mapped earlier, when frames are built, and their actions are converted last.
    """
    prepared = transformed(row, source)
    return None if prepared is None else in_columns(prepared, source)


def transformed(row: Row, source: Source) -> Row | None:
    """A row as `data.transform` returns it; None if it drops the row."""
    return row if source.transform is None else source.transform.applied(row)


def in_columns(prepared: Row, source: Source) -> Row:
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
