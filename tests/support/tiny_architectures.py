"""Tiny models of any family of transformers: its own config class with every size made small."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY = 320
"""Embedding rows, some more than the tokenizers have."""
NOISE = 0.05
"""Standard deviation of what is added to every parameter, so that none has the zeros or ones of its initialiser."""
MOST_LAYERS = 4

_WIDTH = dict.fromkeys(
    ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "embedding_dim", "emb_dim", "word_embed_proj_dim",
     "encoder_hidden_size", "text_hidden_size", "attention_hidden_size", "lru_width", "d_embed", "backbone_hidden_size",
     "embed_dim", "projection_dim", "out_hidden_size", "output_dim", "vision_output_dim"), 32,
)  # fmt: skip
_INNER = dict.fromkeys(
    ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_inner", "n_inner", "ffn_hidden_size",
     "dim_ff", "dff", "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size",
     "prefix_dense_intermediate_size", "mlp_hidden_size", "mlp_dim", "projector_intermediate_size"), 64,
)  # fmt: skip
_EXPERT = dict.fromkeys(
    ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size",
     "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size", "router_hidden_size"), 16,
)  # fmt: skip
_LAYERS = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_encoder_layers",
     "num_decoder_layers", "depth", "num_blocks"), 2,
)  # fmt: skip
_HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
     "num_encoder_attention_heads", "num_decoder_attention_heads", "attention_heads", "swa_num_attention_heads",
     "linear_num_heads", "index_n_heads"), 4,
)  # fmt: skip
_GROUPS = dict.fromkeys(
    ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups", "multi_query_group_num",
     "linear_num_key_heads", "indexer_kv_heads"), 2,
)  # fmt: skip
_HEAD_SIZE = dict.fromkeys(
    ("head_dim", "d_head", "kv_channels", "attention_head_size", "attention_head_dim", "v_head_dim", "qk_nope_head_dim",
     "qk_rope_head_dim", "index_head_dim", "linear_key_head_dim", "linear_value_head_dim", "swa_head_dim",
     "global_head_dim", "linear_head_dim", "indexer_head_dim"), 8,
)  # fmt: skip
_FURTHER = {
    "vocab_size": VOCABULARY,
    "bos_token_id": VOCABULARY - 2,
    "eos_token_id": 257,
    "pad_token_id": VOCABULARY - 1,
    "max_position_embeddings": 2048,
    "n_positions": 2048,
    "max_seq_len": 2048,
    "n_ctx": 2048,
    "qk_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "linear_num_value_heads": 4,
    "sliding_window": 8,
    "attention_window_size": 8,
    "attention_chunk_size": 8,
    "index_topk": 4,
    "mamba_d_state": 8,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_head": "auto",
    "mamba_head_dim": 16,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "type_vocab_size": 2,
    "is_decoder": True,
    "output_router_logits": False,
    "use_cache": False,
    "use_mamba_kernels": False,
    "dtype": None,
}
SIZES: dict[str, Any] = {
    **_WIDTH, **_INNER, **_EXPERT, **_LAYERS, **_HEADS, **_GROUPS, **_HEAD_SIZE, **_FURTHER,
}  # fmt: skip
VISION_SIDE = 28
"""Pixels of an image's side."""
VISION_SIZES: dict[str, Any] = {"image_size": VISION_SIDE, "patch_size": 14}
NO_DROPOUT = ("drop", "jitter_noise", "mask_time_prob", "mask_feature_prob")


def tiny_config(model_type: str, own: Mapping[str, Any], **changes: Any) -> PreTrainedConfig:
    """The config class of a family with small sizes.

    Args:
        model_type: the family's name in transformers.
        own: what is given to its config class besides, by key; `a.b` for key b of the sub-config a, and a value of
            `...` leaves the default.
        **changes: likewise, for all families.
    """
    kind: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
    return kind(**_small(kind, {**changes, **own}))


def _small(kind: type[PreTrainedConfig], own: Mapping[str, Any], sizes: Mapping[str, Any] = SIZES) -> dict:
    """Arguments for a config class: those of its defaults that are sizes, made small."""
    flat = {key: value for key, value in own.items() if "." not in key}
    try:
        values = kind().to_dict()
    except Exception:  # a class whose defaults contradict each other
        values = {}
    made: dict[str, Any] = {}
    parts: Any = kind.sub_configs
    for key, value in values.items():
        sub = parts.get(key)
        if sub is not None and key not in flat:
            nested = {name.partition(".")[2]: v for name, v in own.items() if name.startswith(f"{key}.")}
            sub_kind = _class_of(sub, value, nested)
            made[key] = _small(sub_kind, nested, SIZES | VISION_SIZES if key.endswith("vision_config") else SIZES)
            if "model_type" in values and sub is not sub_kind:
                made[key]["model_type"] = sub_kind.model_type
        elif key in sizes and (value is not None or key in ("pad_token_id", "bos_token_id", "eos_token_id")):
            made[key] = sizes[key]
        elif isinstance(value, float) and any(word in key for word in NO_DROPOUT):
            made[key] = 0.0
    made |= {key: SIZES[key] for key in ("is_decoder",) if key in values}
    if "qk_rope_head_dim" in values and "num_key_value_heads" in values:  # multi-head latent attention
        made["num_key_value_heads"] = made["num_attention_heads"]
    made |= _layers(values)
    made |= flat
    return {key: value for key, value in made.items() if value is not ...}


def _class_of(sub: type, value: Any, nested: Mapping[str, Any]) -> type[PreTrainedConfig]:
    """The class of a sub-config, which may be that of any family."""
    model_type: Any = nested.get("model_type") or (value or {}).get("model_type")
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    return sub


def _layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Lists with one entry per layer cut down to layers that have one of each kind, in order."""
    key = next((key for key in _LAYERS if isinstance(values.get(key), int)), None)
    if key is None:
        return {}
    count = values[key]
    lists = {name: v for name, v in values.items() if isinstance(v, Sequence) and not isinstance(v, str)}
    lists = {name: list(v) for name, v in lists.items() if len(v) == count and count > 2}
    if not lists:
        return {}
    chosen: list[int] = []
    for each in lists.values():
        seen: list[Any] = [each[index] for index in chosen]
        for index, value in enumerate(each):
            if value not in seen and len(chosen) < MOST_LAYERS:
                chosen.append(index)
                seen.append(value)
    chosen = sorted({*chosen, 0, *([] if len(chosen) > 1 else [1])})
    return {key: len(chosen), **{name: [copy.copy(each[index]) for index in chosen] for name, each in lists.items()}}


@torch.no_grad()
def shake(model: nn.Module, seed: int = 0) -> None:
    """Add noise to all parameters."""
    draws = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter += NOISE * torch.randn(parameter.shape, generator=draws).to(parameter.dtype)


class Impossible(Exception):
    """A family that cannot be built here, with the reason."""


_ROTARY = {"rotary_dim": 8}
_HEADS_OF_8 = {"head_dim": 8, "num_key_value_heads": 2}
_ASSISTANT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": 0,
}
"""The text config of a Gemma 4 assistant, whose class cannot be made with its own defaults."""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QSA = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 8,
    "ngram_vocab_size_base": 50,
    "split_ngram_parts": 1,
    "make_ngram_vocab_size_divisible_by": 1,
}
_MLA = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}

DECODERS: Mapping[str, Mapping[str, Any]] = {
    "codegen": _ROTARY,
    "gptj": _ROTARY,
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_config.hidden_size_global": 32,
        "decoder_config.hidden_size_global": 32,
    },
    "deepseek_v2": _MLA,
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": 64},
    "hunyuan_v1_dense": _HEADS_OF_8,
    "hunyuan_v1_moe": _HEADS_OF_8,
    "ministral": _HEADS_OF_8,
    "nemotron": _HEADS_OF_8,
    "lfm2_moe": {"num_dense_layers": 1, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "qwen4_exp_text": QSA,
    "qwen4_exp": {f"text_config.{key}": value for key, value in QSA.items()},
    "reformer": {
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (16, 32),
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
    },
    "roc_bert": {
        "pad_token_id": 0,
        "pronunciation_vocab_size": 50,
        "shape_vocab_size": 50,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 4,
    },
    "youtu": {"initializer_range": 0.02, "embedding_initializer_range": 0.02},
    "prophetnet": {"max_position_embeddings": 64, "pad_token_id": 0},  # each forward makes a mask of their square
    "gpt_neo": {"window_size": 8},
    "modernbert-decoder": {"local_attention": 8},
    "inkling_text": {"sliding_window_size": 8},
    "inkling2_text": {"sliding_window_size": 8, "unpadded_vocab_size": VOCABULARY},
    "doge": {"keep_window_size": 8},
    "zaya": {"num_experts_per_tok": 1},
    "dots3_note": {
        "vision_config.adapter_in_dim": 32,
        "vision_config.adapter_out_dim": 32,
        "audio_config.adapter_input_size": 32,
        "audio_config.adapter_out_dim": 32,
    },
    "gemma4_unified_assistant": {
        "backbone_hidden_size": 32,
        "text_config": {"model_type": "gemma4_unified_text", **_ASSISTANT},
    },
    "gemma4_assistant": {"backbone_hidden_size": 32, "text_config": {"model_type": "gemma4_text", **_ASSISTANT}},
    "flint": {"mlp_only_layers": [0]},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0, "attn_config.kv_n_heads": 2},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
}
"""What single families need besides small sizes."""
