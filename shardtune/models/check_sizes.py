"""Checks that sizes in a recipe are those of its model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.image_processing_utils import BaseImageProcessor

from shardtune.config import ModelConfig
from shardtune.data.images.placeholders import AppliedImages
from shardtune.errors import ConfigError, ModelError
from shardtune.models.action.openvla import OpenVLAConfig

SECTION = "actor.model"


def check_sizes(
    given: ModelConfig,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    images: AppliedImages | BaseImageProcessor | None = None,
) -> None:
    """Compare vocabulary, width and image size with the model's.

    A user's own config may lack a vocabulary or a width by these names; then there is nothing to compare with.

    Args:
        given: the section `actor.model`.
        config: of the model.
        tokenizer: of the model.
        images: its image processing, or its image processor alone; None for a model that takes no images.

    Raises:
        ConfigError: a size differs; names that of the model.
    """
    text = config.get_text_config()
    if given.vocab_size is not None:
        own = [config.text_vocabulary] if isinstance(config, OpenVLAConfig) else _named(text, "vocab_size")
        if tokenizer is not None and not isinstance(config, OpenVLAConfig):
            own.append(len(tokenizer))
        _compare("vocab_size", given.vocab_size, own)
    if given.hidden_size is not None:
        _compare("hidden_size", given.hidden_size, _named(text, "hidden_size"))
    if given.image_size is not None:
        if images is None:
            raise ConfigError(
                f"{SECTION}.image_size: {given.image_size}, and the model takes no images",
                where=f"{SECTION}.image_size",
                remedy="leave it out",
            )
        _compare("image_size", tuple(given.image_size), [made_size(images, given.image_size)])


def made_size(images: AppliedImages | BaseImageProcessor, size: list[int]) -> tuple[int, int]:
    """(height, width) of the pixels that a model's image processor makes from an image of this size.

    Raises:
        ConfigError: there are no `pixel_values` among what it makes.
        ModelError: it refuses such an image.
    """
    height, width = size
    blank = [Image.new("RGB", (width, height))]
    made = images.pixels(blank) if isinstance(images, AppliedImages) else _processed(images, blank)
    if "pixel_values" not in made:
        raise ConfigError(
            f"{SECTION}.image_size: {size} cannot be compared, the images become {', '.join(made)}, not pixel_values",
            where=f"{SECTION}.image_size",
            remedy="leave it out",
        )
    if "image_grid_thw" in made:  # [images, 3]: frames, rows and columns of patches
        processor = images.processor.image_processor if isinstance(images, AppliedImages) else images
        patch = int(processor.to_dict()["patch_size"])
        rows, columns = made["image_grid_thw"][0, 1:].tolist()
        return rows * patch, columns * patch
    height, width = np.shape(made["pixel_values"])[-2:]
    return height, width


def _processed(processor: BaseImageProcessor, images: list[Image.Image]) -> Mapping[str, Any]:
    """What a user's image processor makes of images."""
    try:
        return processor(images, return_tensors="pt")
    except Exception as error:  # it may raise anything
        kind = type(processor)
        raise ModelError(
            f"{kind.__name__} refuses an image of {images[0].width} x {images[0].height}: "
            f"{type(error).__name__}: {error}",
            where=f"{SECTION}.image_size; {kind.__module__}.{kind.__qualname__}",
            remedy="set image_size to one that it takes, or leave it out",
        ) from error


def _named(config: PreTrainedConfig, name: str) -> list[object]:
    """The value that a config has by a name of transformers; none where it has no such name."""
    own = config.to_dict().get(config.attribute_map.get(name, name))
    return [] if own is None else [own]


def _compare(key: str, given: object, own: Iterable[object]) -> None:
    known = list(dict.fromkeys(own))
    if known and given not in known:
        own_sizes = " or ".join(str(list(value) if isinstance(value, tuple) else value) for value in known)
        raise ConfigError(
            f"{SECTION}.{key} is {list(given) if isinstance(given, tuple) else given}, the model has {own_sizes}",
            where=f"{SECTION}.{key}",
            remedy=f"set it to {own_sizes}, or leave it out",
        )
