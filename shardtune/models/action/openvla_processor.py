"""Images and prompts of OpenVLA's directories, processed by their preprocessor_config.json with Pillow alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin
from transformers.image_processing_base import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ImagesKwargs

from shardtune.data.images.placeholders import ImageText
from shardtune.errors import ModelError, counted
from shardtune.models.action.openvla import OpenVLAConfig

WHERE = "preprocessor_config.json"
PATCH = "<|patch|>"
"""The token of a patch in prompts."""


class PrismaticImageProcessor(BaseImageProcessor):
    """Resizes, crops and normalises an image once for each vision backbone, and stacks the results as channels.

    Args:
        use_fused_vision_backbone: whether there are two backbones.
        image_resize_strategy: resize-naive (to the given size), resize-crop (the shorter side, then the middle),
            letterbox (padded to a square first).
        input_sizes: [3, height, width] for each backbone.
        interpolations: for each backbone, by Pillow's names.
        means: for each backbone, per channel.
        stds: likewise.
        tvf_resize_params: in detail, for each backbone: {"size": [height, width] or side, "interpolation": n}.
        tvf_crop_params: {"output_size": [height, width]}.
        tvf_normalize_params: {"mean": …, "std": …}.
        tvf_do_letterbox: pad to a square first.
        tvf_letterbox_fill: with this colour.
    """

    model_input_names = ["pixel_values"]  # noqa: RUF012

    def __init__(
        self,
        use_fused_vision_backbone: bool = False,
        image_resize_strategy: str = "letterbox",
        input_sizes: Sequence[Sequence[int]] | None = None,
        interpolations: Sequence[str] | None = None,
        means: Sequence[Sequence[float]] | None = None,
        stds: Sequence[Sequence[float]] | None = None,
        tvf_resize_params: Sequence[Mapping[str, Any]] | None = None,
        tvf_crop_params: Sequence[Mapping[str, Any]] | None = None,
        tvf_normalize_params: Sequence[Mapping[str, Any]] | None = None,
        tvf_do_letterbox: bool | None = None,
        tvf_letterbox_fill: Sequence[int] | None = None,
        **kwargs: Unpack[ImagesKwargs],
    ) -> None:
        super().__init__(**kwargs)
        self.use_fused_vision_backbone = use_fused_vision_backbone
        self.image_resize_strategy = image_resize_strategy
        self.input_sizes = [list(size) for size in input_sizes or [(3, 224, 224)]]
        count = len(self.input_sizes)
        self.interpolations = list(interpolations or ["bicubic"] * count)
        self.means = [list(mean) for mean in means or [(0.5, 0.5, 0.5)] * count]
        self.stds = [list(std) for std in stds or [(0.5, 0.5, 0.5)] * count]
        self.tvf_resize_params = list(tvf_resize_params or map(self._resizing, range(count)))
        self.tvf_crop_params = list(tvf_crop_params or [{"output_size": size[1:]} for size in self.input_sizes])
        normal = [{"mean": mean, "std": std, "inplace": False} for mean, std in zip(self.means, self.stds, strict=True)]
        self.tvf_normalize_params = list(tvf_normalize_params or normal)
        letterbox = image_resize_strategy == "letterbox"
        self.tvf_do_letterbox = letterbox if tvf_do_letterbox is None else tvf_do_letterbox
        self.tvf_letterbox_fill = tvf_letterbox_fill
        if self.tvf_do_letterbox and tvf_letterbox_fill is None:
            self.tvf_letterbox_fill = [int(255 * value) for value in self.means[0]]

    def _resizing(self, number: int) -> dict[str, Any]:
        try:
            method = Image.Resampling[self.interpolations[number].upper()]
        except KeyError as error:
            raise ModelError(f"Pillow has no interpolation {error}", where=WHERE) from error
        _, height, width = self.input_sizes[number]
        size = height if self.image_resize_strategy == "resize-crop" else [height, width]
        return {"size": size, "interpolation": int(method), "max_size": None, "antialias": True}

    def apply(self, image: Image.Image) -> torch.Tensor:
        """One image to float32 [3 per backbone, height, width]."""
        image = image.convert("RGB")
        if self.tvf_do_letterbox:
            image = letterboxed(image, self.tvf_letterbox_fill or (0, 0, 0))
        steps = zip(self.tvf_resize_params, self.tvf_crop_params, self.tvf_normalize_params, strict=True)
        return torch.cat([_normal(_cropped(_resized(image, resize), crop), normal) for resize, crop, normal in steps])

    def preprocess(  # pyright: ignore[reportIncompatibleMethodOverride] (the steps are those of its files alone)
        self, images: Image.Image | Sequence[Image.Image], return_tensors: str | None = None, **kwargs: object
    ) -> BatchFeature:
        """One image or several to `pixel_values` float32 [images, 3 per backbone, height, width]."""
        several = [images] if isinstance(images, Image.Image) else list(images)
        pixels = torch.stack([self.apply(image) for image in several])
        return BatchFeature({"pixel_values": pixels.numpy()}, tensor_type=return_tensors)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "tvf_letterbox_fill": self.tvf_letterbox_fill}


def letterboxed(image: Image.Image, fill: Sequence[int]) -> Image.Image:
    """An image centred in the smallest square that contains it."""
    side = max(image.size)
    square = Image.new("RGB", (side, side), tuple(fill))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _resized(image: Image.Image, parameters: Mapping[str, Any]) -> Image.Image:
    size = parameters["size"]
    sides = [size] if isinstance(size, int) else list(size)
    if len(sides) == 2:
        width, height = sides[1], sides[0]
    else:
        short = min(image.size)
        width, height = (int(sides[0] * side / short) for side in image.size)
    return image.resize((width, height), Image.Resampling(parameters.get("interpolation", Image.Resampling.BILINEAR)))


def _cropped(image: Image.Image, parameters: Mapping[str, Any]) -> Image.Image:
    size = parameters["output_size"]
    height, width = (size, size) if isinstance(size, int) else size
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height))


def _normal(image: Image.Image, parameters: Mapping[str, Any]) -> torch.Tensor:
    pixels = torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(parameters[name], dtype=torch.float32)[:, None, None] for name in ("mean", "std"))
    return (pixels - mean) / std


def load_openvla_processor(folder: Path, config: OpenVLAConfig) -> PrismaticProcessor:
    """The processor of an OpenVLA directory; its tokenizer pads at the left.

    Args:
        folder: the directory.
        config: its config.json, which plain transformers could load only with code from the directory.

    Raises:
        ModelError: the directory lacks a part, or it cannot be read.
    """
    try:
        images = PrismaticImageProcessor.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, config=config, padding_side="left", trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exceptions for a torn file
        raise ModelError(
            f"{folder} holds no processor that can be read: {error}",
            where="actor.model.model_path: preprocessor_config.json, tokenizer.json",
            remedy="give a directory in OpenVLA's format, with its tokenizer",
        ) from error
    return PrismaticProcessor(images, tokenizer)


class PrismaticProcessor(ProcessorMixin):
    """The tokenizer and the image processor of an OpenVLA directory."""

    def __init__(
        self, image_processor: Any = None, tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: object
    ) -> None:
        super().__init__(image_processor, tokenizer, **kwargs)

    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride] (nothing is pushed anywhere)
        self, save_directory: str | Path, **kwargs: object
    ) -> list[str]:
        """Write preprocessor_config.json and the tokenizer's files, as OpenVLA's directories have them."""
        self.image_processor.save_pretrained(save_directory)
        self.tokenizer.save_pretrained(save_directory)
        return [str(Path(save_directory) / WHERE)]

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] (prompts come first, and there is no video)
        self,
        text: str | Sequence[str],
        images: Image.Image | Sequence[Image.Image] | None = None,
        padding: bool | str = False,
        return_tensors: str | None = "pt",
        **kwargs: object,
    ) -> BatchFeature:
        """Prompts to `input_ids` and `attention_mask` [rows, tokens], images to `pixel_values`; one for each prompt.

        Raises:
            ModelError: another number of images than of prompts.
        """
        texts = [text] if isinstance(text, str) else list(text)
        found = dict(self.tokenizer(texts, padding=padding, return_tensors=return_tensors, **kwargs))
        if images is not None:
            found["pixel_values"] = self.image_processor(images, return_tensors=return_tensors)["pixel_values"]
            if len(found["pixel_values"]) != len(texts):
                given = f"{counted(len(texts), 'prompt')} and {counted(len(found['pixel_values']), 'image')}"
                raise ModelError(f"as many are needed of both: {given}", where="PrismaticProcessor")
        return BatchFeature(found)


class _PatchPlaces:
    """OpenVLA's processor for `ImageText`: each image token becomes the places for the patches of an image.

    The tokenizer, which needs a token for a patch, is a copy, so that the one that is saved stays as it was.
    """

    image_token = PATCH

    def __init__(self, processor: PrismaticProcessor, config: OpenVLAConfig) -> None:
        self.image_processor: PrismaticImageProcessor = processor.image_processor
        self.tokenizer: PreTrainedTokenizerBase = copy.deepcopy(processor.tokenizer)
        self.tokenizer.add_tokens([PATCH], special_tokens=True)
        number = int(self.tokenizer.get_vocab()[PATCH])
        if number != config.image_token_id:
            raise ModelError(
                f"the tokenizer has {number} tokens, the model's text vocabulary with <PAD> {config.image_token_id}",
                where="actor.model.model_path: tokenizer.json, config.json",
                remedy="use the model's own tokenizer",
            )
        self.image_token_ids = [number]
        self.num_patches = config.num_patches

    def __call__(
        self, *, images: list[list[Image.Image]], text: list[str], return_tensors: str, **options: bool
    ) -> BatchFeature:
        """pixel_values float32 [images, 3 per backbone, side, side], and the text that replaces an image."""
        made = self.image_processor(images[0], return_tensors=return_tensors)
        offsets = [[{"replacement": PATCH * self.num_patches}] * len(images[0])]
        return BatchFeature({**made, "text_replacement_offsets": offsets})


class OpenVLAImages(ImageText):
    """Images in OpenVLA's prompts: places for patches, all of one token that is added to the tokenizer."""

    def __init__(self, processor: PrismaticProcessor, config: OpenVLAConfig) -> None:
        places = _PatchPlaces(processor, config)
        self._key = json.dumps([places.image_processor.to_dict(), places.num_patches], sort_keys=True, default=str)
        super().__init__(processor, places)

    def cache_key(self) -> str:
        return self._key


def openvla_images(processor: ProcessorMixin, config: OpenVLAConfig) -> OpenVLAImages:
    """Applies the processor of an OpenVLA directory.

    Raises:
        ModelError: it is not OpenVLA's.
    """
    if not isinstance(processor, PrismaticProcessor):
        raise ModelError(
            f"the processor is a {type(processor).__name__}, not OpenVLA's",
            where="actor.tokenizer.tokenizer_model",
            remedy="leave it out, or give a directory in OpenVLA's format",
        )
    return OpenVLAImages(processor, config)
