"""Episodes in HDF5 files: one per file (ALOHA), or one per group, with splits in `mask/` (robomimic, LIBERO)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardtune.data.files import arrow as pa
from shardtune.data.robot.columns import JOIN
from shardtune.data.robot.recorded import ROLES, PictureColumn, encoded_column, pixel_column
from shardtune.errors import DataError

SUFFIXES = (".hdf5", ".h5")
_GROUPS = ("", "data")
_MASKS = "mask"
# The next frame's observations, beside those of each frame.
_NEXT = "next_obs/"
# Attributes with JSON that robomimic, LIBERO and RoboCasa write, in which the instruction has one of these names.
_IN_JSON = ("language_instruction", "lang")
_COPY = "copy the file completely, or record it again"
_CACHE_BYTES = 1 << 26
_ENCODED_BYTES = 1 << 16
# The smallest PNG file has 67 bytes, and a state of bytes fewer dimensions.
_LEAST_BYTES = 64


def hdf5_files(path: Path) -> list[Path]:
    """The files below a directory, or the one, with numbers in names in their order."""
    if not path.is_dir():
        return [path]
    found = (name for name in names_below(path) if name.lower().endswith(SUFFIXES))
    return [path / name for name in sorted(found, key=_natural)]


def names_below(folder: Path) -> Iterator[str]:
    """The relative paths of all files below a directory that are not hidden."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inner = os.path.relpath(place, folder)
        for name in names:
            if not name.startswith("."):
                yield name if inner == "." else f"{inner}/{name}"


def hdf5_splits(path: Path) -> list[str]:
    """The names in `mask/` of the first file; none where there is no such group."""
    with _opened(hdf5_files(path)[0]) as file:
        return sorted(_masks(file))


def hdf5_episodes(path: Path, part: str, columns: Mapping[str, str]) -> Generator[Hdf5Episode, None, None]:
    """The episodes of all files, each to be read before the next.

    Args:
        path: a file, or a directory of files.
        part: the name in `mask/` of those that are wanted; "": all.
        columns: `data.columns`, of which the action's name tells a group with an episode from others.

    Raises:
        DataError: a file is torn, or holds no action or no such part.
    """
    names = [columns["action"].strip().lstrip("/")] if "action" in columns else ROLES["action"]
    actions = [name.split(JOIN)[0] for name in names]
    files, number = hdf5_files(path), 0
    for place, name in enumerate(files):
        with _opened(name) as file:
            groups = _groups(file, name, actions)
            wanted = _wanted(file, name, part)
            unknown = wanted - {group.rpartition("/")[2] for group in groups} if wanted else None
            if unknown:
                raise DataError(f"mask/{part} names {min(unknown)}, which is not there", where=str(name), remedy=_COPY)
            for count, group in enumerate(groups, 1):
                if wanted is None or group.rpartition("/")[2] in wanted:
                    shown = f"{name}: {group}" if group else str(name)
                    yield Hdf5Episode(shown, number, (place + count / len(groups)) / len(files), file[group or "/"])
                number += 1


@dataclass(slots=True)
class Hdf5Episode:
    """A group of datasets, of which the first dimension is that of frames; see `RecordedEpisode`."""

    place: str
    number: int
    progress: float
    group: Any
    _datasets: dict[str, Any] = field(default_factory=dict)
    _attributes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import h5py

        def add(name: str, found: object) -> None:
            if isinstance(found, h5py.Dataset) and not name.startswith(_NEXT):
                self._datasets[name] = found

        with _reading(self.place):
            self.group.visititems(add)
            self._attributes = _attributes(self.group)

    def names(self) -> Sequence[str]:
        return [*self._datasets, *(name for name in self._attributes if name not in self._datasets)]

    def arrays(self) -> Sequence[str]:
        return list(self._datasets)

    def texts(self) -> Sequence[str]:
        return [name for name in self.names() if name not in self._datasets or _is_text(self._datasets[name])]

    def cameras(self) -> Sequence[str]:
        return [name for name, dataset in self._datasets.items() if _is_picture(dataset)]

    def numbers(self, name: str) -> np.ndarray:
        if name not in self._datasets:
            raise DataError(f"{name} is an attribute, not a dataset", where=self.place, remedy="name a dataset")
        with _reading(f"{self.place}: {name}"):
            return np.atleast_1d(self._datasets[name][()])

    def text(self, name: str) -> Sequence[str]:
        if name not in self._datasets:
            return [self._attributes[name]]
        if not _is_text(self._datasets[name]):
            raise DataError(f"{name} holds no text", where=self.place, remedy="name another in data.columns")
        with _reading(f"{self.place}: {name}"):
            return [_decoded(one) for one in np.ravel(self._datasets[name][()])]

    def pictures(self, name: str) -> PictureColumn:
        dataset = self._datasets[name]
        size = int(np.prod(dataset.shape[1:])) if dataset.dtype == np.uint8 else _ENCODED_BYTES
        return PictureColumn(dataset.shape[0], size, partial(self._pictures, name))

    def _pictures(self, name: str, start: int, stop: int) -> pa.Array:
        with _reading(f"{self.place}: {name}"):
            block = self._datasets[name][start:stop]
        if block.ndim == 4:
            return pixel_column(block)
        # Shorter ones are filled up with zeros, which no encoded image ends with.
        return encoded_column([_content(one).rstrip(b"\0") for one in block])


def require_h5py() -> None:
    """Raises `DataError` where HDF5 cannot be read."""
    try:
        import h5py  # noqa: F401
    except ImportError as error:
        raise DataError(
            "the data are in HDF5 files, and h5py, which reads them, is not installed",
            remedy="pip install 'shardtune[recordings]'",
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    require_h5py()
    import h5py

    with _reading(str(path)):
        file = h5py.File(path, "r", locking=False, rdcc_nbytes=_CACHE_BYTES)
    with file:
        yield file


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """h5py raises these for torn files, missing filters and broken links."""
    try:
        yield
    except (OSError, RuntimeError, KeyError) as error:
        raise DataError(f"the file cannot be read as HDF5: {error}", where=where, remedy=_COPY) from error


def _groups(file: Any, path: Path, actions: Sequence[str]) -> list[str]:
    """The paths of the groups that hold an episode, "" for the file itself; those of one group are named alike."""
    import h5py

    if any(action in file for action in actions):
        return [""]
    for above in _GROUPS:
        parent: Any = file.get(above) if above else file
        if not isinstance(parent, h5py.Group):
            continue
        members: dict[str, Any] = {str(name): parent.get(name) for name in parent}
        children = sorted((name for name, one in members.items() if isinstance(one, h5py.Group)), key=_natural)
        alike = {_form(name) for name in children if any(action in members[name] for action in actions)}
        if alike:
            return [f"{above}/{name}".lstrip("/") for name in children if _form(name) in alike]
    raise DataError(
        f"there is no action: neither the file nor its groups nor those of its group data have {' or '.join(actions)}",
        where=str(path),
        remedy=f"name it in data.columns: {{action: …}}; the file has {', '.join(file) or 'nothing'}",
    )


def _masks(file: Any) -> Mapping[str, Any]:
    """The datasets with names of episodes, by split."""
    found = file.get(_MASKS)
    return {name: found[name] for name in found} if isinstance(found, Mapping) else {}


def _wanted(file: Any, path: Path, part: str) -> set[str] | None:
    """The names of the episodes of a split; None: all."""
    if not part:
        return None
    masks = _masks(file)
    if part not in masks:
        raise DataError(f"the file has no mask/{part}", where=str(path), remedy="set split to one that all files have")
    with _reading(f"{path}: mask/{part}"):
        return {_decoded(name) for name in np.ravel(masks[part][()])}


def _is_picture(dataset: Any) -> bool:
    """Colour images: pixels, or files as rows of bytes, filled up or of any length."""
    import h5py

    shape = dataset.shape or ()
    if dataset.dtype == np.uint8:
        return (len(shape) == 4 and shape[3] == 3) or (len(shape) == 2 and shape[1] > _LEAST_BYTES)
    encoded = h5py.check_vlen_dtype(dataset.dtype) == np.uint8 or dataset.dtype.kind == "V"
    return len(shape) == 1 and encoded and dataset.dtype.names is None


def _is_text(dataset: Any) -> bool:
    import h5py

    return h5py.check_string_dtype(dataset.dtype) is not None


def _content(value: Any) -> bytes:
    return value.tobytes() if isinstance(value, np.ndarray | np.void) else bytes(value)


def _decoded(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _attributes(group: Any) -> dict[str, str]:
    """The texts among the attributes of a group and of those that contain it, and instructions in JSON among them."""
    around = [group]
    while around[0].name != "/":
        around.insert(0, around[0].parent)
    found: dict[str, str] = {}
    for one in around:
        for name, value in one.attrs.items():
            if isinstance(value, str | bytes):
                found |= _instructions(_decoded(value)) or {name: _decoded(value)}
    return found


def _instructions(text: str) -> dict[str, str]:
    """Those of a JSON object, in which LIBERO writes a list of characters."""
    if not text.startswith("{"):
        return {}
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    given = {name: content[name] for name in _IN_JSON if content.get(name)}
    return {name: "".join(value) if isinstance(value, list) else str(value) for name, value in given.items()}


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts demo_2 before demo_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _form(name: str) -> str:
    return re.sub(r"\d+", "#", name)
