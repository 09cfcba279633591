"""One recorded episode, the writer's input from simulators and converters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardtune.data.robot.pictures import Pictures
from shardtune.errors import DataError, counted


@dataclass(frozen=True, slots=True)
class Episode:
    """T frames of one robot doing one task.

    Attributes:
        images: camera -> uint8 [T, H, W, 3], RGB; or T encoded images (bytes, paths, values of `row["images"]`), all of
            one size, which a writer stores as they are.
        state: float32 [T, S], proprioception; None without.
        actions: float32 [T, A]; action t was taken at frame t.
        task: the instruction, in words.
        rewards: float32 [T]; reward t followed action t. None without.

    Raises `DataError` for arrays of another type or shape, for no frame, and for actions or states that are not finite.
    """

    images: Mapping[str, Pictures]
    state: np.ndarray | None
    actions: np.ndarray
    task: str
    rewards: np.ndarray | None = None

    def __post_init__(self) -> None:
        frames = len(self.actions)
        if not frames:
            raise _fault("an episode has no frame", "actions")
        rewards = self.rewards if self.rewards is None else np.asarray(self.rewards)[:, None]
        for name, values in {"actions": self.actions, "state": self.state, "rewards": rewards}.items():
            if values is not None:
                _require_vectors(name, values, frames)
        for camera, images in self.images.items():
            if not isinstance(images, np.ndarray):
                if len(images) != frames:
                    of_both = f"{counted(len(images), 'image')} for {counted(frames, 'frame')}"
                    raise _fault(of_both, f"camera {camera!r}")
            elif images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or len(images) != frames:
                raise _fault(f"the images are {_kind(images)}, not uint8 [{frames}, H, W, 3]", f"camera {camera!r}")

    def __len__(self) -> int:
        return len(self.actions)


def _require_vectors(name: str, values: np.ndarray, frames: int) -> None:
    if values.dtype != np.float32 or values.ndim != 2 or len(values) != frames or not values.shape[1]:
        raise _fault(f"the {name} are {_kind(values)}, not float32 [{frames}, dimensions]", name)
    finite = np.isfinite(values).all(axis=1)
    if not finite.all():
        frame = int(np.flatnonzero(~finite)[0])
        raise _fault(f"frame {frame} holds {values[frame].tolist()}", name)


def _kind(values: np.ndarray) -> str:
    return f"{values.dtype} {list(values.shape)}"


def _fault(what: str, where: str) -> DataError:
    return DataError(what, where=f"episode: {where}", remedy="see shardtune.data.robot.episode.Episode")
