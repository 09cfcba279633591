"""A picture of training rows: their images as they are, and as training sees them in some epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from shardtune.batch.seeds import derive_seed
from shardtune.config import Recipe
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.images.augmentation import KEY, Augmentation, RowAugmentation
from shardtune.errors import ConfigError
from shardtune.models.adapter import Adapter

EPOCHS = 4
_HEIGHT, _GAP = 160, 4
OPTION = "--images"


@dataclass(frozen=True, slots=True)
class _Shown(RowAugmentation):
    """Changes images and keeps them, before and after."""

    images: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def __call__(self, images: np.ndarray, name: str) -> np.ndarray:
        changed = RowAugmentation.__call__(self, images, name)
        self.images.append((images, changed))
        return changed


def save_augmented(
    recipe: Recipe, adapter: Adapter, rows: TokenDataset, numbers: Sequence[int], file: Path
) -> tuple[int, int]:
    """Write a picture with a line for each image of some rows: as it is, then as in the first epochs.

    Args:
        recipe: with `data.augmentation`.
        adapter: of the rows.
        rows: of training.
        numbers: which of them.
        file: to be written; its suffix is the format.

    Returns:
        How many images it shows, and how many times each.

    Raises:
        ConfigError: the recipe changes no images, the rows have none, or the file cannot be written.
    """
    augmentation = Augmentation.of(recipe.data.augmentation)
    if augmentation is None:
        raise ConfigError(f"{OPTION}: the recipe changes no images", where=KEY, remedy=f"give {KEY} a range")
    lines: list[Image.Image] = []
    for number in numbers:
        seen: list[list[tuple[np.ndarray, np.ndarray]]] = []
        for epoch in range(EPOCHS):
            shown = _Shown(augmentation, derive_seed(recipe.runner.seed, KEY, epoch, 0), number)
            adapter.augmented(rows.row(number), shown)
            seen.append(shown.images)
        for images in zip(*seen, strict=True):
            lines.append(_line([images[0][0], *(after for _, after in images)]))
    if not lines:
        raise ConfigError(f"{OPTION}: these rows have no images", where=OPTION, remedy="choose others: --start, --rows")
    try:
        _below(lines).save(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be written: {error}", where=OPTION, remedy="name a file such as augmented.png"
        ) from error
    return len(lines), EPOCHS


def _line(images: Sequence[np.ndarray]) -> Image.Image:
    """Images side by side, of several frames the last."""
    tiles = [_tile(image.reshape(-1, *image.shape[-3:])[-1]) for image in images]
    line = Image.new("RGB", (sum(tile.width + _GAP for tile in tiles), _HEIGHT + _GAP), "white")
    left = 0
    for tile in tiles:
        line.paste(tile, (left, 0))
        left += tile.width + _GAP
    return line


def _tile(image: np.ndarray) -> Image.Image:
    pixels = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0) if image.shape[0] == 3 else image))
    return pixels.resize((max(1, round(pixels.width * _HEIGHT / pixels.height)), _HEIGHT))


def _below(lines: Sequence[Image.Image]) -> Image.Image:
    sheet = Image.new("RGB", (max(line.width for line in lines), sum(line.height for line in lines)), "white")
    top = 0
    for line in lines:
        sheet.paste(line, (0, top))
        top += line.height
    return sheet
