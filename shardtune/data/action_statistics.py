"""Statistics of actions and states over all frames of a data set, used to normalise them.

Quantiles are those of all frames together, as `np.quantile` computes them. LeRobot's meta/stats.json holds averages
over episodes, which are something else, and is not read.

One rule for all sources: a dimension whose values are all -1, 0 or 1, and not all the same (a gripper that is open or
closed), is left as it is; every other one is normalised. Where both quantiles are equal although the values are not,
the smallest and the largest value take their place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardtune.data.cache_directory import cache_error, cache_root, writable, write_atomically
from shardtune.data.checksum import is_sealed, sealed
from shardtune.data.encoder import FrameOptions, Row, RowError, bad_row
from shardtune.data.robot.content import content_digest
from shardtune.data.robot.frames import describe_frame
from shardtune.data.robot.lerobot_frames import FileVectors, read_vectors
from shardtune.data.robot.quantiles import Quantiles
from shardtune.data.robot.recordings import recording_vectors
from shardtune.data.robot.representation import ENTRY as REPRESENTATION
from shardtune.data.robot.running_stats import Moments
from shardtune.data.robot.tables import holds_actions
from shardtune.data.row_files import read_chunks
from shardtune.data.sources.resolve import DataOptions, resolve_sources
from shardtune.data.sources.source import LEROBOT, ROBOT_KINDS, Source, SourceFile, action_names, prepare_row
from shardtune.errors import DataError

# Part of every key: raise it when the same data yield other numbers than before.
STATISTICS_VERSION = 3
_LOW, _HIGH = 0.01, 0.99
_BLOCK_ROWS = 1 << 15


@dataclass(frozen=True, slots=True)
class Vectors:
    """Some frames of a data set.

    Attributes:
        key: its name.
        episodes: the episodes they belong to.
        actions: float32 [n, A]. state: float32 [n, S], or None.
        place: the file and the first of the episodes, for messages.
        frames: how many there are, where `actions` has several of each; None: one of each.
    """

    key: str
    episodes: Sequence[object]
    actions: np.ndarray
    state: np.ndarray | None
    place: str = ""
    frames: int | None = None


@dataclass(frozen=True, slots=True)
class FieldStatistics:
    """Statistics of one kind of vectors over all frames; tuples of one number per dimension.

    Attributes:
        q01, q99: the quantiles 0.01 and 0.99 of all frames, interpolated linearly.
        mask: whether a dimension is normalised.
        names: of the dimensions, where the data set has them.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    min: tuple[float, ...]
    max: tuple[float, ...]
    q01: tuple[float, ...]
    q99: tuple[float, ...]
    mask: tuple[bool, ...]
    names: tuple[str, ...] | None = None

    def to_json(self) -> dict[str, list[Any]]:
        return {name: list(values) for name, values in asdict(self).items() if values is not None}

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> FieldStatistics:
        """Raises `DataError` for a field that is missing, or has another number of dimensions than the others."""
        mean = content.get("mean")
        size = len(mean) if isinstance(mean, Sequence) else 0
        with_mask = {"mask": [True] * size, **content}
        values: dict[str, tuple[Any, ...]] = {}
        for name in (one.name for one in fields(cls) if one.name in with_mask or one.name != "names"):
            given = with_mask.get(name)
            if not isinstance(given, Sequence) or len(given) != size or not size:
                raise DataError(
                    f"{name!r} is {given!r}, not {size or 'some'} numbers",
                    where="statistics",
                    remedy="the file must be as OpenVLA's dataset_statistics.json",
                )
            kind = {"mask": bool, "names": str}.get(name, float)
            values[name] = tuple(kind(item) for item in given)
        return cls(**values)

    def with_range(self) -> FieldStatistics:
        """The same with the smallest and largest value in place of quantiles that are equal though values differ."""
        equal = [low == high for low, high in zip(self.q01, self.q99, strict=True)]
        low, high = (
            tuple(end if same else quantile for same, end, quantile in zip(equal, ends, quantiles, strict=True))
            for ends, quantiles in ((self.min, self.q01), (self.max, self.q99))
        )
        return replace(self, q01=low, q99=high)


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of one data set.

    Attributes:
        action: of its actions.
        state: of its states; None where it has none.
        frames, episodes: how many there are.
        representation: of the actions, what `Representation.to_json` gives; None: they are absolute.
    """

    action: FieldStatistics
    state: FieldStatistics | None
    frames: int
    episodes: int
    representation: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """As one entry of OpenVLA's `dataset_statistics.json`."""
        proprio = {} if self.state is None else {"proprio": self.state.to_json()}
        counts = {"num_transitions": self.frames, "num_trajectories": self.episodes}
        form = {} if self.representation is None else {REPRESENTATION: dict(self.representation)}
        return {"action": self.action.to_json(), **proprio, **counts, **form}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Statistics:
        """Raises `DataError` for content that is not of the form of `to_json`."""
        if not isinstance(content.get("action"), Mapping):
            raise DataError(
                "there are no statistics of actions", where="statistics", remedy="write {key: {action: {…}}}"
            )
        state = content.get("proprio")
        return cls(
            FieldStatistics.from_json(content["action"]),
            None if state is None else FieldStatistics.from_json(state),
            int(content.get("num_transitions", 0)),
            int(content.get("num_trajectories", 0)),
            content.get(REPRESENTATION),
        )

    def for_normalising(self, names: Sequence[str] | None) -> Statistics:
        """The same with the names of the action's dimensions, if there are as many, and `with_range`."""
        kept = tuple(names) if names is not None and len(names) == len(self.action.mask) else None
        state = None if self.state is None else self.state.with_range()
        return replace(self, action=replace(self.action.with_range(), names=kept), state=state)


def to_json(statistics: Mapping[str, Statistics]) -> dict[str, Any]:
    """The content of `dataset_statistics.json`."""
    return {key: one.to_json() for key, one in statistics.items()}


def from_json(content: Mapping[str, Any]) -> dict[str, Statistics]:
    """The reverse of `to_json`."""
    return {key: Statistics.from_json(one) for key, one in content.items()}


def compute(read: Callable[[], Iterable[Vectors]]) -> dict[str, Statistics]:
    """The statistics of each key.

    Args:
        read: gives all frames; called twice.
    """
    sums: dict[str, _Sums] = {}
    for vectors in read():
        if vectors.key not in sums:
            sums[vectors.key] = _Sums.of(vectors)
        sums[vectors.key].add(vectors)
    for one in sums.values():
        one.narrow()
    for vectors in read():
        sums[vectors.key].add_again(vectors)
    return {key: one.statistics() for key, one in sums.items()}


def _blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(values), _BLOCK_ROWS):
        yield values[start : start + _BLOCK_ROWS]


class _FieldSums:
    """The running sums of one kind of vectors."""

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions
        self.quantiles = Quantiles(dimensions, (_LOW, _HIGH))
        self.moments: Moments | None = None
        self.switch = np.ones(dimensions, dtype=bool)  # dimensions of which all values so far are -1, 0 or 1

    def add(self, values: np.ndarray) -> None:
        for block in _blocks(values):
            moments = Moments.of(block)
            self.moments = moments if self.moments is None else self.moments.joined(moments)
            self.quantiles.count(block)
            if self.switch.any():
                maybe = block[:, self.switch]
                self.switch[self.switch] = ((maybe == 0) | (np.abs(maybe) == 1)).all(axis=0)

    def add_again(self, values: np.ndarray) -> None:
        for block in _blocks(values):
            self.quantiles.count_again(block)

    def statistics(self) -> FieldStatistics:
        assert self.moments is not None
        low, high = self.quantiles.values()
        found = (self.moments.mean, self.moments.std, self.moments.least, self.moments.greatest, low, high)
        mask = ~(self.switch & (self.moments.least < self.moments.greatest))
        return FieldStatistics(*(tuple(one.tolist()) for one in found), mask=tuple(mask.tolist()))


@dataclass(slots=True)
class _Sums:
    """The running sums of one data set."""

    first: str
    action: _FieldSums
    state: _FieldSums | None
    episodes: set[object] = field(default_factory=set)
    frames: int = 0

    @classmethod
    def of(cls, first: Vectors) -> _Sums:
        state = None if first.state is None else _FieldSums(first.state.shape[1])
        return cls(first.place, _FieldSums(first.actions.shape[1]), state)

    def add(self, vectors: Vectors) -> None:
        self.frames += len(vectors.actions) if vectors.frames is None else vectors.frames
        self.episodes.update(vectors.episodes)
        for sums, values in self._fields(vectors):
            sums.add(values)

    def narrow(self) -> None:
        for sums in (self.action, self.state):
            if sums is not None:
                sums.quantiles.narrow()

    def add_again(self, vectors: Vectors) -> None:
        for sums, values in self._fields(vectors):
            sums.add_again(values)

    def statistics(self) -> Statistics:
        state = None if self.state is None else self.state.statistics()
        return Statistics(self.action.statistics(), state, self.frames, len(self.episodes))

    def _fields(self, vectors: Vectors) -> list[tuple[_FieldSums, np.ndarray]]:
        """Raises `DataError` for frames whose dimensions differ from earlier ones."""
        found = [("actions", self.action, vectors.actions)]
        if (self.state is None) != (vectors.state is None):
            raise DataError(
                f"some frames have a state and others, as in {self.first}, have none"
                if self.state is None
                else f"some frames have no state and others, as in {self.first}, have one",
                where=vectors.place,
                remedy="give every frame one, or name the data sets apart",
            )
        if self.state is not None and vectors.state is not None:
            found.append(("state", self.state, vectors.state))
        for name, sums, values in found:
            if values.shape[1] != sums.dimensions:
                raise DataError(
                    f"the {name} of {vectors.key} have {values.shape[1]} dimensions here and {sums.dimensions} in "
                    f"{self.first}",
                    where=vectors.place,
                    remedy="name data sets of different robots apart",
                )
        return [(sums, values) for _, sums, values in found]


def data_statistics(spec: object, data: DataOptions, frames: FrameOptions) -> dict[str, Statistics]:
    """The statistics of the data of `data.train_data_paths`, as `source_statistics` computes them.

    Args:
        spec: as for `resolve_sources`.
        data: the recipe's `data` section.
        frames: how the rows are read.
    """
    sources = resolve_sources(spec, data, frames=frames, report=lambda text: None)
    return source_statistics(sources, cache_dir=data.cache_dir, on_bad_row=data.on_bad_row)


def source_statistics(
    sources: Sequence[Source], *, cache_dir: str | Path | None = None, on_bad_row: str = "fail"
) -> dict[str, Statistics]:
    """The statistics of each source under its name, over all its frames, whatever its `weight` and `max_samples`.

    Read from the cache, or computed and stored there. The cost: two passes over the columns of actions and states,
    which for LeRobot data sets are all that is read; memory for the numbers of one data file (0.6 GB for one of 100 MB
    that holds nothing else), and 0.5 MB per dimension in the first pass, 2.5 MB in the second, however many frames
    there are.

    Args:
        sources: with `frames`.
        cache_dir: `data.cache_dir`.
        on_bad_row: `skip` leaves out frames that cannot be used, `fail` raises `DataError` at the first.
    """
    root = cache_root(cache_dir)
    found: dict[str, Statistics] = {}
    for source in sources:
        for key, one in _of_source(source, root, on_bad_row == "skip").items():
            if key in found:
                raise DataError(
                    f"two data sets have the name {key!r}", where="data", remedy="give them different names"
                )
            found[key] = one
    return found


def _of_source(source: Source, root: Path, skip_bad: bool) -> dict[str, Statistics]:
    path = root / "statistics" / f"{_key(source, root, skip_bad)}.json"
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, DataError):  # none there, or damaged
        document = json.loads(path.read_text(encoding="utf-8"))
        if is_sealed(document):
            return from_json(document["statistics"])
    names = action_names(source)
    computed = {
        key: _represented(one.for_normalising(names if key == source.name else None), source)
        for key, one in compute(lambda: _vectors(source, skip_bad)).items()
    }
    if not computed:
        raise DataError("no frame can be used", where=source.files[0].label, remedy="see shardtune data preview")
    try:
        writable(path.parent)
        write_atomically(path, json.dumps(sealed({"statistics": to_json(computed)})).encode())
    except OSError as error:
        raise cache_error(error, root) from error
    return computed


def _key(source: Source, root: Path, skip_bad: bool) -> str:
    depends = {
        "version": STATISTICS_VERSION,
        "name": source.name,
        "files": [[content_digest(file.path, root, file.part), file.kind, file.part] for file in source.files],
        "columns": dict(source.columns),
        "transform": None if source.transform is None else [source.transform.digest, source.transform.spec],
        "skip_bad": skip_bad,
    }
    if source.frames is not None and not _frame_by_frame(source):  # otherwise the chunk has no part in it
        depends["frames"] = asdict(source.frames)
    return hashlib.blake2b(json.dumps(depends, sort_keys=True).encode(), digest_size=20).hexdigest()


def _represented(statistics: Statistics, source: Source) -> Statistics:
    """The statistics with the representation of the source's actions."""
    form = source.representation
    return statistics if form is None else replace(statistics, representation=form.to_json(len(statistics.action.mask)))


def _frame_by_frame(source: Source) -> bool:
    """Whether each frame counts by itself; otherwise rows do, with the actions of their chunk."""
    return source.transform is None and source.representation is None


def _vectors(source: Source, skip_bad: bool) -> Iterator[Vectors]:
    alone = _frame_by_frame(source)
    single = replace(source, frames=FrameOptions())
    for file in source.files:
        if file.kind in ROBOT_KINDS and alone:
            for whole in _file_vectors(file, source.columns):
                fine = np.asarray(np.isfinite(whole.actions).all(axis=1))
                if whole.state is not None:
                    fine = fine & np.isfinite(whole.state).all(axis=1)
                if not fine.all() and not skip_bad:
                    raise _not_finite(file, whole, int(np.flatnonzero(~fine)[0]))
                kept = whole.of(fine)
                if len(kept.actions):
                    episodes = [(file.label, episode) for episode in np.unique(kept.episodes).tolist()]
                    place = f"{file.label}: episode {episodes[0][1]}"
                    yield Vectors(source.name, episodes, kept.actions, kept.state, place)
        elif alone and not holds_actions(read_chunks(file.path, file.kind), source.columns):
            yield from _row_vectors(single, file, skip_bad)
        else:
            yield from _row_vectors(source, file, skip_bad)


def _file_vectors(file: SourceFile, columns: Mapping[str, str]) -> Iterator[FileVectors]:
    if file.kind == LEROBOT:
        return read_vectors(file.path, file.part, columns)
    return recording_vectors(file.kind, file.path, file.part, columns)


def _not_finite(file: SourceFile, vectors: FileVectors, at: int) -> DataError:
    name, values = "action", vectors.actions[at]
    if vectors.state is not None and np.isfinite(values).all():
        name, values = "state", vectors.state[at]
    return DataError(
        f"the {name} {values.tolist()} is not finite",
        where=f"{file.label}: episode {vectors.episodes[at]}, frame {vectors.frames[at]}",
        remedy="mend the frame, or set data.on_bad_row=skip to leave such frames out",
    )


def _row_vectors(source: Source, file: SourceFile, skip_bad: bool) -> Iterator[Vectors]:
    """The same for prepared rows: the state of each, and its first action, or, as differences from a state or from the
    action before depend on the step, all of its actions before the episode's end."""
    waiting: dict[tuple[str, int, int], list[Row]] = {}
    for number, row in source.rows(file):
        try:
            if isinstance(row, RowError):
                raise row
            prepared = _with_arrays(prepare_row(row, source))
        except RowError as error:
            if not skip_bad:
                raise bad_row(file.label, number, error.reason) from error
            continue
        if prepared is None:
            continue
        state = prepared["state"]
        kind = (prepared["dataset"], prepared["actions"].shape[1], 0 if state is None else len(state))
        rows = waiting.setdefault(kind, [])
        rows.append(prepared)
        if len(rows) == _BLOCK_ROWS:
            yield _stacked(waiting.pop(kind), source, file)
    for rows in waiting.values():
        yield _stacked(rows, source, file)


def _with_arrays(row: Row | None) -> Row | None:
    """A row as `data.transform` may have changed it."""
    if row is None:
        return None
    describe_frame(row)
    state = None if row["state"] is None else np.asarray(row["state"], np.float32)
    return {**row, "actions": np.asarray(row["actions"], np.float32), "state": state}


def _stacked(rows: Sequence[Row], source: Source, file: SourceFile) -> Vectors:
    states = [row["state"] for row in rows if row["state"] is not None]
    if source.representation is None:
        actions = np.stack([row["actions"][0] for row in rows])
    else:
        actions = np.concatenate([row["actions"][~np.asarray(row["action_is_pad"], bool)] for row in rows])
    episodes = [(file.label, row.get("episode")) for row in rows]
    place = f"{file.label}: episode {rows[0].get('episode')}"
    return Vectors(rows[0]["dataset"], episodes, actions, np.stack(states) if states else None, place, len(rows))
