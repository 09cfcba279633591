"""Episodes of RLDS data sets as tensorflow_datasets stores them: two JSON files, and TFRecord files of episodes."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardtune.data.files import arrow as pa
from shardtune.data.robot.recorded import PictureColumn, encoded_column, pixel_column
from shardtune.data.robot.tfrecord import Feature, example_features, read_records
from shardtune.errors import DataError

FEATURES, INFO = "features.json", "dataset_info.json"
_STEPS = "steps"
_SHARD = re.compile(r"(?P<name>.+)-(?P<split>[^-]+)\.(?P<form>\w+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_COPY = "copy the data set completely, or download it again"


@dataclass(frozen=True, slots=True)
class Spec:
    """What features.json says of one feature.

    Attributes:
        shape: of one frame's value; -1: unknown.
        dtype: numpy's name, or string.
        form: tensor, text or image.
        encoding: of a tensor: none, bytes or zlib.
    """

    shape: tuple[int, ...]
    dtype: str
    form: str
    encoding: str = "none"


@dataclass(frozen=True, slots=True)
class RldsSet:
    """A data set without its episodes.

    Attributes:
        name: of the data set.
        steps: the features of frames, by their path below `steps`. whole: those of episodes.
        shards: split -> number -> the file.
        counts: split -> how many files there should be.
        lengths: split -> how many episodes each file has; empty where dataset_info.json does not state it.
    """

    folder: Path
    name: str
    steps: Mapping[str, Spec]
    whole: Mapping[str, Spec]
    shards: Mapping[str, Mapping[int, Path]]
    counts: Mapping[str, int]
    lengths: Mapping[str, tuple[int, ...]]

    def files(self, split: str) -> list[Path]:
        """The files of a split in order. Raises `DataError` where one is missing."""
        there = self.shards[split]
        missing = [number for number in range(self.counts[split]) if number not in there]
        if missing or len(there) != self.counts[split]:
            what = f"number {missing[0]} is missing" if missing else f"there are {len(there)}"
            raise DataError(
                f"of the {self.counts[split]} files of the split {split}, {what}",
                where=str(self.folder),
                remedy="download it completely, or name the files to use by a pattern (….tfrecord-*)",
            )
        return [there[number] for number in sorted(there)]


def rlds_folder(path: Path) -> Path | None:
    """The directory of a version of a data set: the given one, the newest version in it, or that of a file of it."""
    if path.is_file():
        return path.parent if _SHARD.fullmatch(path.name) and (path.parent / FEATURES).is_file() else None
    if (path / FEATURES).is_file():
        return path
    versions = [file.parent for file in path.glob(f"*/{FEATURES}") if re.fullmatch(r"\d+(\.\d+)*", file.parent.name)]
    return max(versions, key=lambda folder: [int(part) for part in folder.name.split(".")], default=None)


def open_rlds(folder: Path) -> RldsSet:
    """Reads the two JSON files, and the names of the others.

    Raises:
        DataError: one is torn, the data set has no steps, is in another format than TFRecord, or a file is missing.
    """
    described = _json(folder / FEATURES)
    info = _json(folder / INFO) if (folder / INFO).is_file() else {}
    try:
        features = described["featuresDict"]["features"]
        steps = features.get(_STEPS, {}).get("sequence", {}).get("feature")
        if steps is None:
            raise DataError(
                "the data set has no steps: it is not one of episodes (RLDS)",
                where=str(folder / FEATURES),
                remedy="name other data",
            )
        found = dict(_specs(steps, ""))
        whole = {name: spec for key, one in features.items() if key != _STEPS for name, spec in _specs(one, key)}
        lengths = {one["name"]: tuple(map(int, one.get("shardLengths", ()))) for one in info.get("splits", ())}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"the description of the data set is not as tensorflow_datasets writes it: {error!r}",
            where=str(folder),
            remedy=_COPY,
        ) from error
    shards = _shards(folder)
    counts = {split: len(lengths.get(split, ())) or _count(files) for split, files in shards.items()}
    name = str(info.get("name") or folder.parent.name)
    return RldsSet(folder, name, found, whole, shards, counts, lengths)


def rlds_episodes(path: Path, split: str, *, check: bool = True) -> Generator[RldsEpisode, None, None]:
    """The episodes of a split, or of one of its files.

    Args:
        path: the directory of a version, or a file in it.
        check: compare the checksum of each episode, which reads all of it; otherwise only what is used is read.

    Raises:
        DataError: a file is torn, or has another number of episodes than dataset_info.json states.
    """
    described = open_rlds(path if path.is_dir() else path.parent)
    files = described.files(split) if path.is_dir() else [path]
    lengths = described.lengths.get(split, ()) if path.is_dir() else ()
    number = 0
    for place, file in enumerate(files):
        count = 0
        for count, (record, share) in enumerate(read_records(file, check=check), 1):
            shown = f"{file}: record {count}, episode {number}"
            try:
                features = example_features(record)
            except ValueError as error:
                raise DataError(f"the record is no tf.train.Example: {error}", where=shown, remedy=_COPY) from error
            yield RldsEpisode(shown, number, (place + share) / len(files), described, features)
            number += 1
        if lengths and count != lengths[place]:
            raise DataError(
                f"the file has {count:,} episodes and, by {INFO}, {lengths[place]:,}", where=str(file), remedy=_COPY
            )


@dataclass(frozen=True, slots=True)
class RldsEpisode:
    """A record with all frames of an episode; see `RecordedEpisode`."""

    place: str
    number: int
    progress: float
    described: RldsSet
    features: Mapping[str, Feature]

    def arrays(self) -> Sequence[str]:
        return [name for name in self.described.steps if f"{_STEPS}/{name}" in self.features]

    def names(self) -> Sequence[str]:
        return [*self.arrays(), *(name for name in self.described.whole if name in self.features)]

    def texts(self) -> Sequence[str]:
        return [name for name in self.names() if self._spec(name).dtype == "string"]

    def cameras(self) -> Sequence[str]:
        return [name for name in self.names() if name in self.described.steps and _is_picture(self._spec(name))]

    def numbers(self, name: str) -> np.ndarray:
        if name not in self.described.steps:
            raise self._fault(f"{name} belongs to the episode, not to its frames")
        spec, feature = self._spec(name), self.features[f"{_STEPS}/{name}"]
        if spec.dtype == "string" or spec.form == "image":
            raise self._fault(f"{name} holds {'text' if spec.dtype == 'string' else 'images'}, not numbers")
        try:
            if spec.encoding == "none":
                return feature.numbers().reshape(-1, *spec.shape)
            strings = [bytes(one) for one in feature.byte_strings()]
            if spec.encoding == "zlib":
                strings = [zlib.decompress(one) for one in strings]
            return np.frombuffer(b"".join(strings), np.dtype(spec.dtype)).reshape(-1, *spec.shape)
        except (ValueError, TypeError, zlib.error) as error:
            raise self._fault(f"{name} is not {spec.dtype} {list(spec.shape)} per frame: {error}") from error

    def text(self, name: str) -> Sequence[str]:
        key = f"{_STEPS}/{name}" if name in self.described.steps else name
        return [bytes(one).decode("utf-8", "replace") for one in self._strings(name, key)]

    def pictures(self, name: str) -> PictureColumn:
        if self._spec(name).form != "image":
            pixels = self.numbers(name).astype(np.uint8)
            return PictureColumn(len(pixels), pixels[:1].nbytes, lambda start, stop: pixel_column(pixels[start:stop]))
        images = self._strings(name, f"{_STEPS}/{name}")
        most = max((len(one) for one in images), default=0)
        return PictureColumn(len(images), most, partial(_encoded, images))

    def _spec(self, name: str) -> Spec:
        return self.described.steps.get(name) or self.described.whole[name]

    def _strings(self, name: str, key: str) -> list[memoryview]:
        try:
            return self.features[key].byte_strings()
        except ValueError as error:
            raise self._fault(f"{name} is torn, or no text or image: {error}") from error

    def _fault(self, what: str) -> DataError:
        return DataError(what, where=self.place, remedy="name another in data.columns")


def _encoded(images: Sequence[memoryview], start: int, stop: int) -> pa.Array:
    return encoded_column([bytes(one) for one in images[start:stop]])


def _is_picture(spec: Spec) -> bool:
    """Images in colour; tensors of pixels, too."""
    flat = spec.form == "image" or (len(spec.shape) == 3 and min(spec.shape) > 0)
    return flat and spec.dtype == "uint8" and spec.shape[-1:] in ((3,), (-1,))


def _specs(feature: Mapping[str, Any], path: str) -> Iterator[tuple[str, Spec]]:
    """The features below one, by their paths; those of kinds that robot data do not have are left out."""
    if "featuresDict" in feature:
        for name, inner in feature["featuresDict"].get("features", {}).items():
            yield from _specs(inner, f"{path}/{name}".lstrip("/"))
    for form in ("tensor", "image", "text"):
        if form in feature:
            content = feature[form] or {}
            shape = tuple(int(one) for one in (content.get("shape") or {}).get("dimensions", ()))
            dtype = "string" if form == "text" else str(content.get("dtype") or "uint8")
            yield path, Spec(shape, dtype, form, str(content.get("encoding") or "none"))


def _shards(folder: Path) -> dict[str, dict[int, Path]]:
    """Split -> number -> file, of the files that are there."""
    found: dict[str, dict[int, Path]] = {}
    for file in sorted(folder.iterdir()):
        named = _SHARD.fullmatch(file.name)
        if named is not None:
            if named["form"] != "tfrecord":
                raise DataError(
                    f"the data set is stored as {named['form']}, which is not read",
                    where=str(file),
                    remedy="write it with file_format='tfrecord' (tensorflow_datasets)",
                )
            found.setdefault(named["split"], {})[int(named["number"])] = file
    if not found:
        raise DataError("the data set has no file of episodes", where=str(folder), remedy=_COPY)
    return found


def _count(files: Mapping[int, Path]) -> int:
    """How many files there should be, by their names."""
    return int(next(iter(files.values())).name.rpartition("-")[2])


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"the file cannot be read as JSON: {error}", where=str(path), remedy=_COPY) from error
    if not isinstance(content, dict):
        raise DataError(f"the file holds {type(content).__name__}, not an object", where=str(path), remedy=_COPY)
    return content
