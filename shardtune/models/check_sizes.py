"""The sizes that a recipe names of its model: they have to be what the model has."""

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
    asked: ModelConfig,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    images: ImageText | None = None,
) -> None:
    """Compare vocabulary, width and size of images with the model's.

    Args:
        asked: the section `actor.model`.
        config: the model's.
        tokenizer: the model's.
        images: its processor at work; None for a model that takes no images.

    Raises:
        ConfigError: the first that is another; says what the model has.
    """
    text = config.get_text_config()
    if asked.vocab_size is not None:
        own = [config.text_vocabulary] if isinstance(config, OpenVLAConfig) else [text.vocab_size]
        if tokenizer is not None and not isinstance(config, OpenVLAConfig):
            own.append(len(tokenizer))
        _compare("vocab_size", asked.vocab_size, own)
    if asked.hidden_size is not None:
        _compare("hidden_size", asked.hidden_size, [text.hidden_size])
    if asked.image_size is not None:
        if images is None:
            raise ConfigError(
                f"{SECTION}.image_size: {asked.image_size}, and the model takes no images",
                where=f"{SECTION}.image_size",
                remedy="leave it out",
            )
        _compare("image_size", tuple(asked.image_size), [made_size(images, asked.image_size)])


def made_size(images: ImageText, size: list[int]) -> tuple[int, int]:
    """(height, width) that the processor makes of an image of that size."""
    height, width = size
    made = images.pixels([Image.new("RGB", (width, height))])
    pixels = made["pixel_values"]
    if "image_grid_thw" in made:  # of patches, which the model joins afterwards
        patch = int(images.processor.image_processor.patch_size)
        rows, columns = made["image_grid_thw"][0, 1:].tolist()
        return rows * patch, columns * patch
    return int(pixels.shape[-2]), int(pixels.shape[-1])


def _compare(key: str, asked: object, own: Iterable[object]) -> None:
    known = list(dict.fromkeys(own))
    if asked not in known:
        told = " or ".join(str(list(value) if isinstance(value, tuple) else value) for value in known)
        raise ConfigError(
            f"{SECTION}.{key} is {list(asked) if isinstance(asked, tuple) else asked}, the model has {told}",
            where=f"{SECTION}.{key}",
            remedy=f"set it to {told}, or leave it out",
        )
