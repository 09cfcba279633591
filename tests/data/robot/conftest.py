"""Small episodes, ways to read a data set's rows, and an encoder that keeps all of a row."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from shardtune.batch import Sample
from shardtune.data.encoder import FrameOptions, Row
from shardtune.data.images.images import read_image
from shardtune.data.robot.episode import Episode


@dataclass(frozen=True)
class FramesEncoder:
    """Keeps actions, padding, state, and the mean colour of each camera's image."""

    chunk: int = 1
    folder: Path = Path("somewhere")

    title: ClassVar = None

    @property
    def frames(self) -> FrameOptions:
        return FrameOptions(self.chunk)

    def encode(self, row: Row) -> Sample:
        colours = [np.asarray(read_image(image, self.folder).read()).mean((0, 1)) for image in row["images"].values()]
        fields = {
            "actions": np.asarray(row["actions"], np.float32),
            "padding": np.asarray(row["action_is_pad"], bool),
            "colours": np.array(colours),
            "dataset": np.frombuffer(row["dataset"].encode(), np.uint8),
            "instruction": np.frombuffer(row["instruction"].encode(), np.uint8),
        }
        return Sample(fields=fields, size=1)

    def fit(self, sample: Sample) -> Sample:
        return sample

    def weights(self, sample: Sample) -> Mapping[str, float]:
        return {"actions": float((~sample.fields["padding"]).sum())}

    def at(self, folder: Path) -> FramesEncoder:
        return replace(self, folder=folder)

    def cache_key(self) -> str:
        return f"frames {self.folder}"


def episode(length: int, *, seed: int = 0, task: str = "lift it", cameras=("top", "wrist"), dims=(3, 4)) -> Episode:
    """An episode of random content; `dims` are those of state (0: none) and action."""
    random = np.random.default_rng([seed, length])
    images = {camera: random.integers(0, 256, (length, 6, 8, 3), np.uint8) for camera in cameras}
    state = random.normal(size=(length, dims[0])).astype(np.float32) if dims[0] else None
    return Episode(images, state, random.normal(size=(length, dims[1])).astype(np.float32), task)


def pixels(image: Mapping[str, Any]) -> np.ndarray:
    with Image.open(io.BytesIO(image["bytes"])) as opened:
        return np.asarray(opened.convert("RGB"))
