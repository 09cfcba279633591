"""The metadata of a LeRobot data set of version 3.0, 2.1 or 2.0: its columns, episodes, tasks and files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shardtune.data.encoder import FrameOptions, RowError
from shardtune.data.files import arrow as pa
from shardtune.data.robot.columns import IMAGES, Columns, find_columns
from shardtune.data.robot.returns import role_of
from shardtune.errors import DataError

INFO = Path("meta") / "info.json"
_VERSIONS = ("v3.0", "v2.1", "v2.0")
_PATHS = {
    "v3": (
        "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    ),
    "v2": (
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ),
}
COPY = "copy the data set completely, or record it again"
_ROLES = ("action", "state", "instruction", "episode", "frame")
"""What frames are made of besides images and returns."""
_EPISODES = re.compile(r"\d*:\d*")
_COUNTS = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Columns of every data set that place a frame."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """The record of an episode in meta/.

    Attributes:
        length: frames.
        data: the file that holds them, relative to the data set.
        videos: image column -> the video file, relative to the data set, and the seconds at which the episode begins
            and ends; inf: at the end of the file; nan: unknown.
    """

    index: int
    length: int
    data: str
    videos: Mapping[str, tuple[str, float, float]]


@dataclass(frozen=True, slots=True)
class LeRobotSet:
    """The metadata of a data set, without its frames.

    Attributes:
        features: column -> its `dtype`, `shape` and `names`, as meta/info.json has them.
        episodes: in order.
        tasks: `task_index` -> the instruction.
        splits: split -> its range of episodes, `first:stop`.
    """

    folder: Path
    version: str
    features: Mapping[str, Mapping[str, Any]]
    episodes: tuple[EpisodeRecord, ...]
    tasks: Mapping[int, str]
    splits: Mapping[str, str]

    @property
    def data_files(self) -> tuple[str, ...]:
        """The files of frames, in the order of their episodes."""
        return tuple(dict.fromkeys(episode.data for episode in self.episodes))

    @property
    def video_files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(file for episode in self.episodes for file, *_ in episode.videos.values()))

    def names(self, column: str) -> list[str] | None:
        """The names of a vector's dimensions, in any of the forms data sets use; None if there are none."""
        feature = self.features[column]
        names = feature.get("names")
        if isinstance(names, Mapping):  # of groups of dimensions, or from each name to its place
            if all(isinstance(value, int) for value in names.values()):
                names = [name for _, name in sorted((place, name) for name, place in names.items())]
            else:
                names = [name for group in names.values() if isinstance(group, Sequence) for name in group]
        size = int(np.prod(feature["shape"]))
        if not isinstance(names, Sequence) or isinstance(names, str) or len(names) != size:
            return None
        return [str(name) for name in names]

    def columns(self, mapping: Mapping[str, str]) -> Columns:
        """Finds the role of each column. Raises `DataError`."""
        pictures = [name for name, feature in self.features.items() if _is_picture(feature)]
        try:
            found = find_columns(self.features, mapping, pictures)
            found.require("action")
        except RowError as error:
            raise DataError(error.reason, where=str(self.folder / INFO), remedy="name it in data.columns") from error
        for camera, column in found.cameras.items():
            if column not in pictures:
                kind = self.features[column]["dtype"]
                raise DataError(
                    f"the column {column!r}, named for the camera {camera!r}, holds {kind}, no images in colour",
                    where=str(self.folder / INFO),
                    remedy=f"its columns of images are {', '.join(pictures) or 'none'}",
                )
        return found


def _is_picture(feature: Mapping[str, Any]) -> bool:
    """Whether a column holds colour images; vision models do not take depth maps."""
    facts = {**(feature.get("video_info") or {}), **(feature.get("info") or {})}
    depth = facts.get("is_depth_map") or facts.get("video.is_depth_map")
    return feature["dtype"] in ("image", "video") and not depth


def camera_columns(folder: str | Path, mapping: Mapping[str, str]) -> Mapping[str, str]:
    """Camera -> the column of its images in a data set.

    Args:
        folder: of the data set.
        mapping: `data.columns`.
    """
    info = _json(Path(folder) / INFO).get("features") or {}
    pictures = [name for name, one in info.items() if "dtype" in one and _is_picture(one)]
    return find_columns(info, mapping, pictures).cameras


def unread_images(folder: str | Path, mapping: Mapping[str, str]) -> list[str]:
    """The columns of images of a data set that no row has: those that `data.columns` does not name where it names
    cameras, and maps of depth."""
    info = _json(Path(folder) / INFO).get("features") or {}
    images = {name: one for name, one in info.items() if one.get("dtype") in ("image", "video")}
    chosen = {column for role, column in mapping.items() if role.startswith(IMAGES)}
    used = chosen or {name for name, feature in images.items() if _is_picture(feature)}
    return [name for name in images if name not in used]


def unread_columns(folder: str | Path, mapping: Mapping[str, str], options: FrameOptions) -> list[str]:
    """The columns of a data set besides those of images that frames are not made of."""
    info = _json(Path(folder) / INFO).get("features") or {}
    roles = (*_ROLES, role_of(options))
    found = find_columns(info, mapping, ()).named
    read = {*(name for role, name in found.items() if role in roles), *_COUNTS}
    return [name for name, one in info.items() if name not in read and one.get("dtype") not in ("image", "video")]


def differences(
    folder: str | Path, mapping: Mapping[str, str], first: str | Path, first_mapping: Mapping[str, str], name: str
) -> list[str]:
    """What the frames of a data set mean otherwise than those of the first one that they are mixed with, as a sentence
    each: the names of the dimensions of action and state, and the frames of a second.

    Args:
        folder, mapping: the data set and its `data.columns`.
        first, first_mapping, name: those of the first one, and its name.
    """
    (info, own), (first_info, others) = _named_vectors(folder, mapping), _named_vectors(first, first_mapping)
    found = []
    for role, names in own.items():
        places = [at for at, pair in enumerate(zip(names, others.get(role, []), strict=False)) if len({*pair}) > 1]
        if places:
            at = places[0]
            found.append(
                f"dimension {at} of its {role} is {names[at]}, in {name} {others[role][at]} ({len(places)} of "
                f"{len(names)} names differ): dimensions are taken by their places, and data.transform may order them"
            )
    rate, first_rate = _rate(info, folder), _rate(first_info, first)
    if (rate is None) != (first_rate is None):
        lacks, has = ("it", name) if rate is None else (name, "it")
        found.append(
            f"{lacks} has no fps in meta/info.json, {has} {rate or first_rate:g}: whether the same number of actions "
            "is the same time is not known"
        )
    elif rate != first_rate:
        found.append(
            f"it has {rate:g} frames a second, {name} {first_rate:g}: the same number of actions is another time"
        )
    return found


def _rate(info: Mapping[str, Any], folder: str | Path) -> float | None:
    """The frames of a second by meta/info.json; None where it has none. Raises `DataError` for other values."""
    given = info.get("fps")
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
        raise DataError(
            f"fps is {given!r}, not a number of frames a second", where=str(Path(folder) / INFO), remedy="correct it"
        )
    return float(given)


def _named_vectors(folder: str | Path, mapping: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """meta/info.json, and the names of the dimensions of action and state, where there are any."""
    info = _json(Path(folder) / INFO)
    features = {name: {"dtype": str(one["dtype"]), **one} for name, one in (info.get("features") or {}).items()}
    described = LeRobotSet(Path(folder), "", features, (), {}, {})
    columns = described.columns(mapping).named
    names = {role: described.names(columns[role]) for role in ("action", "state") if columns.get(role) in features}
    return info, {role: found for role, found in names.items() if found is not None}


def is_lerobot(folder: Path) -> bool:
    """Whether a directory is a LeRobot data set of any version."""
    return (folder / INFO).is_file()


def open_lerobot(folder: str | Path) -> LeRobotSet:
    """Reads meta/. Raises `DataError` for unsupported versions and for files that are missing or corrupt."""
    folder = Path(folder)
    info = _json(folder / INFO)
    version = str(info.get("codebase_version"))
    if version not in _VERSIONS:
        raise DataError(
            f"the data set has the version {version}, which is not read",
            where=str(folder / INFO),
            remedy=f"convert it with LeRobot's own scripts to one of {', '.join(_VERSIONS)}",
        )
    where = str(folder / INFO)
    try:
        features = {name: {"dtype": str(one["dtype"]), **one} for name, one in info["features"].items()}
        modern = version.startswith("v3")
        data, video = _PATHS[version[:2]]
        paths = (info.get("data_path") or data, info.get("video_path") or video)
        videos = [name for name, feature in features.items() if feature["dtype"] == "video"]
        read = _episodes_v3 if modern else partial(_episodes_v2, per_chunk=int(info.get("chunks_size", 1000)))
        episodes = tuple(sorted(read(folder, paths, videos), key=lambda episode: episode.index))
        tasks = _tasks_v3(folder) if modern else _tasks_v2(folder)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(f"meta/ is not as version {version} has it: {error!r}", where=where, remedy=COPY) from error
    if not episodes:
        raise DataError("the data set has no episode", where=where, remedy=COPY)
    _check_count(info.get("total_episodes"), episodes, where)
    return LeRobotSet(folder, version, features, episodes, tasks, _splits(info.get("splits") or {}, where))


def _check_count(total: object, episodes: Sequence[EpisodeRecord], where: str) -> None:
    """Refuse a list of episodes that is not complete, as one of whose files some were not copied, or has some twice."""
    twice = next((one.index for one, after in pairwise(episodes) if one.index == after.index), None)
    if twice is not None:
        raise DataError(f"meta/ lists episode {twice} more than once", where=where, remedy=COPY)
    if isinstance(total, int) and total != len(episodes):
        raise DataError(
            f"total_episodes is {total}, and meta/ lists {len(episodes)} episodes",
            where=where,
            remedy=f"{COPY}; if no episode is missing, write total_episodes: {len(episodes)}",
        )


def _splits(given: Any, where: str) -> dict[str, str]:
    """The splits of meta/info.json. Raises `DataError` for one that is no range of episodes."""
    named = given if isinstance(given, Mapping) else {"": given}
    for name, episodes in named.items():
        if not isinstance(episodes, str) or _EPISODES.fullmatch(episodes) is None:
            raise DataError(
                f"the split {name!r} is {episodes!r}, not a range of episodes",
                where=where,
                remedy='write it as "first:stop", as "0:40" for the first forty',
            )
    return dict(named)


# -- meta/ ---------------------------------------------------------------------------------------------------------


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"the file cannot be read as JSON: {error}", where=str(path), remedy=COPY) from error
    if not isinstance(content, dict):
        raise DataError(f"the file holds {type(content).__name__}, not an object", where=str(path), remedy=COPY)
    return content


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                if line.strip():
                    yield json.loads(line)
    except OSError as error:
        raise DataError(f"the file cannot be read: {error.strerror}", where=str(path), remedy=COPY) from error
    except ValueError as error:
        raise DataError(f"broken JSON: {error}", where=f"{path}: line {number}", remedy=COPY) from error


def _table(path: Path, without: str = "\0") -> pa.Table:
    try:
        with pa.parquet.ParquetFile(path) as parquet:
            return parquet.read(columns=[name for name in parquet.schema_arrow.names if not name.startswith(without)])
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"the file cannot be read as Parquet: {error}", where=str(path), remedy=COPY) from error


def _episodes_v3(folder: Path, paths: tuple[str, str], videos: Sequence[str]) -> Iterator[EpisodeRecord]:
    for file in sorted((folder / "meta" / "episodes").glob("*/*.parquet")):
        for row in _table(file, without="stats/").to_pylist():
            at = {"chunk_index": row["data/chunk_index"], "file_index": row["data/file_index"]}
            found = {}
            for key in videos:
                where = {name: row[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
                begins = float(row[f"videos/{key}/from_timestamp"])
                ends = float(row.get(f"videos/{key}/to_timestamp", math.nan))
                found[key] = (paths[1].format(video_key=key, **where), begins, ends)
            yield EpisodeRecord(int(row["episode_index"]), int(row["length"]), paths[0].format(**at), found)


def _episodes_v2(
    folder: Path, paths: tuple[str, str], videos: Sequence[str], per_chunk: int
) -> Iterator[EpisodeRecord]:
    for row in _json_lines(folder / "meta" / "episodes.jsonl"):
        index = int(row["episode_index"])
        at = {"episode_chunk": index // per_chunk, "episode_index": index}
        found = {key: (paths[1].format(video_key=key, **at), 0.0, math.inf) for key in videos}
        yield EpisodeRecord(index, int(row["length"]), paths[0].format(**at), found)


def _tasks_v3(folder: Path) -> dict[int, str]:
    table = _table(folder / "meta" / "tasks.parquet")
    texts = [name for name in table.column_names if name != "task_index"]
    return dict(zip(table["task_index"].to_pylist(), table[texts[0]].to_pylist(), strict=True))


def _tasks_v2(folder: Path) -> dict[int, str]:
    return {int(row["task_index"]): str(row["task"]) for row in _json_lines(folder / "meta" / "tasks.jsonl")}
