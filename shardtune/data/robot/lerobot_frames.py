"""The frames of LeRobot data sets, file by file; images are stored in the file or located by their time in videos."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from shardtune.data.encoder import FrameOptions, RowError
from shardtune.data.files import arrow as pa
from shardtune.data.files.chunk import Chunk, RowChunk
from shardtune.data.images.video_frame import require_av, video_seconds
from shardtune.data.robot.columns import Columns
from shardtune.data.robot.frames import FrameChunk, Origin, episode_digest
from shardtune.data.robot.lerobot import COPY, EpisodeRecord, LeRobotSet, open_lerobot
from shardtune.data.robot.returns import RETURN, discounted, role_of
from shardtune.errors import DataError

_CHUNK_FRAMES = 64


def read_lerobot(
    folder: Path, part: str, columns: Mapping[str, str], options: FrameOptions, dataset: str
) -> Iterator[Chunk]:
    """The frames of a data set in order, 64 at a time; row numbers count its frames from 1.

    Args:
        part: only these episodes, `first:stop`; "": all.
        columns: `data.columns`.
        dataset: the name under which its statistics are kept.
    """
    described = open_lerobot(folder)
    found = described.columns(columns)
    if any(described.features[column]["dtype"] == "video" for column in found.cameras.values()):
        require_av()
    chosen_range = _range(part, described)
    by_file: dict[str, list[EpisodeRecord]] = {}
    for episode in described.episodes:
        by_file.setdefault(episode.data, []).append(episode)
    done, total = 0, max(sum(episode.length for episode in described.episodes), 1)
    for file, episodes in by_file.items():
        table = _FrameFile(described, found, file, episodes, options, dataset)
        yield from table.chunks(chosen_range, done, total)
        done += sum(episode.length for episode in episodes)


@dataclass(frozen=True, slots=True)
class FileVectors:
    """Actions and states of one file, without its images.

    Attributes:
        episodes, frames: int64 [N], the episode of each frame and its place in that.
        actions: float32 [N, A]. state: float32 [N, S], or None.
    """

    episodes: np.ndarray
    frames: np.ndarray
    actions: np.ndarray
    state: np.ndarray | None

    def of(self, rows: np.ndarray) -> FileVectors:
        """Some of its frames, bool [N]."""
        if rows.all():
            return self
        state = None if self.state is None else self.state[rows]
        return FileVectors(self.episodes[rows], self.frames[rows], self.actions[rows], state)


def read_vectors(folder: Path, part: str, columns: Mapping[str, str]) -> Iterator[FileVectors]:
    """Actions and states file by file; no image is read."""
    described = open_lerobot(folder)
    found = described.columns(columns)
    chosen_range = _range(part, described)
    by_file: dict[str, list[EpisodeRecord]] = {}
    for episode in described.episodes:
        by_file.setdefault(episode.data, []).append(episode)
    for file, episodes in by_file.items():
        if not any(episode.index in chosen_range for episode in episodes):
            continue
        table = _FrameFile(described, found, file, episodes, FrameOptions(), "")
        yield table.vectors(chosen_range)


def _range(part: str, described: LeRobotSet) -> range:
    if not part:
        return range(described.episodes[-1].index + 1)
    first, _, stop = part.partition(":")
    return range(int(first or 0), int(stop) if stop else described.episodes[-1].index + 1)


@dataclass(frozen=True, slots=True)
class _Run:
    """The frames of one episode in a file: the rows `[start, stop)`."""

    episode: EpisodeRecord
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _FrameFile:
    """One Parquet file of frames and the episodes that are listed for it."""

    described: LeRobotSet
    columns: Columns
    file: str
    episodes: Sequence[EpisodeRecord]
    options: FrameOptions
    dataset: str

    @property
    def path(self) -> Path:
        return self.described.folder / self.file

    def vectors(self, chosen_range: range) -> FileVectors:
        with self._open() as parquet:
            table = self._read(parquet, self._vector_columns())
        self._runs(table)
        episode, frame = self._vector_columns()[:2]
        found = FileVectors(table.column(episode).to_numpy(), table.column(frame).to_numpy(), *self._vectors(table))
        return found.of((found.episodes >= chosen_range.start) & (found.episodes < chosen_range.stop))

    def chunks(self, chosen_range: range, done: int, total: int) -> Iterator[Chunk]:
        with self._open() as parquet:
            table = self._read(parquet, [*self._vector_columns(), *self._other_columns()])
            runs = self._runs(table)
            frames = self._frames(table, runs)
            for run in runs:
                if run.episode.index in chosen_range and run.start == run.stop:
                    reason = f"episode {run.episode.index} has no frame ({self.file})"
                    yield RowChunk([(done + run.start + 1, RowError(reason))], done / total)
            chosen = [run for run in runs if run.episode.index in chosen_range and run.start < run.stop]
            earlier: pa.RecordBatch | None = None
            problems: dict[int, str] = {}
            for first, batch in self._pictures(parquet, table.num_rows):
                known = _joined(earlier, batch)
                begins = first - (known.num_rows - batch.num_rows)
                for start, stop in _pieces(chosen, first, first + batch.num_rows):
                    least = max(start - (self.options.observations - 1), begins)
                    shown = known.slice(least - begins, stop - least)
                    pictures = self._with_videos(shown, frames, least, stop)
                    self._note_long_videos(chosen, frames, start, stop, problems)
                    chunk = frames.chunk(least, start, stop, pictures, done, total)
                    yield replace(chunk, problems=_from(problems, start))
                earlier = known.slice(max(0, known.num_rows - (self.options.observations - 1)))

    def _vector_columns(self) -> list[str]:
        named = self.columns.named
        columns = [named.get("episode", "episode_index"), named.get("frame", "frame_index"), named["action"]]
        return [*columns, *([named["state"]] if "state" in named else [])]

    def _other_columns(self) -> list[str]:
        columns = [self.columns.named.get("instruction", "task_index"), *self._return_column()]
        return [*columns, "timestamp"] if self._videos() else columns

    def _return_column(self) -> list[str]:
        """The column that returns come from, if there is one. Rewards have to be there where they are to be summed."""
        role = role_of(self.options)
        if role is None or (role == RETURN and role not in self.columns.named):
            return []  # `data.transform` may give rows a return
        if role not in self.columns.named:
            raise self._fault(
                "there is no column of rewards (next.reward, reward), from which returns are to be computed",
                f"name it in data.columns ({role}: …), or leave model.value_head.discount out where rows have returns",
            )
        return [self.columns.named[role]]

    def _returns(self, table: pa.Table, runs: Sequence[_Run]) -> np.ndarray | None:
        """Of each row of the file, float64 [N]; None where the data have none."""
        names = self._return_column()
        if not names:
            return None
        values = self._vector(table, names[0]).astype(np.float64)
        if values.shape[1] != 1:
            raise self._fault(f"the column {names[0]!r} has {values.shape[1]} values a frame, a return is one number")
        found = values[:, 0]
        for run in runs if self.options.discount is not None else ():
            found[run.start : run.stop] = discounted(found[run.start : run.stop], self.options.discount or 0.0)
        return found

    def _videos(self) -> dict[str, str]:
        """Cameras whose images are in video files -> their columns."""
        features = self.described.features
        return {camera: name for camera, name in self.columns.cameras.items() if features[name]["dtype"] == "video"}

    def _open(self) -> pa.parquet.ParquetFile:
        try:
            return pa.parquet.ParquetFile(self.path)
        except FileNotFoundError as error:
            listed = _episode_list(self.episodes)
            raise self._fault(f"the file is missing, in which {listed} should be") from error
        except (OSError, pa.ArrowException) as error:
            raise self._fault(f"the file cannot be read as Parquet: {error}") from error

    def _fault(self, what: str, remedy: str = COPY) -> DataError:
        return DataError(what, where=str(self.path), remedy=remedy)

    def _read(self, parquet: pa.parquet.ParquetFile, columns: Sequence[str]) -> pa.Table:
        missing = [name for name in columns if name not in parquet.schema_arrow.names]
        if missing:
            there = ", ".join(parquet.schema_arrow.names)
            raise self._fault(f"the column {missing[0]!r} is missing (the columns: {there})", "name it in data.columns")
        try:
            return parquet.read(columns=list(dict.fromkeys(columns)))
        except (OSError, pa.ArrowException) as error:
            raise self._fault(f"the file cannot be read as Parquet: {error}") from error

    def _runs(self, table: pa.Table) -> list[_Run]:
        """The rows of each listed episode, in the order of the file. Raises `DataError` if they do not match meta/."""
        index = self._integers(table, self.columns.named.get("episode", "episode_index"))
        frames = self._integers(table, self.columns.named.get("frame", "frame_index"))
        cuts = (
            np.concatenate([[0], np.flatnonzero(np.diff(index)) + 1, [len(index)]]) if len(index) else np.zeros(1, int)
        )
        found = {int(index[start]): (int(start), int(stop)) for start, stop in pairwise(cuts)}
        if len(found) < len(cuts) - 1:
            raise self._fault("the frames of an episode are not consecutive")
        listed = {episode.index: episode for episode in self.episodes}
        unlisted = sorted(found.keys() - listed)
        if unlisted:
            raise self._fault(f"it holds episode {unlisted[0]}, which meta/ does not list for this file")
        runs: list[_Run] = []
        for episode in self.episodes:
            start, stop = found.get(episode.index, (runs[-1].stop if runs else 0,) * 2)
            if stop - start != episode.length:
                raise self._fault(
                    f"episode {episode.index} has {stop - start:,} frames here and {episode.length:,} by meta/"
                )
            if (frames[start:stop] != np.arange(stop - start)).any():
                raise self._fault(f"the frames of episode {episode.index} are not in order, or some are missing")
            runs.append(_Run(episode, start, stop))
        return sorted(runs, key=lambda run: run.start)

    def _integers(self, table: pa.Table, column: str) -> np.ndarray:
        values = table.column(column)
        if not pa.types.is_integer(values.type) or values.null_count:
            raise self._fault(
                f"the column {column!r} holds {values.type}, not whole numbers", "name it in data.columns"
            )
        return values.to_numpy()

    def _vectors(self, table: pa.Table) -> tuple[np.ndarray, np.ndarray | None]:
        named = self.columns.named
        state = self._vector(table, named["state"]) if "state" in named else None
        return self._vector(table, named["action"]), state

    def _vector(self, table: pa.Table, column: str) -> np.ndarray:
        """A column of numbers or of lists of them, all equally long, as float32 [N, D]."""
        values = table.column(column).combine_chunks()
        kind = values.type
        inner = kind.value_type if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) else kind
        if values.null_count and inner is not kind:
            row = values.is_null().index(True).as_py() + 1
            raise self._fault(f"the column {column!r} is null in row {row}")
        if not (pa.types.is_floating(inner) or pa.types.is_integer(inner) or pa.types.is_boolean(inner)):
            raise self._fault(f"the column {column!r} holds {kind}, not vectors of numbers", "name it in data.columns")
        if inner is kind:
            return values.to_numpy(zero_copy_only=False).astype(np.float32)[:, None]
        lengths = _lengths(values)
        if len(lengths) and (lengths != lengths[0]).any():
            row = int(np.flatnonzero(lengths != lengths[0])[0])
            raise self._fault(f"the column {column!r} has {lengths[row]} values in row {row + 1}, {lengths[0]} before")
        flat = values.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
        return flat.reshape(len(values), -1) if len(values) else np.empty((0, 1), np.float32)

    def _frames(self, table: pa.Table, runs: Sequence[_Run]) -> _Frames:
        actions, state = self._vectors(table)
        instructions = self._instructions(table)
        seconds = table.column("timestamp").to_numpy() if self._videos() else np.empty(0)
        owners: list[EpisodeRecord] = [run.episode for run in runs for _ in range(run.start, run.stop)]
        left = np.concatenate([np.arange(run.stop - run.start, 0, -1) for run in runs] or [np.empty(0, np.int64)])
        digests = np.zeros(table.num_rows, np.uint64)
        for run in runs:
            if run.start < run.stop:
                at = run.start
                felt = None if state is None else state[at]
                digests[at : run.stop] = episode_digest(run.episode.index, instructions[at], actions[at], felt)
        origin = Origin(self.dataset, self.file, self.described.folder)
        returns = self._returns(table, runs)
        return _Frames(origin, self.options, owners, left, digests, instructions, actions, state, seconds, returns)

    def _instructions(self, table: pa.Table) -> list[str]:
        column = self.columns.named.get("instruction", "task_index")
        values = table.column(column)
        if pa.types.is_integer(values.type):
            tasks = self.described.tasks
            numbers = values.to_pylist()
            unknown = next((number for number in numbers if number not in tasks), None)
            if unknown is not None or any(number is None for number in numbers):
                raise self._fault(f"a frame has the {column} {unknown}, which meta/tasks does not list")
            return [tasks[number] for number in numbers]
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)) or values.null_count:
            raise self._fault(f"the column {column!r} holds {values.type}, not text", "name it in data.columns")
        return values.to_pylist()

    def _pictures(self, parquet: pa.parquet.ParquetFile, rows: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The encoded images of cameras without video, some rows at a time, each with the number of its first row."""
        videos = self._videos()
        columns = {camera: name for camera, name in self.columns.cameras.items() if camera not in videos}
        for name in columns.values():
            self._require_pictures(parquet, name)
        first = 0
        if not columns:
            for first in range(0, rows, _CHUNK_FRAMES):
                yield first, _blank(min(_CHUNK_FRAMES, rows - first))
            return
        try:
            for batch in parquet.iter_batches(_CHUNK_FRAMES, columns=list(dict.fromkeys(columns.values()))):
                arrays = [batch.column(name) for name in columns.values()]
                yield first, pa.RecordBatch.from_arrays(arrays, names=list(columns))
                first += batch.num_rows
        except (OSError, pa.ArrowException) as error:
            raise self._fault(f"the file cannot be read as Parquet: {error}") from error

    def _note_long_videos(
        self, runs: Sequence[_Run], frames: _Frames, start: int, stop: int, problems: dict[int, str]
    ) -> None:
        """Note the frames of episodes that begin in these rows and whose video goes on after their last frame.

        Such a video belongs to other frames, or is shifted against them.
        """
        for run in runs if self._videos() else ():
            if not start <= run.start < stop or run.stop - run.start < 2:
                continue
            first, last = float(frames.seconds[run.start]), float(frames.seconds[run.stop - 1])
            frame = (last - first) / (run.stop - run.start - 1)
            for camera, column in self._videos().items():
                file, begins, ends = run.episode.videos[column]
                if ends == math.inf:
                    ends = video_seconds(str(self.described.folder / file)) or math.nan
                rest = ends - begins - last - frame
                if rest > 1.5 * frame:
                    reason = (
                        f"camera {camera!r}: the video {file} goes on for {rest:.2f} s after the episode's last frame"
                    )
                    problems |= dict.fromkeys(range(run.start, run.stop), reason)

    def _require_pictures(self, parquet: pa.parquet.ParquetFile, column: str) -> None:
        if column not in parquet.schema_arrow.names:
            there = ", ".join(parquet.schema_arrow.names)
            raise self._fault(f"the column {column!r} is missing (the columns: {there})")
        kind = parquet.schema_arrow.field(column).type
        fine = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_string(kind)
        if not fine and not (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0):
            raise self._fault(f"the column {column!r} holds {kind}, no encoded images")

    def _with_videos(self, batch: pa.RecordBatch, frames: _Frames, start: int, stop: int) -> pa.RecordBatch:
        names, arrays = list(batch.schema.names), list(batch.columns)
        for camera, column in self._videos().items():
            places = []
            for row in range(start, stop):
                file, begins, _ = frames.owners[row].videos[column]
                places.append({"video": file, "seconds": begins + float(frames.seconds[row])})
            names.append(camera)
            arrays.append(pa.array(places))
        order = [names.index(camera) for camera in self.columns.cameras]
        return pa.RecordBatch.from_arrays([arrays[at] for at in order], names=[names[at] for at in order])


@dataclass(frozen=True, slots=True)
class _Frames:
    """All frames of a file, without their images."""

    origin: Origin
    options: FrameOptions
    owners: Sequence[EpisodeRecord]
    left: np.ndarray
    digests: np.ndarray
    instructions: Sequence[str]
    actions: np.ndarray
    state: np.ndarray | None
    seconds: np.ndarray
    returns: np.ndarray | None

    def chunk(self, least: int, start: int, stop: int, pictures: pa.RecordBatch, done: int, total: int) -> FrameChunk:
        """The rows `[start, stop)`, with what they show from `least` on."""
        owners, left = self.owners[start:stop], self.left[start:stop]
        return FrameChunk(
            origin=self.origin,
            options=self.options,
            before=start - least,
            numbers=range(done + start + 1, done + stop + 1),
            episodes=[owner.index for owner in owners],
            frames=[owner.length - int(rest) for owner, rest in zip(owners, left, strict=True)],
            digests=self.digests[start:stop],
            instructions=self.instructions[start:stop],
            state=None if self.state is None else self.state[least:stop],
            actions=self.actions[least : stop + self.options.chunk - 1],
            left=left,
            pictures=pictures,
            progress=(done + stop) / total,
            returns=None if self.returns is None else self.returns[start:stop],
        )


def _blank(rows: int) -> pa.RecordBatch:
    """Rows without columns."""
    return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))


def _joined(first: pa.RecordBatch | None, second: pa.RecordBatch) -> pa.RecordBatch:
    if first is None or not first.num_rows:
        return second
    if not second.num_columns:
        return _blank(first.num_rows + second.num_rows)
    columns = [pa.concat_arrays(pair) for pair in zip(first.columns, second.columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=second.schema.names)


def _from(problems: Mapping[int, str], start: int) -> dict[int, str]:
    """Problems by row of the file, by index of a chunk that begins at a row."""
    return {row - start: reason for row, reason in problems.items() if row >= start}


def _lengths(values: pa.Array) -> np.ndarray:
    """How long each list of a column is."""
    if pa.types.is_fixed_size_list(values.type):
        return np.full(len(values), values.type.list_size)
    return np.diff(values.offsets.to_numpy())


def _pieces(runs: Sequence[_Run], first: int, end_row: int) -> Iterator[tuple[int, int]]:
    """The stretches of rows in `[first, end_row)` that belong to one of the runs, neighbours joined."""
    start = stop = first
    for run in runs:
        begin, end = max(run.start, first), min(run.stop, end_row)
        if begin >= end:
            continue
        if begin != stop:
            if start < stop:
                yield start, stop
            start = begin
        stop = end
    if start < stop:
        yield start, stop


def _episode_list(episodes: Sequence[EpisodeRecord]) -> str:
    numbers = [str(episode.index) for episode in episodes[:3]]
    more = ", …" if len(episodes) > len(numbers) else ""
    return f"episode{'s' if len(episodes) > 1 else ''} {', '.join(numbers)}{more}"
