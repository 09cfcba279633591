"""Pixels are those of the processor itself, bit by bit, in every family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_processing_backends import PilBackend

from shardtune.data.encoder import RowError
from shardtune.models.vision.processors import image_text
from tests.support.vision import FAMILIES

SIZES = ((40, 30), (64, 64), (33, 90), (200, 120))


@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_are_the_processors_own(family: str) -> None:
    _, processor = FAMILIES[family]()
    draw = np.random.default_rng(0)
    images = [Image.fromarray(draw.integers(0, 256, (*size[::-1], 3), np.uint8)) for size in SIZES]
    text = [processor.image_token * len(images)]
    whole = processor(images=[images], text=text, return_tensors="pt")
    quick: Any = image_text(processor)
    quick.applied = None  # whose work on a text would be thrown away
    found = quick.pixels(images)
    assert "pixel_values" in found
    assert {*whole} - {*found} <= {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
    assert type(processor.image_processor).rescale is PilBackend.rescale  # what is saved is as it was
    for key, tensor in found.items():
        assert tensor.dtype == whole[key].dtype
        assert torch.equal(tensor, whole[key]), key


def test_a_processor_that_disagrees_with_its_image_processor_is_asked_itself() -> None:
    _, processor = FAMILIES["llava"]()
    kind: Any = type(processor)

    class Doubling(kind):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            made = super().__call__(*args, **kwargs)
            made["pixel_values"] = made["pixel_values"] * 2
            return made

    processor.__class__ = Doubling
    image = Image.effect_noise((40, 40), 90.0).convert("RGB")
    own = processor(images=[[image]], text=[processor.image_token], return_tensors="pt")["pixel_values"]
    assert torch.equal(image_text(processor).pixels([image])["pixel_values"], own)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 100}),
        ("internvl", {"crop_to_patches": False}),
    ],
)
def test_settings_of_a_processors_class_precede_those_of_its_image_processor(
    family: str, settings: dict[str, Any]
) -> None:
    """Crops of a large image had pixels and no tokens: the images that are tried are too small for any."""
    _, processor = FAMILIES[family]()
    vars(processor.image_processor).update({"pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2})
    vars(processor.image_processor).update(settings)
    images = image_text(processor)
    large = Image.effect_noise((600, 200), 90.0).convert("RGB")
    own = processor(images=[[large]], text=[processor.image_token], return_tensors="pt")["pixel_values"]
    made = images.bytes_of(large)
    assert made is not None
    assert made.pixels.shape == own.shape
    images.applied = None  # pyright: ignore[reportAttributeAccessIssue] (whose work on a text would be thrown away)
    assert torch.equal(images.pixels([large])["pixel_values"], own)


def test_a_size_that_a_processor_does_not_take_is_a_bad_row() -> None:
    images = image_text(FAMILIES["qwen2_5_vl"]()[1])
    with pytest.raises(RowError, match=r"refuses images of 3 x 900: absolute aspect ratio must be smaller than 200"):
        images.expand(images.image_token, [(3, 900)])
