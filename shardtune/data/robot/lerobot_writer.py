"""Writes episodes as a LeRobot data set with images in Parquet, in the layout of version 3.0 or 2.1."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardtune.data.robot.episode import Episode
from shardtune.data.robot.pictures import picture_pixels, picture_shape, stored_pictures
from shardtune.data.robot.running_stats import Moments
from shardtune.errors import DataError

Version = Literal["v3.0", "v2.1"]
ImageForm = Literal["png", "jpeg"]

IMAGE_PREFIX, STATE, ACTION, REWARD = "observation.images.", "observation.state", "action", "next.reward"
_FILES_PER_CHUNK = 1000
_FILE_MB = 100
# The image statistics of an episode are taken from this many evenly spaced frames.
_IMAGE_SAMPLES = 16
_INDEX_COLUMNS = {
    "timestamp": "float32",
    **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64"),
}
_TYPES = {"float32": pa.float32(), "int64": pa.int64()}
_IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_lerobot(
    directory: str | Path,
    episodes: Iterable[Episode],
    *,
    fps: int,
    robot_type: str = "unknown",
    version: Version = "v3.0",
    image_form: ImageForm = "png",
    action_names: Sequence[str] | None = None,
    state_names: Sequence[str] | None = None,
    file_mb: int = _FILE_MB,
) -> Path:
    """Writes a data set, holding one episode at a time in memory; it appears under its name when it is complete.

    Args:
        directory: must not exist.
        episodes: at least one; all with the cameras, image sizes and dimensions of the first.
        fps: frames per second.
        version: `v3.0` joins many episodes in one file, `v2.1` has one file per episode.
        image_form: of images that are given as pixels; `png` is lossless, `jpeg` is smaller. Others are stored as they
            came, byte for byte.
        action_names: of the dimensions, by which masks of a recipe name them; no name decides what is normalised.
        state_names: likewise of the state.
        file_mb: `v3.0` begins another file after this many megabytes.

    Returns the directory. Raises `DataError` for one that exists, for no episode, and for episodes that differ.
    """
    target = Path(directory)
    if target.exists():
        raise DataError("the directory exists", where=str(target), remedy="name another one, or delete it")
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    partial.mkdir(parents=True)
    try:
        layout: _Layout = _LAYOUTS[version](partial, file_mb)
        names = {ACTION: action_names, STATE: state_names}
        _Writer(partial, layout, fps, robot_type, image_form, names).write(episodes)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


@dataclass(frozen=True, slots=True)
class _Shape:
    """The cameras, image sizes and dimensions shared by all episodes of a data set."""

    cameras: Mapping[str, tuple[int, ...]]
    state: int | None
    action: int
    rewards: bool

    @classmethod
    def of(cls, episode: Episode) -> _Shape:
        cameras = {name: picture_shape(images, name) for name, images in episode.images.items()}
        state = None if episode.state is None else episode.state.shape[1]
        return cls(cameras, state, episode.actions.shape[1], episode.rewards is not None)

    def in_words(self) -> str:
        """For a message."""
        images = [f"{name} of {size[0]} x {size[1]}" for name, size in self.cameras.items()]
        parts = [f"the cameras {', '.join(images) or 'none'} (height x width)", f"actions of {self.action} numbers"]
        parts += ["no state" if self.state is None else f"states of {self.state}"]
        return ", ".join([*parts, "rewards" if self.rewards else "no rewards"])

    @property
    def vectors(self) -> dict[str, int]:
        """The columns of vectors and their dimensions."""
        rewards = {REWARD: 1} if self.rewards else {}
        return ({} if self.state is None else {STATE: self.state}) | {ACTION: self.action} | rewards

    def schema(self) -> pa.Schema:
        columns = [(IMAGE_PREFIX + name, _IMAGE_TYPE) for name in self.cameras]
        columns += [(name, _vector_type(size)) for name, size in self.vectors.items()]
        columns += [(name, _TYPES[dtype]) for name, dtype in _INDEX_COLUMNS.items()]
        return pa.schema(columns, metadata={"huggingface": json.dumps({"info": {"features": self._loaded_as()}})})

    def _loaded_as(self) -> dict[str, object]:
        """How the `datasets` library is to load the columns."""
        features: dict[str, object] = {IMAGE_PREFIX + name: {"_type": "Image"} for name in self.cameras}
        for name, size in self.vectors.items():
            value = {"dtype": "float32", "_type": "Value"}
            features[name] = value if size == 1 else {"feature": value, "length": size, "_type": "Sequence"}
        features.update({name: {"dtype": dtype, "_type": "Value"} for name, dtype in _INDEX_COLUMNS.items()})
        return features

    def features(self, names: Mapping[str, Sequence[str] | None]) -> dict[str, object]:
        """The `features` of meta/info.json."""
        features: dict[str, object] = {}
        for name, shape in self.cameras.items():
            features[IMAGE_PREFIX + name] = _feature("image", list(shape), ["height", "width", "channels"])
        for name, size in self.vectors.items():
            given = names.get(name)
            if given is not None and len(given) != size:
                raise DataError(
                    f"{len(given)} names are given for the {size} dimensions of {name}",
                    where="write_lerobot",
                    remedy="give one name per dimension",
                )
            features[name] = _feature("float32", [size], None if given is None else list(given))
        features.update({name: _feature(dtype, [1], None) for name, dtype in _INDEX_COLUMNS.items()})
        return features


def _feature(dtype: str, shape: list[int], names: list[str] | None) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "names": names}


def _vector_type(size: int) -> pa.DataType:
    """The format stores vectors of one dimension as plain numbers."""
    return pa.float32() if size == 1 else pa.list_(pa.float32(), size)


@dataclass(frozen=True, slots=True)
class _Written:
    """The record of an episode that layouts store."""

    index: int
    length: int
    first_frame: int
    task: str
    stats: Mapping[str, Moments]


class _Layout(Protocol):
    """The paths of files and the lists of episodes."""

    def add(self, episode: _Written, table: pa.Table) -> None: ...
    def finish(self, tasks: Sequence[str], episodes: int) -> dict[str, object]:
        """Writes the lists; returns the entries of meta/info.json for this layout."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Writer:
    folder: Path
    layout: _Layout
    fps: int
    robot_type: str
    image_form: ImageForm
    names: Mapping[str, Sequence[str] | None]
    _tasks: dict[str, int] = field(default_factory=dict)
    _episodes: int = 0
    _frames: int = 0
    _stats: dict[str, Moments] = field(default_factory=dict)

    def write(self, episodes: Iterable[Episode]) -> None:
        shape: _Shape | None = None
        try:
            for episode in episodes:
                found = _Shape.of(episode)
                shape = shape or found
                if found != shape:
                    raise DataError(
                        f"it has {found.in_words()}; the first one {shape.in_words()}",
                        where=f"episode {self._episodes}",
                        remedy="write episodes of other cameras or dimensions into a separate data set",
                    )
                self._add(episode, shape)
            if shape is None:
                raise DataError("there is no episode to write", where="write_lerobot", remedy="give at least one")
            info = self.layout.finish(list(self._tasks), self._episodes)
        finally:
            self.layout.close()
        features = shape.features(self.names)
        _write_json(self.folder / "meta" / "info.json", {**self._info(), **info, "features": features})
        stats = {name: _stats_json(name, moments) for name, moments in self._stats.items()}
        _write_json(self.folder / "meta" / "stats.json", stats)

    def _info(self) -> dict[str, object]:
        return {
            "robot_type": self.robot_type,
            "total_episodes": self._episodes,
            "total_frames": self._frames,
            "total_tasks": len(self._tasks),
            "chunks_size": _FILES_PER_CHUNK,
            "fps": self.fps,
            "splits": {"train": f"0:{self._episodes}"},
            "video_path": None,
        }

    def _add(self, episode: Episode, shape: _Shape) -> None:
        task = self._tasks.setdefault(episode.task, len(self._tasks))
        stats = _episode_stats(episode)
        for name, moments in stats.items():
            self._stats[name] = self._stats[name].joined(moments) if name in self._stats else moments
        written = _Written(self._episodes, len(episode), self._frames, episode.task, stats)
        self.layout.add(written, self._table(episode, shape, task))
        self._episodes += 1
        self._frames += len(episode)

    def _table(self, episode: Episode, shape: _Shape, task: int) -> pa.Table:
        frames = np.arange(len(episode))
        columns: dict[str, Any] = {}
        for camera, images in episode.images.items():
            stored = list(stored_pictures(images, self.image_form))
            encoded = [content for content, _ in stored]
            names = enumerate(suffix for _, suffix in stored)
            paths = [f"episode-{self._episodes:06d}-frame-{frame:06d}.{suffix}" for frame, suffix in names]
            columns[IMAGE_PREFIX + camera] = pa.StructArray.from_arrays(
                [pa.array(encoded, pa.binary()), pa.array(paths, pa.string())], fields=list(_IMAGE_TYPE)
            )
        for name, values in _vectors(episode).items():
            flat = pa.array(np.ascontiguousarray(values).reshape(-1))
            size = values.shape[1]
            columns[name] = flat if size == 1 else pa.FixedSizeListArray.from_arrays(flat, size)
        columns["timestamp"] = pa.array((frames / self.fps).astype(np.float32))
        columns["frame_index"] = pa.array(frames)
        columns["episode_index"] = pa.array(np.full(len(frames), self._episodes))
        columns["index"] = pa.array(frames + self._frames)
        columns["task_index"] = pa.array(np.full(len(frames), task))
        schema = shape.schema()
        return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def _vectors(episode: Episode) -> dict[str, np.ndarray]:
    """Its columns of vectors, each [T, dimensions]."""
    found = {} if episode.state is None else {STATE: episode.state}
    found[ACTION] = episode.actions
    return found if episode.rewards is None else found | {REWARD: episode.rewards[:, None]}


def _episode_stats(episode: Episode) -> dict[str, Moments]:
    """Exact for the vectors; for each camera's channels (in 0 to 1) from frames spread over the episode."""
    stats = {name: Moments.of(values) for name, values in _vectors(episode).items()}
    for camera, images in episode.images.items():
        chosen = np.unique(np.linspace(0, len(images) - 1, min(len(images), _IMAGE_SAMPLES)).astype(int))
        one = [Moments.of(picture_pixels(images, frame).reshape(-1, 3) / np.float32(255)) for frame in chosen]
        joined = one[0]
        for moments in one[1:]:
            joined = joined.joined(moments)
        stats[IMAGE_PREFIX + camera] = joined
    return stats


def _stats_json(name: str, moments: Moments) -> dict[str, object]:
    values = {"min": moments.least, "max": moments.greatest, "mean": moments.mean, "std": moments.std}
    if name.startswith(IMAGE_PREFIX):
        values = {key: value.reshape(-1, 1, 1) for key, value in values.items()}
    return {**{key: value.tolist() for key, value in values.items()}, "count": [moments.count]}


# -- layouts -------------------------------------------------------------------------------------------------------


class _Version3:
    """Many episodes per file, one row group each; the lists of tasks and episodes are Parquet files."""

    def __init__(self, folder: Path, file_mb: int) -> None:
        self._folder = folder
        self._limit = file_mb * 2**20
        self._file = -1
        self._writer: pq.ParquetWriter | None = None
        self._path = folder
        self._listed: list[dict[str, object]] = []

    def add(self, episode: _Written, table: pa.Table) -> None:
        writer = self._writer
        if writer is None or self._path.stat().st_size >= self._limit:
            writer = self._next(table.schema)
        writer.write_table(table, row_group_size=len(table))
        chunk, file = divmod(self._file, _FILES_PER_CHUNK)
        self._listed.append(
            {
                "episode_index": episode.index,
                "tasks": [episode.task],
                "length": episode.length,
                "data/chunk_index": chunk,
                "data/file_index": file,
                "dataset_from_index": episode.first_frame,
                "dataset_to_index": episode.first_frame + episode.length,
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
            }
        )

    def finish(self, tasks: Sequence[str], episodes: int) -> dict[str, object]:
        del episodes
        meta = self._folder / "meta"
        (meta / "episodes" / "chunk-000").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(self._listed), meta / "episodes" / "chunk-000" / "file-000.parquet")
        pq.write_table(_task_table(tasks), meta / "tasks.parquet")
        return {
            "codebase_version": "v3.0",
            "data_files_size_in_mb": self._limit // 2**20,
            "video_files_size_in_mb": 200,
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        }

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _next(self, schema: pa.Schema) -> pq.ParquetWriter:
        self.close()
        self._file += 1
        chunk, file = divmod(self._file, _FILES_PER_CHUNK)
        self._path = self._folder / "data" / f"chunk-{chunk:03d}" / f"file-{file:03d}.parquet"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = pq.ParquetWriter(self._path, schema)
        return self._writer


def _task_table(tasks: Sequence[str]) -> pa.Table:
    """The tasks as the format requires: a table whose pandas index is the task's text."""
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


class _Version2:
    """One file per episode; the lists of tasks, episodes and their statistics are JSON lines."""

    def __init__(self, folder: Path, file_mb: int) -> None:
        del file_mb
        self._folder = folder
        (folder / "meta").mkdir()
        self._lists = {
            name: (folder / "meta" / f"{name}.jsonl").open("w", encoding="utf-8")
            for name in ("episodes", "episodes_stats", "tasks")
        }

    def add(self, episode: _Written, table: pa.Table) -> None:
        chunk = episode.index // _FILES_PER_CHUNK
        path = self._folder / "data" / f"chunk-{chunk:03d}" / f"episode_{episode.index:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)
        stats = {name: _stats_json(name, moments) for name, moments in episode.stats.items()}
        self._list("episodes", {"episode_index": episode.index, "tasks": [episode.task], "length": episode.length})
        self._list("episodes_stats", {"episode_index": episode.index, "stats": stats})

    def finish(self, tasks: Sequence[str], episodes: int) -> dict[str, object]:
        for index, task in enumerate(tasks):
            self._list("tasks", {"task_index": index, "task": task})
        return {
            "codebase_version": "v2.1",
            "total_videos": 0,
            "total_chunks": -(-episodes // _FILES_PER_CHUNK),
            "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        }

    def close(self) -> None:
        for file in self._lists.values():
            file.close()

    def _list(self, name: str, row: Mapping[str, object]) -> None:
        self._lists[name].write(json.dumps(row, ensure_ascii=False) + "\n")


_LAYOUTS = {"v3.0": _Version3, "v2.1": _Version2}


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=4, ensure_ascii=False) + "\n", encoding="utf-8")
