"""Recordings by path: which files are one, its splits, its files, and its frames."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path

from shardtune.data.encoder import FrameOptions
from shardtune.data.files.chunk import Chunk
from shardtune.data.robot.hdf5 import SUFFIXES, hdf5_episodes, hdf5_files, hdf5_splits, names_below
from shardtune.data.robot.lerobot_frames import FileVectors
from shardtune.data.robot.recorded import RecordedEpisode, read_recorded, recorded_roles, recorded_vectors
from shardtune.data.robot.rlds import open_rlds, rlds_episodes, rlds_folder
from shardtune.data.row_files import kind_of

HDF5, RLDS = "HDF5", "RLDS"
RECORDINGS = (HDF5, RLDS)
"""The kinds of recordings, as `SourceFile.kind` has them."""
# Files of these kinds may lie beside recordings and describe them.
_BESIDE = (None, "json")


def recording_of(path: Path) -> tuple[str, Path] | None:
    """The kind of the recording at a path, and the file or directory that is read; None for anything else.

    A directory with HDF5 files is one if it holds no tables.
    """
    folder = rlds_folder(path)
    if folder is not None:
        return RLDS, folder if path.is_dir() else path
    if path.is_file():
        return (HDF5, path) if path.suffix.lower() in SUFFIXES else None
    found = list(names_below(path))
    others = [name for name in found if not name.lower().endswith(SUFFIXES)]
    if len(others) == len(found) or any(kind_of(Path(name)) not in _BESIDE for name in others):
        return None
    return HDF5, path


def recording_name(kind: str, path: Path) -> str:
    """A name for the data set at a path."""
    if kind == RLDS and path.is_dir():
        return open_rlds(path).name
    return path.name.partition(".")[0] if path.is_file() else path.resolve().name


def recording_splits(kind: str, path: Path) -> list[str]:
    """The splits by name; none where a recording is not divided."""
    if kind == HDF5:
        return hdf5_splits(path)
    return list(open_rlds(path).shards) if path.is_dir() else []


def recording_files(path: Path, part: str) -> list[Path]:
    """All files on which the rows of a recording depend."""
    folder = rlds_folder(path)
    if folder is None:
        return hdf5_files(path)
    described = [file for file in sorted(folder.glob("*.json")) if file.is_file()]
    return [*described, *(open_rlds(folder).files(part) if path.is_dir() else [path])]


def read_recording(
    kind: str, path: Path, part: str, columns: Mapping[str, str], options: FrameOptions, dataset: str, prefix: str
) -> Iterator[Chunk]:
    """The frames in order; see `read_recorded`."""
    return read_recorded(_episodes(kind, path, part, columns), columns, options, dataset, path, prefix)


def recording_vectors(kind: str, path: Path, part: str, columns: Mapping[str, str]) -> Iterator[FileVectors]:
    """Actions and states episode by episode; of other contents as little as possible is read."""
    return recorded_vectors(_episodes(kind, path, part, columns, check=False), columns)


def recording_roles(
    kind: str, path: Path, part: str, columns: Mapping[str, str], options: FrameOptions
) -> tuple[str, list[str]]:
    """Which arrays are what, in words, and those that are not read."""
    with closing(_episodes(kind, path, part, columns, check=False)) as episodes:
        return recorded_roles(next(episodes), columns, options)


def _episodes(
    kind: str, path: Path, part: str, columns: Mapping[str, str], *, check: bool = True
) -> Generator[RecordedEpisode, None, None]:
    if kind == HDF5:
        return hdf5_episodes(path, part, columns)
    return rlds_episodes(path, part, check=check)
