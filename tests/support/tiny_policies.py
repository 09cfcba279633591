"""Vision-language models of a few thousand parameters that answer with actions, and inputs for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from shardtune.models.action.policy import ActionSettings, action_class

DIMENSIONS, CHUNK, BINS = 3, 2, 16
TOP, VOCABULARY, IMAGE, PAD = 60, 64, 61, 0
STATISTICS = {
    "left": {"action": {"q01": [-1.0, 0.0, 0.0], "q99": [1.0, 4.0, 1.0], "mask": [True, True, False]}},
    "right": {"action": {"q01": [-2.0, 0.0, 0.0], "q99": [2.0, 4.0, 1.0], "mask": [True, True, False]}},
}
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": PAD,
}


def settings(**changes: Any) -> ActionSettings:
    given: dict[str, Any] = {
        "action_token_len": DIMENSIONS,
        "action_chunks_len": CHUNK,
        "num_action_bins": BINS,
        "token_top": TOP,
        "unnorm_key": "left",
        "norm_stats": STATISTICS,
    }
    return ActionSettings(**{**given, **changes})


def make_policy(kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """A tiny LLaVA or Qwen2.5-VL with actions; `changes` are of its settings."""
    base: Any
    if kind == "llava":
        vision = CLIPVisionConfig(
            hidden_size=24, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=8, patch_size=4
        )
        base, config = (
            LlavaForConditionalGeneration,
            LlavaConfig(
                vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_index=IMAGE, image_seq_length=4
            ),
        )
    else:
        base, config = Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig(
            text_config={**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            vision_config={
                "hidden_size": 24, "intermediate_size": 32, "depth": 2, "num_heads": 2, "patch_size": 4,
                "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1], "spatial_merge_size": 2,
            },
            image_token_id=IMAGE, vision_start_token_id=62, vision_end_token_id=63,
        )  # fmt: skip
    settings(**changes).write_to(config)
    torch.manual_seed(seed)
    model = action_class(base)._from_config(config, dtype=torch.float32)
    with torch.no_grad():  # so that answers differ between rows, which small initial weights would not make them
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model.eval()


def inputs(kind: str, prompts: Sequence[Sequence[int]], seed: int = 1) -> dict[str, Any]:
    """One image before each prompt, padded at the left; rows of the same prompt have the same image."""
    draws = [torch.Generator().manual_seed(seed + sum(prompt)) for prompt in prompts]
    before = [IMAGE] * 4 if kind == "llava" else [62, IMAGE, 63]
    ids = [[1, *before, *prompt] for prompt in prompts]
    longest = max(map(len, ids))
    padded = torch.tensor([[PAD] * (longest - len(row)) + row for row in ids])
    found: dict[str, Any] = {
        "input_ids": padded,
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids]),
    }
    if kind == "llava":
        found["pixel_values"] = torch.stack([torch.randn(3, 8, 8, generator=draw) for draw in draws])
    else:
        found["pixel_values"] = torch.cat([torch.randn(4, 2 * 3 * 4 * 4, generator=draw) for draw in draws])
        found["image_grid_thw"] = torch.tensor([[1, 2, 2]] * len(prompts))
        found["mm_token_type_ids"] = (padded == IMAGE).long()
    return found
