"""Checks that sizes in a recipe are those of its model."""

from __future__ import annotations

from collections.abc import Iterable

from PIL import Image
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from shardtune.config import ModelConfig
from shardtune.data.images.placeholders import ImageText
from shardtune.errors import ConfigError
from shardtune.models.action.openvla import OpenVLAConfig

SECTION = "actor.model"


def check_sizes(
    given: ModelConfig,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    images: ImageText | None = None,
) -> None:
    """Compare vocabulary, width and image size with the model's.

    Args:
        given: the section `actor.model`.
        config: of the model.
        tokenizer: of the model.
        images: its image processing; None for a model that takes no images.

    Raises:
        ConfigError: a size differs; names that of the model.
    """
    text = config.get_text_config()
    if given.vocab_size is not None:
        own = [config.text_vocabulary] if isinstance(config, OpenVLAConfig) else [text.vocab_size]
        if tokenizer is not None and not isinstance(config, OpenVLAConfig):
            own.append(len(tokenizer))
        _compare("vocab_size", given.vocab_size, own)
    if given.hidden_size is not None:
        _compare("hidden_size", given.hidden_size, [text.hidden_size])
    if given.image_size is not None:
        if images is None:
            raise ConfigError(
                f"{SECTION}.image_size: {given.image_size}, and the model takes no images",
                where=f"{SECTION}.image_size",
                remedy="leave it out",
            )
        _compare("image_size", tuple(given.image_size), [made_size(images, given.image_size)])


def made_size(images: ImageText, size: list[int]) -> tuple[int, int]:
    """(height, width) of the pixels that the processor makes from an image of this size."""
    height, width = size
    made = images.pixels([Image.new("RGB", (width, height))])
    pixels = made["pixel_values"]
    if "image_grid_thw" in made:  # [images, 3]: frames, rows and columns of patches
        patch = int(images.processor.image_processor.patch_size)
        rows, columns = made["image_grid_thw"][0, 1:].tolist()
        return rows * patch, columns * patch
    return int(pixels.shape[-2]), int(pixels.shape[-1])


def _compare(key: str, given: object, own: Iterable[object]) -> None:
    known = list(dict.fromkeys(own))
    if given not in known:
        own_sizes = " or ".join(str(list(value) if isinstance(value, tuple) else value) for value in known)
        raise ConfigError(
            f"{SECTION}.{key} is {list(given) if isinstance(given, tuple) else given}, the model has {own_sizes}",
            where=f"{SECTION}.{key}",
            remedy=f"set it to {own_sizes}, or leave it out",
        )
