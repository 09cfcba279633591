"""Episodes of recordings (HDF5, RLDS) as frames: the roles of their arrays, and rows as of a LeRobot data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from shardtune.data.encoder import FrameOptions, RowError
from shardtune.data.files import arrow as pa
from shardtune.data.files.chunk import Chunk, RowChunk
from shardtune.data.robot.columns import JOIN, Columns, find_columns
from shardtune.data.robot.frames import FrameChunk, Origin, episode_digest
from shardtune.data.robot.lerobot_frames import FileVectors
from shardtune.data.robot.returns import RETURN, discounted, role_of
from shardtune.errors import DataError

ROLES = {
    "action": (
        *("action", "actions"),
        "action/world_vector + action/rotation_delta + action/gripper_closedness_action",
    ),
    "state": (
        *("observations/qpos", "observations/state", "observation/state", "observation/proprio", "obs/state", "state"),
        *("obs/robot0_eef_pos + obs/robot0_eef_quat + obs/robot0_gripper_qpos", "obs/ee_states + obs/gripper_states"),
        *("observation/joint_position + observation/gripper_position", "obs/agent/qpos", "observations", "obs"),
    ),
    "instruction": (
        *("language_instruction", "observation/language_instruction", "observation/natural_language_instruction"),
        *("instruction", "task", "task_description", "language", "lang"),
    ),
    "reward": ("reward", "rewards"),
    "return": ("return",),
}
"""Role -> the usual names of arrays, relative to the episode; parts joined by " + " are one vector."""
_ENDS = ("is_first", "is_last", "is_terminal", "discount", "dones")
"""Arrays that say where an episode begins and ends."""
_CHUNK_FRAMES = 64
_CHUNK_BYTES = 1 << 24
_VECTOR_FRAMES = 1 << 18


@dataclass(frozen=True, slots=True)
class PictureColumn:
    """The images of one camera in an episode.

    Attributes:
        count: how many there are.
        frame_bytes: what one takes in memory, about.
        read: the images [start, stop) as a column that `image_record` understands.
    """

    count: int
    frame_bytes: int
    read: Callable[[int, int], pa.Array]


class RecordedEpisode(Protocol):
    """One episode in a file, read piece by piece. Its methods raise `DataError` for what cannot be read."""

    @property
    def place(self) -> str:
        """File and group or record, for messages."""
        ...

    @property
    def number(self) -> int:
        """Its place among the episodes of the source, from 0."""
        ...

    @property
    def progress(self) -> float:
        """The share of the source that ends with it."""
        ...

    def names(self) -> Sequence[str]:
        """All arrays and texts, relative to the episode."""
        ...

    def arrays(self) -> Sequence[str]:
        """The names of what each frame has."""
        ...

    def texts(self) -> Sequence[str]:
        """The names of texts."""
        ...

    def cameras(self) -> Sequence[str]:
        """The names of colour images."""
        ...

    def numbers(self, name: str) -> np.ndarray:
        """[frames, …]."""
        ...

    def text(self, name: str) -> Sequence[str]:
        """One text for the whole episode, or one per frame."""
        ...

    def pictures(self, name: str) -> PictureColumn: ...


def read_recorded(
    episodes: Iterable[RecordedEpisode],
    columns: Mapping[str, str],
    options: FrameOptions,
    dataset: str,
    folder: Path,
    prefix: str = "",
) -> Iterator[Chunk]:
    """The frames of all episodes in order; row numbers count them from 1.

    Args:
        columns: `data.columns`.
        dataset: the name under which the statistics are kept.
        folder: of the files.
        prefix: what the digests of episodes have before their number, where a source has several files.

    Raises:
        DataError: an array is missing or of another form, or an episode differs from the first in its dimensions or
            cameras; with file and episode.
    """
    first: _Vectors | None = None
    done = 0
    for episode in episodes:
        vectors = _Vectors.of(episode, columns)
        first = first or vectors
        vectors.require_same(first)
        yield from _chunks(vectors, options, Origin(dataset, episode.place, folder), prefix, done)
        done += len(vectors.actions)


def recorded_vectors(episodes: Iterable[RecordedEpisode], columns: Mapping[str, str]) -> Iterator[FileVectors]:
    """Actions and states of some episodes at a time; no image is read. Raises `DataError` as `read_recorded`."""
    first: _Vectors | None = None
    waiting: list[_Vectors] = []
    frames = 0
    for episode in episodes:
        vectors = _Vectors.of(episode, columns)
        first = first or vectors
        vectors.require_same(first)
        waiting.append(vectors)
        frames += len(vectors.actions)
        if frames >= _VECTOR_FRAMES:
            yield _together(waiting)
            waiting, frames = [], 0
    if waiting:
        yield _together(waiting)


def recorded_roles(
    episode: RecordedEpisode, columns: Mapping[str, str], options: FrameOptions
) -> tuple[str, list[str]]:
    """Which arrays are the action, the state and the instruction, in words; those that are not read, texts first."""
    found, texts = _columns(episode, columns), episode.texts()
    roles = ", ".join(f"{role}: {found.named.get(role, 'none')}" for role in ("action", "state", "instruction"))
    idle = {RETURN, "reward"} - {role_of(options)}
    named = [name for role, name in found.named.items() if role not in idle]
    joined = {part for name in named for part in (name, *name.split(JOIN))}
    read = {*joined, *found.cameras.values(), *_ENDS}
    return roles, sorted((name for name in episode.arrays() if name not in read), key=lambda name: name not in texts)


def _together(episodes: Sequence[_Vectors]) -> FileVectors:
    numbers = [np.full(len(one.actions), one.episode.number) for one in episodes]
    states = [one.state for one in episodes if one.state is not None]
    return FileVectors(
        np.concatenate(numbers),
        np.concatenate([np.arange(len(one.actions)) for one in episodes]),
        np.concatenate([one.actions for one in episodes]),
        np.concatenate(states) if states else None,
    )


@dataclass(frozen=True, slots=True)
class _Vectors:
    """An episode without its images.

    Attributes:
        actions: float32 [T, A]. state: float32 [T, S], or None.
    """

    episode: RecordedEpisode
    columns: Columns
    actions: np.ndarray
    state: np.ndarray | None

    @classmethod
    def of(cls, episode: RecordedEpisode, mapping: Mapping[str, str]) -> _Vectors:
        found = _columns(episode, mapping)
        actions = _joined(episode, found.named["action"])
        state = _joined(episode, found.named["state"]) if "state" in found.named else None
        if state is not None:
            _require_length(episode, found.named["state"], len(state), len(actions))
            state = state[: len(actions)]
        return cls(episode, found, actions, state)

    def require_same(self, first: _Vectors) -> None:
        """Refuse an episode whose dimensions or cameras are not those of the first."""
        sizes = [None if one.state is None else one.state.shape[1] for one in (self, first)]
        facts = [
            ("actions have", self.actions.shape[1], first.actions.shape[1], "dimensions"),
            ("state has", sizes[0] or "no", sizes[1] or "no", "dimensions"),
        ]
        for what, here, there, unit in facts:
            if here != there:
                raise _fault(
                    self.episode,
                    f"the {what} {here} {unit} here and {there} in {first.episode.place}",
                    "name data sets of different robots apart",
                )
        cameras = [", ".join(one.columns.cameras) or "none" for one in (self, first)]
        if cameras[0] != cameras[1]:
            raise _fault(
                self.episode,
                f"the cameras are {cameras[0]} here and {cameras[1]} in {first.episode.place}",
                "name those that all episodes have in data.columns: {images.CAMERA: …}",
            )

    def instructions(self) -> Sequence[str]:
        """One per frame, empty where there is none."""
        name = self.columns.named.get("instruction")
        texts = [""] if name is None else self.episode.text(name)
        if len(texts) == 1:
            return [texts[0]] * len(self.actions)
        if len(texts) not in (len(self.actions), len(self.actions) + 1):
            raise _fault(
                self.episode,
                f"{name} holds {len(texts)} texts for {len(self.actions):,} frames",
                "give one for the episode, or one for each frame; or name another array in data.columns: "
                "{instruction: …}",
            )
        return texts[: len(self.actions)]

    def returns(self, options: FrameOptions) -> np.ndarray | None:
        """float64 [T]; None where they are not wanted, or the data have none."""
        role, named = role_of(options), self.columns.named
        if role is None or (role == RETURN and role not in named):
            return None  # `data.transform` may give rows a return
        if role not in named:
            raise _fault(
                self.episode,
                "there are no rewards, from which returns are to be computed",
                f"name them in data.columns ({role}: …), or leave model.value_head.discount out",
            )
        values = _joined(self.episode, named[role])
        _require_length(self.episode, named[role], len(values), len(self.actions))
        if values.shape[1] != 1:
            raise _fault(self.episode, f"{named[role]} has {values.shape[1]} values a frame", "name one number a frame")
        found = values[: len(self.actions), 0].astype(np.float64)
        return found if options.discount is None else discounted(found, options.discount)

    def pictures(self) -> dict[str, PictureColumn]:
        found = {camera: self.episode.pictures(name) for camera, name in self.columns.cameras.items()}
        for camera, column in found.items():
            _require_length(self.episode, self.columns.cameras[camera], column.count, len(self.actions))
        return found


def _chunks(vectors: _Vectors, options: FrameOptions, origin: Origin, prefix: str, done: int) -> Iterator[Chunk]:
    number, length = vectors.episode.number, len(vectors.actions)
    if not length:
        error = RowError(f"episode {number} has no frame ({vectors.episode.place})")
        yield RowChunk([(done + 1, error)], vectors.episode.progress)
        return
    instructions, pictures, returns = vectors.instructions(), vectors.pictures(), vectors.returns(options)
    state = None if vectors.state is None else vectors.state[0]
    digest = episode_digest(f"{prefix}{number}", instructions[0], vectors.actions[0], state)
    size = min(_CHUNK_FRAMES, max(1, _CHUNK_BYTES // max(1, sum(one.frame_bytes for one in pictures.values()))))
    for start in range(0, length, size):
        stop = min(start + size, length)
        least = max(0, start - (options.observations - 1))
        yield FrameChunk(
            origin=origin,
            options=options,
            before=start - least,
            numbers=range(done + start + 1, done + stop + 1),
            episodes=[number] * (stop - start),
            frames=range(start, stop),
            digests=np.full(stop - start, digest, np.uint64),
            instructions=instructions[start:stop],
            state=None if vectors.state is None else vectors.state[least:stop],
            actions=vectors.actions[least : stop + options.chunk - 1],
            left=np.arange(length - start, length - stop, -1),
            pictures=_batch(pictures, least, stop),
            progress=vectors.episode.progress,
            returns=None if returns is None else returns[start:stop],
        )


def _batch(pictures: Mapping[str, PictureColumn], start: int, stop: int) -> pa.RecordBatch:
    if not pictures:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * (stop - start), pa.struct([])))
    return pa.RecordBatch.from_arrays([one.read(start, stop) for one in pictures.values()], names=list(pictures))


def _columns(episode: RecordedEpisode, mapping: Mapping[str, str]) -> Columns:
    names, texts, cameras = episode.names(), episode.texts(), episode.cameras()
    usual = {**ROLES, "instruction": tuple(name for name in ROLES["instruction"] if name in texts)}
    named = {role: JOIN.join(_within(part) for part in column.split(JOIN)) for role, column in mapping.items()}
    try:
        found = find_columns(names, named, cameras, usual=usual)
        found.require("action")
    except RowError as error:
        raise _fault(
            episode, f"{error.reason} (its arrays: {', '.join(names) or 'none'})", "name it in data.columns"
        ) from error
    for camera, name in found.cameras.items():
        if name not in cameras:
            raise _fault(
                episode,
                f"{name!r}, named for the camera {camera!r}, holds no images in colour",
                f"its images are {', '.join(cameras) or 'none'}",
            )
    return found


def _within(name: str) -> str:
    """A name relative to the episode, however it was written."""
    return name.strip().removeprefix("/").removeprefix("steps/")


def _joined(episode: RecordedEpisode, column: str) -> np.ndarray:
    """A vector per frame, float32 [T, D], of one array or of several side by side."""
    names = [column] if column in episode.names() else column.split(JOIN)
    parts = [_vector(episode, name) for name in names]
    for name, part in zip(names, parts, strict=True):
        if len(part) != len(parts[0]):
            raise _fault(
                episode, f"{name} has {len(part):,} frames, {names[0]} {len(parts[0]):,}", "name others in data.columns"
            )
    return np.concatenate(parts, axis=1)


def _vector(episode: RecordedEpisode, name: str) -> np.ndarray:
    values = episode.numbers(name)
    if values.dtype.kind not in "fiub" or values.ndim not in (1, 2) or (values.ndim == 2 and not values.shape[1]):
        raise _fault(
            episode,
            f"{name} holds {values.dtype} {list(values.shape)}, not a number or a vector per frame",
            "name another in data.columns",
        )
    return (values[:, None] if values.ndim == 1 else values).astype(np.float32)


def _require_length(episode: RecordedEpisode, name: str, found: int, frames: int) -> None:
    """Environments record one observation more than actions; anything else does not fit together."""
    if found not in (frames, frames + 1):
        raise _fault(
            episode, f"{name} has {found:,} frames, the action {frames:,}", "record it again, or leave the file out"
        )


def _fault(episode: RecordedEpisode, what: str, remedy: str) -> DataError:
    return DataError(what, where=episode.place, remedy=remedy)


def pixel_column(block: np.ndarray) -> pa.Array:
    """uint8 [n, height, width, 3] as a column of images, without a copy of contiguous pixels."""
    count, height, width = block.shape[:3]
    kind = pa.binary(height * width * 3)
    pixels = pa.Array.from_buffers(kind, count, [None, pa.py_buffer(np.ascontiguousarray(block))])
    sizes = [pa.array([one] * count, pa.int32()) for one in (height, width)]
    return pa.StructArray.from_arrays([pixels, *sizes], names=["pixels", "height", "width"])


def encoded_column(images: Sequence[bytes]) -> pa.Array:
    """Encoded images as a column."""
    return pa.array(images, pa.large_binary())
