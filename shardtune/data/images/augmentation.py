"""Random changes of training images, drawn for each row: `data.augmentation`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from shardtune.batch import Sample
from shardtune.batch.row_draws import RowDraws
from shardtune.config.schema.augmentation import (
    AugmentationConfig,
    ColorJitterConfig,
    RandomAffineConfig,
    RandomResizedCropConfig,
)
from shardtune.data.images.image_changes import ImageChanges, image_changes
from shardtune.errors import ModelError

KEY = "data.augmentation"
_ATTEMPTS = 10
"""As torchvision's: how often a part is drawn until it fits into the image."""
_DRAWS = 64
_COLOURS = ("brightness", "contrast", "saturation", "hue")


@dataclass(frozen=True, slots=True)
class Augmentation:
    """The random changes of a recipe.

    All draws of a row are hashes of a key, of the row, and of what the image belongs to (`RowDraws`), so they are the
    same on any number of ranks, in any process, and after a continuation.

    Attributes:
        config: the ranges.
        changes: how images are changed.
    """

    config: AugmentationConfig
    changes: ImageChanges

    @classmethod
    def of(cls, config: AugmentationConfig) -> Augmentation | None:
        """That of a recipe; None where it changes nothing."""
        return cls(config, image_changes()) if config.is_on else None

    def row(self, key: int, row: int) -> RowAugmentation:
        """The changes of one row.

        Args:
            key: of the place in the run: of seed, epoch, and the rows of the epoch before its step.
            row: its number in the data set.
        """
        return RowAugmentation(self, key, row)


@dataclass(frozen=True, slots=True)
class RowAugmentation:
    """The random changes of one row's images.

    Attributes:
        augmentation: the recipe's.
        key, row: of the draws.
    """

    augmentation: Augmentation
    key: int
    row: int

    def __call__(self, images: np.ndarray, name: str) -> np.ndarray:
        """Images changed, in the same shape; all of them alike, as the frames of one camera have to be.

        Args:
            images: uint8 [..., 3, height, width] or [..., height, width, 3].
            name: of the camera, or of what else has draws of its own; with `same_for_cameras` it has no effect.

        Raises:
            ModelError: they are no such images.
        """
        shape = images.shape
        if images.dtype != np.uint8 or len(shape) < 3 or 3 not in (shape[-3], shape[-1]):
            raise ModelError(
                f"{name!r} is {images.dtype} {list(shape)}, no images that could be augmented",
                where=KEY,
                remedy="let encode give uint8 [3, height, width] (or [height, width, 3], or several of one size), and "
                "normalise them in loss; or leave data.augmentation out",
            )
        channels_first = shape[-3] == 3
        flat = torch.from_numpy(np.array(images)).reshape(-1, *shape[-3:])  # a copy: the cache is read-only
        planes = flat if channels_first else flat.movedim(-1, -3).contiguous()
        changed = self._changed(planes, name)
        found = changed if channels_first else changed.movedim(-3, -1)
        return np.ascontiguousarray(found.reshape(shape).numpy())

    def fields(self, sample: Sample, names: Sequence[str]) -> Sample:
        """A sample with the images in some of its fields changed, each by draws of its own."""
        missing = [name for name in names if name not in sample.fields]
        if missing:
            raise ModelError(
                f"image_fields names {missing[0]!r}, which is no field of a row; it has {', '.join(sample.fields)}",
                where=KEY,
                remedy="name the fields with uint8 images that encode gives",
            )
        changed: Mapping[str, np.ndarray] = {name: self(sample.fields[name], name) for name in names}
        return replace(sample, fields={**sample.fields, **changed})

    def _changed(self, images: torch.Tensor, name: str) -> torch.Tensor:
        config, changes = self.augmentation.config, self.augmentation.changes
        draws = _Draws(self.key, self.row, "" if config.same_for_cameras else name)
        height, width = images.shape[-2:]
        part = _part(draws, config.random_resized_crop, (height, width))
        if part != (0, 0, height, width):
            images = changes.crop(images, *part)
        degrees, shift, scale, shear = _affine(draws, config.random_affine, (height, width))
        if (degrees, shift, scale, shear) != (0.0, (0.0, 0.0), 1.0, 0.0):
            images = changes.affine(images, degrees, shift, scale, shear)
        for colour, value in _colours(draws, config.color_jitter):
            if value != (0.0 if colour == "hue" else 1.0):
                images = _coloured(changes, images, colour, value)
        return images


class _Draws:
    """Uniform numbers of a row, one after the other.

    Args:
        key, row: of the row.
        name: of what has draws of its own.
    """

    def __init__(self, key: int, row: int, name: str) -> None:
        numbers = RowDraws(key, (row,)).rand_like(f"{KEY} {name}", torch.empty(1, _DRAWS, dtype=torch.float64))
        self._numbers = iter(numbers[0].tolist())

    def between(self, low: float, high: float) -> float:
        """A number from `low` to `high`."""
        return low + (high - low) * next(self._numbers)


def _part(draws: _Draws, config: RandomResizedCropConfig, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Top, left, height and width of the part that is kept, drawn as torchvision's RandomResizedCrop does."""
    (height, width), (least, most) = size, config.ratio
    stretches = math.log(least), math.log(most)
    tried = [(draws.between(*config.scale), math.exp(draws.between(*stretches))) for _ in range(_ATTEMPTS)]
    place = draws.between(0, 1), draws.between(0, 1)
    for share, stretch in tried:
        wide, high = round(width * math.sqrt(share * stretch)), round(height * math.sqrt(share / stretch))
        if 0 < wide <= width and 0 < high <= height:
            return int(place[0] * (height - high + 1)), int(place[1] * (width - wide + 1)), high, wide
    # The largest part in the middle that has a permitted ratio.
    stretch = min(max(1.0, least), most)
    wide, high = max(1, round(width * min(1.0, stretch))), max(1, round(height * min(1.0, 1 / stretch)))
    return (height - high) // 2, (width - wide) // 2, high, wide


def _affine(
    draws: _Draws, config: RandomAffineConfig, size: tuple[int, int]
) -> tuple[float, tuple[float, float], float, float]:
    """Degrees, shift in whole pixels (right, down), scale and degrees of shear, as RandomAffine draws them."""
    height, width = size
    degrees = draws.between(*_around(config.degrees, 0.0))
    most = config.translate[0] * width, config.translate[1] * height
    shift = float(round(draws.between(-most[0], most[0]))), float(round(draws.between(-most[1], most[1])))
    return degrees, shift, draws.between(*config.scale), draws.between(*_around(config.shear, 0.0))


def _colours(draws: _Draws, config: ColorJitterConfig) -> list[tuple[str, float]]:
    """The changes of colour with their factors, in the order in which they are made, as ColorJitter draws them."""
    ranges = (config.brightness, config.contrast, config.saturation, config.hue)
    order = sorted(range(len(_COLOURS)), key=[draws.between(0, 1) for _ in _COLOURS].__getitem__)
    values = [
        draws.between(*_around(one, 0.0 if name == "hue" else 1.0)) for name, one in zip(_COLOURS, ranges, strict=True)
    ]
    return [(_COLOURS[at], values[at]) for at in order]


def _around(value: float | list[float], middle: float) -> tuple[float, float]:
    """The range of a key: its own, or as far below as above the middle; a factor is never negative."""
    if isinstance(value, list):
        return value[0], value[1]
    return (max(0.0, middle - value) if middle else -value), middle + value


def _coloured(changes: ImageChanges, images: torch.Tensor, colour: str, value: float) -> torch.Tensor:
    made = {
        "brightness": changes.brightness,
        "contrast": changes.contrast,
        "saturation": changes.saturation,
        "hue": changes.hue,
    }
    return made[colour](images, value)
