"""Rows of robot data: one per frame, with the actions from there on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardtune.data.encoder import FrameOptions, RowError, caused_by
from shardtune.data.files import arrow as pa
from shardtune.data.files.chunk import NumberedRow
from shardtune.data.robot.images import ImageRecord, image_record
from shardtune.data.robot.returns import RETURN, finite_return


class FrameRow(dict[str, Any]):
    """One frame, the input of encoders for robot data.

    Its keys:
        images: camera -> an `ImageRecord`, see `shardtune.data.robot.images`.
        instruction: the task in words.
        state: float32 [S], or None.
        actions: float32 [C, A], from this frame on. action_is_pad: bool [C], true after the episode's end, where the
            last action is repeated.
        return: with `FrameOptions.returns` a number, where the data give it, see `shardtune.data.robot.returns`.
        dataset: the name of the source, the key of its statistics.
        episode, frame: where it comes from.
        earlier: with `FrameOptions.observations` above 1: the frames before it, the oldest first, each with images,
            state, action [A], and is_pad: true before the episode's start, where the first frame is repeated.

    Attributes:
        digest: the same for all frames of an episode, so that `data.eval_split` never splits an episode.
        place: the frame in words, for messages.
        unread: the columns of its row in a table that it is not made of.
    """

    __slots__ = ("digest", "place", "unread")

    def __init__(self, content: Mapping[str, object], digest: int, place: str, unread: Sequence[str] = ()) -> None:
        super().__init__(content)
        self.digest = digest
        self.place = place
        self.unread = unread


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the frames of a chunk come from.

    Attributes:
        dataset: the name of the source.
        file: in messages, the file that holds them.
        folder: where relative paths of images begin.
    """

    dataset: str
    file: str
    folder: Path


@dataclass(frozen=True, slots=True)
class FrameChunk:
    """n consecutive frames, and the actions of the frames right after them; picklable.

    Attributes:
        origin: where they come from.
        options: how they become rows.
        before: b, the number of frames before the first one that are at hand, up to `options.observations - 1`.
        numbers: [n] row numbers.
        episodes, frames: [n] the episode of each, and its place in that.
        digests: uint64 [n], of the episodes.
        instructions: [n].
        state: float32 [b + n, S], or None.
        actions: float32 [b + n + up to C - 1, A].
        left: int64 [n], how many frames of its episode there are from this one on.
        pictures: a column of b + n images per camera, as stored in the file.
        problems: index of each of the n + C - 1 frames that cannot be used -> the reason.
        returns: float64 [n], or None.
    """

    origin: Origin
    options: FrameOptions
    before: int
    numbers: Sequence[int]
    episodes: Sequence[object]
    frames: Sequence[int]
    digests: np.ndarray
    instructions: Sequence[str]
    state: np.ndarray | None
    actions: np.ndarray
    left: np.ndarray
    pictures: pa.RecordBatch
    progress: float
    problems: Mapping[int, str] = field(default_factory=dict)
    returns: np.ndarray | None = None

    def rows(self) -> Iterator[NumberedRow]:
        cameras = self.pictures.schema.names
        for index, number in enumerate(self.numbers):
            try:
                yield number, self._row(index, cameras)
            except Exception as error:
                yield number, RowError(f"{self._place(index)}: {caused_by(error).reason}")

    def _row(self, index: int, cameras: Sequence[str]) -> FrameRow:
        if index in self.problems:
            raise RowError(self.problems[index])
        steps = np.arange(self.options.chunk)
        left = int(self.left[index])
        indices = index + np.minimum(steps, left - 1)
        content = {
            **self._seen(index, cameras),
            "instruction": self.instructions[index],
            "actions": self._finite(indices, index),
            "action_is_pad": steps >= left,
            "dataset": self.origin.dataset,
            "episode": self.episodes[index],
            "frame": int(self.frames[index]),
        }
        if self.returns is not None:
            content[RETURN] = finite_return(self.returns[index])
        if self.options.observations > 1:
            content["earlier"] = [
                self._earlier(index, back, cameras) for back in range(self.options.observations - 1, 0, -1)
            ]
        return FrameRow(content, int(self.digests[index]), self._place(index))

    def _seen(self, index: int, cameras: Sequence[str]) -> dict[str, Any]:
        """Images and state of a frame."""
        state = None if self.state is None else self.state[self.before + index]
        if state is not None and not np.isfinite(state).all():
            raise RowError(f"the state is {state.tolist()}")
        return {"images": {camera: self._image(camera, index) for camera in cameras}, "state": state}

    def _earlier(self, index: int, back: int, cameras: Sequence[str]) -> dict[str, Any]:
        """The frame that lies `back` frames before another, or the episode's first."""
        taken = min(back, int(self.frames[index]))
        at = index - taken
        if at in self.problems:
            raise RowError(f"{taken} frames before, {self.problems[at]}")
        action = self._finite(np.array([at]), index)[0]
        return {**self._seen(at, cameras), "action": action, "is_pad": taken < back}

    def _finite(self, indices: np.ndarray, index: int) -> np.ndarray:
        actions = self.actions[self.before + indices]
        fine = np.isfinite(actions).all(axis=1)
        if fine.all():
            return actions
        place = int(indices[np.flatnonzero(~fine)[0]])
        reason = self.problems.get(place) or f"the action is {self.actions[self.before + place].tolist()}"
        if place == index:
            raise RowError(reason)
        raise RowError(f"{abs(place - index)} frames {'on' if place > index else 'before'}, {reason}")

    def _image(self, camera: str, index: int) -> ImageRecord:
        value = self.pictures.column(camera)[self.before + index].as_py()
        try:
            return image_record(value, self.origin.folder)
        except RowError as error:
            raise RowError(f"camera {camera!r}: {error.reason}") from error

    def _place(self, index: int) -> str:
        return f"episode {self.episodes[index]}, frame {self.frames[index]} ({self.origin.file})"


def episode_digest(episode: object, instruction: str, action: np.ndarray, state: np.ndarray | None) -> int:
    """The hash of an episode by its name and first frame: known before the rest of it is read."""
    digest = hashlib.blake2b(f"{episode}\n{instruction}\n".encode(), digest_size=8)
    digest.update(np.ascontiguousarray(action).data)
    if state is not None:
        digest.update(np.ascontiguousarray(state).data)
    return int.from_bytes(digest.digest(), "little")


def describe_frame(row: Mapping[str, Any]) -> str:
    """A row in words, for the log. Raises `RowError` if `data.transform` has removed a field that frames need."""
    missing = [
        name for name in ("images", "instruction", "state", "actions", "action_is_pad", "dataset") if name not in row
    ]
    if missing:
        raise RowError(f"data.transform gave a row without {missing[0]!r}, which robot data have")
    cameras = ", ".join(row["images"]) or "none"
    size, dimensions = np.shape(row["actions"])
    return f"robot data, {dimensions} dimensions, chunks of {size}, cameras: {cameras}"
