"""Pixels are those of the processor itself, bit by bit, in every family."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from shardtune.models.processors import image_text
from tests.models.vision import FAMILIES

SIZES = ((40, 30), (64, 64), (33, 90), (200, 120))


@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_are_the_processors_own(family: str) -> None:
    _, processor = FAMILIES[family]()
    draw = np.random.default_rng(0)
    images = [Image.fromarray(draw.integers(0, 256, (*size[::-1], 3), np.uint8)) for size in SIZES]
    text = [processor.image_token * len(images)]
    whole = processor(images=[images], text=text, return_tensors="pt")
    found = image_text(processor).pixels(images)
    assert "pixel_values" in found
    assert {*whole} - {*found} <= {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
    for key, tensor in found.items():
        assert tensor.dtype == whole[key].dtype
        assert torch.equal(tensor, whole[key]), key
