"""The parts of vision-language models by the names of their parameters."""

from __future__ import annotations

import re

import pytest
from torch import nn

from shardtune.config.parameter_patterns import PARTS, remedy_of
from shardtune.errors import ConfigError
from shardtune.training.build.model import freeze

TOWER, PROJECTOR, LANGUAGE = PARTS
NAMES = {
    "model.vision_tower.encoder.layers.0.mlp.fc1.weight": TOWER,
    "model.image_newline": PROJECTOR,  # LLaVA-NeXT, LLaVA-OneVision
    "model.vision_model.connector.fine.proj.weight": PROJECTOR,  # Granite Docling
    "model.visual.merger_list.0.mlp.0.weight": PROJECTOR,  # Qwen3-Omni
    "model.vision_model.merger.mlp.0.weight": PROJECTOR,  # HyperCLOVA X
    "model.vision_tower.merger.0.weight": PROJECTOR,  # Inkling
    "model.vision_tower.patch_merger.proj.weight": PROJECTOR,  # HunYuan-VL
    "model.vision_tower.vit_merger.linear_1.weight": TOWER,  # MiniCPM-V
    "model.merger.mlp.0.weight": PROJECTOR,
    "model.aligner.fc1.weight": PROJECTOR,  # Janus, DeepSeek-VL
    "model.generation_aligner.fc1.weight": None,
    "model.embed_vision.embedding_projection.weight": PROJECTOR,  # Gemma 4
    "model.vision_projection.linear_1.weight": PROJECTOR,  # LightOnOCR
    "model.vision_adapter.fc1.weight": PROJECTOR,  # Muse
    "vision_model.vision_adapter.mlp.fc1.weight": TOWER,  # Llama 4
    "qformer.encoder.layer.0.attention.attention.query.weight": PROJECTOR,  # BLIP-2
    "query_tokens": PROJECTOR,
    "language_projection.bias": PROJECTOR,
    "text_decoder.bert.encoder.layer.0.output.dense.weight": LANGUAGE,  # BLIP
    "model.layers.0.mlp.up_proj.weight": LANGUAGE,  # Chameleon, Idefics
    "model.gated_cross_attn_layers.0.mlp.up_proj.weight": LANGUAGE,
    "model.embed_tokens.weight": LANGUAGE,
    "model.language_model.layers.0.mlp.up_proj.weight": LANGUAGE,
    "lm_head.weight": LANGUAGE,
    "model.audio_tower.layers.0.norm.weight": None,
}


def test_a_parameter_is_of_one_part() -> None:
    found = {name: [part for part, pattern in PARTS.items() if re.search(pattern, name)] for name in NAMES}
    assert found == {name: [] if part is None else [part] for name, part in NAMES.items()}


def test_a_head_alone_is_no_language_model() -> None:
    """Of a decoder whose names are not known, the head was frozen, and all else trained."""
    model = nn.ModuleDict({"decoder": nn.Linear(2, 2), "lm_head": nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match=r"language_model.* matches no parameter"):
        freeze(model, [LANGUAGE])
    freeze(model, [r"^lm_head\."])
    assert [name for name, one in model.named_parameters() if not one.requires_grad] == [
        "lm_head.weight",
        "lm_head.bias",
    ]


@pytest.mark.parametrize(
    ("text", "near"),
    [("vision_towr", "vision_tower"), ("modle.layers", "model.layers"), ("q_porj", "q_proj"), ("xyz", "")],
)
def test_a_misspelt_pattern_is_answered_with_the_nearest_part_or_module(text: str, near: str) -> None:
    names = [f"model.{part}.{n}.q_proj.weight" for part in ("layers", "vision_tower.blocks") for n in range(4)]
    remedy = remedy_of(text, names)
    assert remedy.startswith(f"did you mean {near}? names look like" if near else "names look like model.layers.0.")
