"""Tiny vision-language models of any family of transformers, with processors, and what plain code makes of rows."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText, ProcessorMixin
from transformers.models.auto.image_processing_auto import (
    IMAGE_PROCESSOR_MAPPING_NAMES,
    get_image_processor_class_from_name,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name
from transformers.utils import is_torchvision_available

from shardtune.models.vision.processors import load_processor, without_video
from tests.support.flat_vision import encoded, encoded_whole
from tests.support.tiny_architectures import QSA, VISION_SIDE, Impossible, shake, tiny_config
from tests.support.vision import save_image_rows, template, tokenizer

NAMED = {
    "image_token": "<image>",
    "video_token": "<video>",
    "audio_token": "<audio>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "boa_token": "<boa>",
    "eoa_token": "<eoa>",
    "vision_start_token": "<vs>",
    "vision_end_token": "<ve>",
    "image_start_token": "<is>",
    "image_end_token": "<ie>",
    "slice_start_token": "<ss>",
    "slice_end_token": "<se>",
    "image_id_start_token": "<ids>",
    "image_id_end_token": "<ide>",
    "image_boundary_token": "<fake_token_around_image>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
"""Tokens by the names under which processors look them up."""
IDS = {
    "image_token_id": "<image>",
    "image_token_index": "<image>",
    "video_token_id": "<video>",
    "video_token_index": "<video>",
    "audio_token_id": "<audio>",
    "vision_start_token_id": "<vs>",
    "vision_end_token_id": "<ve>",
    "boi_token_id": "<boi>",
    "eoi_token_id": "<eoi>",
    "boi_token_index": "<boi>",
    "eoi_token_index": "<eoi>",
    "image_start_token_id": "<vs>",
    "image_end_token_id": "<ve>",
    "video_start_token_id": "<vs>",
    "video_end_token_id": "<ve>",
    "im_start_id": "<is>",
    "im_end_id": "<ie>",
}
"""Tokens by the keys of configs."""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN = {
    "writes": "<vs><image><ve>",
    "config": {
        "text_config.rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
        "vision_config.out_hidden_size": 32,
    },
}
_QWEN3 = {
    "writes": "<vs><image><ve>",
    "config": {
        "text_config.rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        "vision_config.deepstack_visual_indexes": [0],
        "vision_config.num_position_embeddings": 16,
    },
}
_QWEN3_5 = {
    "writes": "<vs><image><ve>",
    "config": {
        "text_config.head_dim": 32,
        "text_config.rope_parameters": {
            **_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25,
        },
        "vision_config.num_position_embeddings": 16,
    },
}  # fmt: skip
_OMNI = {
    "pil": "Qwen2VLImageProcessorPil",
    "audio": "WhisperFeatureExtractor",
    "writes": "<vbos><image><veos>",
    "named": {
        "vision_bos_token": "<vbos>",
        "vision_eos_token": "<veos>",
        "audio_bos_token": "<abos>",
        "audio_eos_token": "<aeos>",
    },
    "config": {"text_config.rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
}
_PIXTRAL = {
    "class": "PixtralProcessor",
    "pil": "PixtralImageProcessorPil",
    "tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "writes": "[IMG]",
    "ids": {"image_token_id": "[IMG]", "image_token_index": "[IMG]"},
    "config": {"vision_config.head_dim": 8},
    "pixels": {"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}},
    "processor": {"patch_size": 14, "spatial_merge_size": 2},
}
_MOLMO = ("im_patch", "im_col", "im_start", "low_res_im_start", "frame_start", "im_end", "frame_end", "im_low")
_GRID = {"image_grid_pinpoints": [[28, 56], [56, 28]]}
_CLIP = {"text_config.model_type": "llama", "vision_config.model_type": "clip_vision_model"}
_SIGLIP = {"vision_config.model_type": "siglip_vision_model", "vision_config.vision_use_head": False}
_LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
VISION: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": {
        **_QWEN,
        "config": {**_QWEN["config"], "vision_config.embed_dim": 32, "vision_config.hidden_size": 32},
    },
    "qwen2_5_vl": {
        **_QWEN,
        "config": {**_QWEN["config"], "vision_config.window_size": 56, "vision_config.fullatt_block_indexes": [1]},
    },
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": {**_QWEN3, "pil": "Qwen2VLImageProcessorPil"},
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen4_exp": {
        **_QWEN3_5,
        "config": {**_QWEN3_5["config"], **{f"text_config.{key}": value for key, value in QSA.items()}},
    },
    "llava": {"config": {**_CLIP, "image_seq_length": 4}, "processor": _LLAVA},
    "vipllava": {"config": {**_CLIP, "vision_feature_layers": [-1, -2]}, "processor": _LLAVA},
    "llava_next": {"config": {**_CLIP, **_GRID}, "pixels": _GRID, "processor": _LLAVA},
    "llava_next_video": {"config": {**_CLIP, **_GRID}, "pixels": _GRID, "processor": _LLAVA},
    "llava_onevision": {
        "config": {**_SIGLIP, **_GRID, "text_config.model_type": "qwen2"},
        "pixels": _GRID,
        "processor": {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    },
    "video_llava": {
        "config": _CLIP,
        "processor": _LLAVA,
        "pixels": {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
    },
    "aria": {"impossible": "its smallest image has 1,225 patches"},
    "ovis2": {
        "tokens": ["<IMG_ATOM>", "<IMG_START>", "<IMG_END>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>"],
        "ids": {"image_token_id": "<IMG_ATOM>"},
        "config": {"visual_indicator_token_ids": [300, 301, 302, 303, 304]},
        "processor": {"image_seq_length": 4},
    },
    "janus": {"processor": {"num_image_tokens": 4}},
    "deepseek_vl": {"processor": {"num_image_tokens": 4}},
    "idefics2": {
        "config": {
            "text_config.model_type": "mistral",
            "perceiver_config.resampler_n_latents": 4,
            "perceiver_config.resampler_depth": 1,
            "perceiver_config.resampler_n_heads": 4,
            "perceiver_config.resampler_head_dim": 8,
        },
        "pixels": {"do_image_splitting": False, "size": {"shortest_edge": 28, "longest_edge": 28}},
        "processor": {"image_seq_len": 4},
    },
    "idefics3": {
        "config": {"text_config.model_type": "llama", "scale_factor": 2},
        "pixels": {"max_image_size": {"longest_edge": 28}, "size": {"longest_edge": 56}},
        "processor": {"image_seq_len": 1},
    },
    "smolvlm": {
        "config": {"text_config.model_type": "llama", "scale_factor": 2},
        "pixels": {"max_image_size": {"longest_edge": 28}, "size": {"longest_edge": 56}},
        "processor": {"image_seq_len": 1},
    },
    "gemma3": {
        "writes": "<boi>",
        "config": {"mm_tokens_per_image": 4, "vision_config.vision_use_head": False},
        "processor": {"image_seq_length": 4},
    },
    "paligemma": {
        "config": {**_SIGLIP, "text_config.model_type": "gemma", "text_config.vocab_size": 1440},
        "pixels": {"image_seq_length": 4},
        "special": {"bos_token": "<bos>"},
        "whole": {"suffix": True},
    },
    "git": {"whole": {"placed": False}},
    "blip": {"whole": {"placed": False}},
    "internvl": {
        "config": {
            "text_config.model_type": "qwen2",
            "vision_config.image_size": [28, 28],
            "vision_config.patch_size": [14, 14],
            "downsample_ratio": 0.5,
            "image_seq_length": 1,
        },
        "pixels": {"crop_to_patches": True, "max_patches": 2},
        "processor": {"image_seq_length": 1},
    },
    "aya_vision": {
        "tokens": ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL"],
        "ids": {"image_token_index": "<|IMG_PATCH|>"},
        "config": {
            **_SIGLIP,
            "text_config.model_type": "cohere2",
            "text_config.logit_scale": 0.0625,
            "downsample_factor": 2,
            "alignment_intermediate_size": 64,
        },
        "pixels": {"crop_to_patches": True, "max_patches": 2},
        "processor": {"patch_size": 14, "img_size": 28, "downsample_factor": 2, "image_token": "<image>"},
    },
    "mllama": {
        "begins": "<bos>",
        "tokens": ["<|python_tag|>"],
        "config": {
            "text_config.num_hidden_layers": 3,
            "text_config.cross_attention_layers": [1],
            "vision_config.num_global_layers": 1,
            "vision_config.intermediate_layers_indices": [0],
            "vision_config.vision_output_dim": 64,
            "vision_config.attention_heads": 4,
            "vision_config.supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            "vision_config.max_num_tiles": 2,
        },
        "pixels": {"max_image_tiles": 2},
    },
    "glm4v": {"config": {"text_config.rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}},
    "glm4v_moe": {
        "pil": "Glm4vImageProcessorPil",
        "config": {"text_config.head_dim": 16, "text_config.rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    },
    "glm5_next": {
        "config": {
            "text_config.index_kpool": 2,
            "text_config.num_key_value_heads": 4,
            "text_config.qk_rope_head_dim": 0,
            "vision_config.out_hidden_size": 32,
        },
    },
    "glm46v": {"config": {"text_config.rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}},
    "paddleocr_vl": {"config": {"text_config.rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}},
    "ernie4_5_vl_moe": {
        "config": {
            "text_config.moe_intermediate_size": [16, 16],
            "text_config.rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
        },
        "named": {"video_end_token": "<vide>", "video_start_token": "<vids>"},
    },
    "lighton_ocr": {"named": {"image_break_token": "<ibr>"}},
    "qianfan_ocr": {
        "config": {
            "vision_config.image_size": [28, 28],
            "vision_config.patch_size": [14, 14],
            "downsample_ratio": 0.5,
            "image_seq_length": 1,
        },
        "pixels": {"crop_to_patches": True, "max_patches": 2},
        "processor": {"image_seq_length": 1},
    },
    "blip-2": {
        "config": {"num_query_tokens": 4},
        "processor": {"num_query_tokens": 4},
        "unnamed": True,
        "whole": {"placed": False},
    },
    "instructblip": {
        "config": {"num_query_tokens": 4},
        "processor": {"num_query_tokens": 4},
        "unnamed": True,
        "whole": {"placed": False},
    },
    "got_ocr2": {
        "tokens": ["<img>", "</img>", "<imgpad>"],
        "writes": "<imgpad>",
        "ids": {"image_token_id": "<imgpad>", "image_token_index": "<imgpad>"},
        "config": {
            "vision_config.image_size": 64,
            "vision_config.patch_size": 1,
            "vision_config.global_attn_indexes": [],
        },
        "pixels": {"size": {"height": 64, "width": 64}},
        "whole": {"nested": False},
    },
    "glm_ocr": {
        "class": "Glm46VProcessor",
        "pil": "Glm46VImageProcessorPil",
        "config": {"text_config.rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    },
    "glmga": {
        "class": "Glm46VProcessor",
        "pil": "GlmgaImageProcessorPil",
        "config": {"text_config.rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    },
    "kosmos-2": {
        "class": "Kosmos2Processor",
        "special": {"unk_token": "<unk>", "bos_token": "<bos>"},
        "tokens": ["<unk>", *(f"<place{number}>" for number in range(64))],
        "config": {"text_config.vocab_size": 1600},
        "whole": {"placed": False, "nested": False, "strips": True},
    },
    "kosmos-2.5": {"impossible": "its processor makes 4,096 patches of every image"},
    "mistral3": _PIXTRAL,
    "mistral4": {**_PIXTRAL, "config": {"head_dim": ...}},
    "mistral_large4": _PIXTRAL,
    "cohere2_vision": {
        "named": {"img_line_break_token": "<nl>"},
        "config": {**_SIGLIP, "text_config.model_type": "cohere2", "alignment_intermediate_size": 64},
        "pixels": {"crop_to_patches": True, "max_patches": 2, "patch_size": 1},
    },
    "llama4": {
        "tokens": [
            "<|image|>",
            "<|image_start|>",
            "<|image_end|>",
            "<|patch|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ],
        "writes": "<|image|>",
        "ids": {"image_token_id": "<|patch|>", "image_token_index": "<|patch|>"},
        "config": {
            "vision_config.intermediate_size": 128,
            "vision_config.pixel_shuffle_ratio": 0.5,
            "vision_config.projector_input_dim": 32,
            "vision_config.projector_output_dim": 32,
            "vision_config.vision_output_dim": 32,
        },
    },
    "minimax_m3_vl": {
        "tokens": ["]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["],
        "writes": "]<]image[>[",
        "ids": {"image_token_id": "]<]image[>[", "image_token_index": "]<]image[>[", "video_token_id": "]<]video[>["},
    },
    "muse_glimmer": {
        "tokens": ["<|patch|>", "<|image_start|>", "<|image_end|>", "<|video|>"],
        "writes": "<|patch|>",
        "ids": {"image_token_id": "<|patch|>", "video_token_id": "<|video|>"},
        "config": {"out_hidden_size": 128, "projector_hidden_size": 32},
    },
    "perception_lm": {"impossible": "its vision tower needs the package timm"},
    "step3p7": {
        "tokens": ["<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"],
        "writes": "<im_patch>",
        "ids": {"image_token_id": "<im_patch>"},
        "pixels": {"size": {"height": 112, "width": 112}, "patch_size": 56},
        "config": {"vision_config.image_size": 112, "text_config.sliding_window": 8},
        "whole": {},
    },
    "fast_vlm": {"impossible": "its vision tower needs the package timm"},
    "gemma3n": {"impossible": "its vision tower needs the package timm"},
    "cosmos3_omni": {**_QWEN3, "class": "Qwen3VLProcessor"},
    "cosmos3_edge": {
        **_QWEN3,
        "options": {"return_mm_token_type_ids": True},
        "config": {"text_config.rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
    },
    "qwen2_5_omni_thinker": {**_OMNI, "class": "Qwen2_5OmniProcessor"},
    "qwen3_omni_moe_thinker": {
        **_OMNI,
        "class": "Qwen3OmniMoeProcessor",
        "config": {**_QWEN3["config"]},
    },
    "deepseek_vl_hybrid": {
        "config": {
            "high_res_vision_config.image_size": 64,
            "high_res_vision_config.patch_size": 8,
            "high_res_vision_config.window_size": 4,
            "high_res_vision_config.output_channels": 8,
            "high_res_vision_config.global_attn_indexes": [0],
        },
        "pixels": {"high_res_size": {"height": 64, "width": 64}},
        "processor": {"num_image_tokens": 4},
    },
    "granite_docling": {
        "config": {"vision_config.scale_factor": 2, "vision_config.deepstack_visual_indexes": [0]},
        "pixels": {"max_patches": 2},
        "processor": {"image_seq_len": 1},
    },
    "minicpmv4_7": {"config": {"insert_layer_id": 0, "vision_config.insert_layer_id": 0}},
    "molmo2": {
        "tokens": [f"<{name}>" for name in _MOLMO],
        "ids": {
            "image_patch_id": "<im_patch>",
            "image_start_token_id": "<im_start>",
            "image_end_token_id": "<im_end>",
            "low_res_image_start_token_id": "<low_res_im_start>",
            "frame_start_token_id": "<frame_start>",
            "frame_end_token_id": "<frame_end>",
        },
        "config": {"vision_config.image_size": [56, 56], "adapter_config.vision_feature_layer": [1, 0]},
        "pixels": {"size": {"height": 56, "width": 56}, "overlap_margins": [1, 1], "max_crops": 2},
    },
    "nemotron_h_omni": {"config": {"vision_config.video_temporal_patch_size": 2}},
    "cohere_compass": {
        "named": {"image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>"},
        "writes": "<vs><|IMAGE_PAD|><ve>",
        "ids": {"image_token_id": "<|IMAGE_PAD|>", "video_token_id": "<|VIDEO_PAD|>"},
        "config": {"text_config.rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    },
    "hunyuan_vl": {
        "writes": "<is><image><ie>",
        "config": {
            "text_config.head_dim": 8,
            "text_config.num_key_value_heads": 2,
            "text_config.rope_parameters": {**_ROPE, "mrope_section": [1, 1, 1, 1]},
        },
    },
    "granite4_vision": {
        "config": {
            **_GRID,
            "vision_config.hidden_size": 64,
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[-1, 0]],
            "spatial_target_layers": [1, 1, 1, 1],
        },
        "pixels": _GRID,
        "processor": {"patch_size": 14, "vision_feature_select_strategy": "full", "downsample_rate": "1/2"},
    },
    "deepseek_ocr2": {
        "config": {
            "text_config.mlp_layer_types": ["dense", "sparse"],
            "vision_config.sam_config.downsample_channels": [16, 32],
            "text_config.num_experts_per_tok": 2,
        },
        "pixels": {"size": {"height": 768, "width": 768}, "tile_size": 768, "patch_size": 16},
    },
    "emu3": {
        "named": {"image_wrapper_token": "<|image token|>", "eof_token": "<eof>"},
        "special": {"bos_token": "<bos>"},
        "config": {
            "vocabulary_map": {
                "<image>": 261,
                "<|extra_200|>": 299,
                **{f"<|visual token {n:06d}|>": 300 + n for n in range(8)},
            },
            "vq_config.codebook_size": 8,
            "vq_config.embed_dim": 8,
            "vq_config.latent_channels": 8,
            "vq_config.base_channels": 32,
            "vq_config.channel_multiplier": [1, 1, 1, 1],
            "vq_config.num_res_blocks": 1,
            "vq_config.attn_resolutions": [],
        },
    },
    "chameleon": {
        "config": {
            "vocabulary_map": {"<image>": 261, **{f"IMGIMG{'ABCDEFGH'[number]}Z": 300 + number for number in range(8)}},
            "vq_config": {
                "embed_dim": 8,
                "num_embeddings": 8,
                "latent_channels": 8,
                "base_channels": 32,
                "channel_multiplier": [1, 1, 1],
                "num_res_blocks": 1,
                "resolution": 28,
            },
        },
        "tokens": ["<sep>"],
        "special": {"sep_token": "<sep>"},
        "pixels": {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        "processor": {"image_seq_length": 49},
        "whole": {},
    },
    "florence2": {
        "config": dict.fromkeys(
            ("vision_config.patch_size", "vision_config.embed_dim", "vision_config.num_heads"), ...
        ),
    },
    "diffusion_gemma": {
        "audio": "Gemma4AudioFeatureExtractor",
        "pil": "Gemma4ImageProcessorPil",
        "pixels": {"max_soft_tokens": 70},
    },
    "gemma4_unified": {"audio": "Gemma4UnifiedAudioFeatureExtractor", "pixels": {"max_soft_tokens": 70}},
    "lfm2_vl": {
        "pixels": {
            "encoder_patch_size": 14,
            "min_image_tokens": 1,
            "max_image_tokens": 4,
            "tile_size": 56,
            "max_tiles": 2,
        },
    },
    "minicpm_ocr": {"pixels": {"scale_resolution": 56, "max_slice_nums": 2}},
    "muse_spark": {
        "audio": "MuseSparkFeatureExtractor",
        "tokens": ["<|patch|>"],
        "writes": "<|patch|>",
        "named": {"image_token": "<|patch|>"},
        "ids": {"image_token_id": "<|patch|>"},
        "config": {"out_hidden_size": 128, "projector_hidden_size": 32},
    },
    "unlimited_ocr": {
        "pixels": {"size": {"height": 128, "width": 128}, "tile_size": 64},
    },
    "inkling_mm_model": {"audio": "InklingFeatureExtractor", "pixels": {"size": {"height": 14, "width": 14}}},
    "kimi_k25": {"config": {"projection_hidden_size": 32}},
    "gemma4": {"audio": "Gemma4AudioFeatureExtractor", "pixels": {"max_soft_tokens": 70}},
}
"""What single families need besides small sizes: `config`, `pixels` (image processor), `processor`, `writes` (what
their template writes for an image), `class` and `pil` (of the processor and the image processor), `whole` (how
`encoded_whole` calls a processor that puts text and images together by itself), `options` (of the call of any other),
`unnamed` (the tokenizer has no names for its tokens)."""


def _pixel_settings(kind: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """Small images, in the way that an image processor's class names their size."""
    size = dict(getattr(kind, "size", None) or {})
    edges = {"height": VISION_SIDE, "width": VISION_SIDE}
    made: dict[str, Any] = {}
    if set(size) == {"height", "width"}:
        made["size"] = edges
    elif set(size) == {"shortest_edge"}:
        made |= {"size": {"shortest_edge": VISION_SIDE}, "crop_size": edges}
    elif set(size) == {"shortest_edge", "longest_edge"} and size["longest_edge"] > 100_000:
        made["size"] = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    if getattr(kind, "patch_size", None) is not None:
        made["patch_size"] = 14
    return {**made, **own}


class Unavailable(Exception):
    """A family without a processor that works here."""


def make_processor(family: str) -> ProcessorMixin:
    """The family's processor with a tokenizer of bytes and small images.

    Raises:
        Unavailable: it has none, or one by torchvision alone.
    """
    own = VISION.get(family, {})
    name = own.get("class") or PROCESSOR_MAPPING_NAMES.get(family)
    kinds = IMAGE_PROCESSOR_MAPPING_NAMES.get(family) or {}
    pil = own.get("pil") or kinds.get("pil") or (kinds.get("torchvision") if is_torchvision_available() else None)
    if name is None or pil is None:
        raise Unavailable
    found: Any = processor_class_from_name(name)
    try:
        takes = inspect.signature(found.__init__).parameters
        kind = without_video(found)
    except ImportError as error:
        raise Unavailable from error
    image_kind: Any = get_image_processor_class_from_name(pil)
    named = {} if "unnamed" in own else {**NAMED, **own.get("named", {})}
    text = tokenizer("<bos>", *own.get("tokens", ()), image=own.get("writes", "<image>"), **named)
    for name, token in own.get("special", {}).items():
        setattr(text, name, token)
    if "begins" in own:
        text.bos_token = own["begins"]
        text.chat_template = own["begins"] + template(text)
    parts: dict[str, Any] = {"image_processor": image_kind(**_pixel_settings(image_kind, own.get("pixels", {})))}
    if "audio" in own:
        parts["feature_extractor"] = getattr(transformers, own["audio"])()
    if "qformer_tokenizer" in takes:
        parts["qformer_tokenizer"] = copy.deepcopy(text)
    if "video_processor" in takes:
        parts["video_processor"] = None
    try:
        made = kind(tokenizer=text, **parts, **own.get("processor", {}))
    except ImportError as error:
        raise Unavailable from error
    made.chat_template = template(text)
    return made


def _save_names(family: str, folder: Path) -> None:
    """The classes that a directory of the family names, for one whose processor does not work here."""
    images = IMAGE_PROCESSOR_MAPPING_NAMES.get(family) or {}
    own = VISION.get(family, {}).get("class")
    kinds = {"processor_class": own or PROCESSOR_MAPPING_NAMES.get(family)}
    named: dict[str, Any] = {key: name for key, name in kinds.items() if name is not None}
    if images:
        named["image_processor"] = {"image_processor_type": next(iter(images.values()))}
    (folder / "processor_config.json").write_text(json.dumps(named))
    audio = VISION.get(family, {}).get("audio")
    if audio is not None:
        getattr(transformers, audio)().save_pretrained(folder)
    text = tokenizer(image="<image>", **NAMED)
    text.save_pretrained(folder)


def save_family(family: str, folder: Path) -> None:
    """A model with its processor, as `save_pretrained` writes them; the config and names where that cannot be."""
    own = VISION.get(family, {}).get("config", {})
    if "impossible" in VISION.get(family, {}):
        raise Impossible(VISION[family]["impossible"])
    try:
        processor: Any = make_processor(family)
    except Unavailable:
        tiny_config(family, own).save_pretrained(folder)
        _save_names(family, folder)
        return
    text = processor.tokenizer
    defaults = CONFIG_MAPPING[family]().to_dict()
    tokens = IDS | VISION.get(family, {}).get("ids", {})
    ids = {key: text.convert_tokens_to_ids(token) for key, token in tokens.items() if key in defaults}
    torch.manual_seed(1)
    model: Any = AutoModelForImageTextToText.from_config(tiny_config(family, {**ids, **own}))
    shake(model)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


ROWS_OF_IMAGES: tuple[str, ...] = ("rows of any images", "rows with images", "rows of one image")


def image_rows(folder: Path, count: int, kind: str = ROWS_OF_IMAGES[0]) -> tuple[Path, list[dict[str, Any]]]:
    """Rows as `save_image_rows` makes them; all with images; or all with one image, in their first turn."""
    file, rows = save_image_rows(folder, count)
    if kind != ROWS_OF_IMAGES[0]:
        rows = [row if row["images"] else rows[1 + number % 2] for number, row in enumerate(rows)]
    if kind == ROWS_OF_IMAGES[2]:
        rows = [_of_one_image(row) for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file, rows


def _of_one_image(row: Mapping[str, Any]) -> dict[str, Any]:
    first, *others = row["messages"]
    others = [{**turn, "content": turn["content"].replace("<image>", "")} for turn in others]
    return {"messages": [first, *others], "images": row["images"][:1]}


def inputs_of(folder: Path, rows: list[dict[str, Any]]) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """The model's inputs for each row alone, by the processor itself, and its labels [tokens]."""
    processor = load_processor(str(folder), AutoConfig.from_pretrained(folder))
    own = VISION.get(AutoConfig.from_pretrained(folder).model_type, {})
    whole, options = own.get("whole"), own.get("options", {})
    made = (
        encoded(processor, row, folder, **options) if whole is None else encoded_whole(processor, row, folder, **whole)
        for row in rows
    )
    return [(inputs, labels[0]) for inputs, labels in made]
