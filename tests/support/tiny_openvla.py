"""A directory as openvla-7b's, of a few hundred thousand parameters: the same files, keys, names and vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIDE, PATCH = 28, 14
PATCHES = (SIDE // PATCH) ** 2
DINO = {
    "patch": PATCH, "width": 24, "depth": 3, "heads": 2, "mlp": 40,
    "class_token": True, "registers": 4, "positions_of_patches": True, "layer_scale": True,
}  # fmt: skip
SIGLIP = {"patch": PATCH, "width": 16, "depth": 2, "heads": 4, "mlp": 24, "pool": True}
HIDDEN = 16
TEXT = {
    "model_type": "llama",
    "pad_token_id": 32000,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
STATISTICS = {
    "bridge_orig": {
        "action": {
            "mask": [True] * 6 + [False],
            "max": [0.4, 0.2, 0.3, 1.3, 3.2, 0.2, 1.0],
            "mean": [0.0] * 7,
            "min": [-0.4, -0.2, -0.3, -1.3, -3.2, -0.2, 0.0],
            "q01": [-0.03, -0.04, -0.04, -0.08, -0.09, -0.2, 0.0],
            "q99": [0.03, 0.04, 0.04, 0.08, 0.09, 0.2, 1.0],
            "std": [0.01] * 7,
        },
        "num_trajectories": 60064,
        "num_transitions": 2135463,
        "proprio": {"q01": [0.0] * 7, "q99": [0.0] * 7},
    },
    "two_arms": {"action": {"q01": [-1.0] * 3, "q99": [1.0] * 3}},
}
CONFIG: dict[str, Any] = {
    "arch_specifier": "no-align+fused-gelu-mlp",
    "architectures": ["OpenVLAForActionPrediction"],
    "auto_map": {
        "AutoConfig": "configuration_prismatic.OpenVLAConfig",
        "AutoModelForVision2Seq": "modeling_prismatic.OpenVLAForActionPrediction",
    },
    "hf_llm_id": "meta-llama/Llama-2-7b-hf",
    "image_resize_strategy": "resize-naive",
    "image_sizes": [SIDE, SIDE],
    "llm_backbone_id": "llama2-7b-pure",
    "llm_max_length": 2048,
    "model_type": "openvla",
    "n_action_bins": 256,
    "norm_stats": STATISTICS,
    "output_projector_states": False,
    "pad_to_multiple_of": 64,
    "pad_token_id": 32000,
    "text_config": TEXT,
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_override_act_layers": [None, None],
    "torch_dtype": "float32",
    "transformers_version": "4.40.1",
    "use_fused_vision_backbone": True,
    "vision_backbone_id": "dinosiglip-vit-so-224px",
    # The only key that is not there: what timm would know by the names above.
    "timm_model_args": [DINO, SIGLIP],
}
MEAN, STD = [0.484375, 0.455078125, 0.40625], [0.228515625, 0.2236328125, 0.224609375]
PREPROCESSOR: dict[str, Any] = {
    "auto_map": {
        "AutoImageProcessor": "processing_prismatic.PrismaticImageProcessor",
        "AutoProcessor": "processing_prismatic.PrismaticProcessor",
    },
    "image_processor_type": "PrismaticImageProcessor",
    "image_resize_strategy": "resize-naive",
    "input_sizes": [[3, SIDE, SIDE], [3, SIDE, SIDE]],
    "interpolations": ["bicubic", "bicubic"],
    "means": [[0.485, 0.456, 0.406], [0.5, 0.5, 0.5]],
    "processor_class": "PrismaticProcessor",
    "stds": [[0.229, 0.224, 0.225], [0.5, 0.5, 0.5]],
    "tvf_crop_params": [{"output_size": [SIDE, SIDE]}] * 2,
    "tvf_do_letterbox": False,
    "tvf_letterbox_fill": None,
    "tvf_normalize_params": [
        {"inplace": False, "mean": MEAN, "std": STD},
        {"inplace": False, "mean": [0.5] * 3, "std": [0.5] * 3},
    ],
    "tvf_resize_params": [{"antialias": True, "interpolation": 3, "max_size": None, "size": [SIDE, SIDE]}] * 2,
    "use_fused_vision_backbone": True,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """32,000 tokens, most of them never used, `<PAD>` after them, `<s>` before every text."""
    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<filler_{number}>" for number in range(len(words), 32000)]
    backend = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "<PAD>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<PAD>"
    )


def vit(prefix: str, shape: dict[str, Any], draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Weights under timm's names."""
    width, mlp = shape["width"], shape["mlp"]
    shapes = {"pos_embed": (1, PATCHES, width), "patch_embed.proj.weight": (width, 3, PATCH, PATCH)}
    shapes |= {"patch_embed.proj.bias": (width,)}
    linear = {
        "attn.qkv": (3 * width, width),
        "attn.proj": (width, width),
        "mlp.fc1": (mlp, width),
        "mlp.fc2": (width, mlp),
    }
    for block in range(shape["depth"]):
        for name, (rows, columns) in linear.items():
            shapes |= {f"blocks.{block}.{name}.weight": (rows, columns), f"blocks.{block}.{name}.bias": (rows,)}
        for name in ("norm1", "norm2"):
            shapes |= {f"blocks.{block}.{name}.{part}": (width,) for part in ("weight", "bias")}
        if shape.get("layer_scale"):
            shapes |= {f"blocks.{block}.{name}.scale_factor": (width,) for name in ("ls1", "ls2")}
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    if shape.get("class_token"):
        shapes |= {"cls_token": (1, 1, width), "reg_token": (1, shape["registers"], width)}
    if shape.get("pool"):
        pool = {"q": (width, width), "kv": (2 * width, width), "proj": (width, width)}
        pool |= {"mlp.fc1": (mlp, width), "mlp.fc2": (width, mlp)}
        for name, (rows, columns) in pool.items():
            shapes |= {f"attn_pool.{name}.weight": (rows, columns), f"attn_pool.{name}.bias": (rows,)}
        shapes |= {
            "attn_pool.latent": (1, 1, width),
            "attn_pool.norm.weight": (width,),
            "attn_pool.norm.bias": (width,),
        }
    return {f"{prefix}.{name}": torch.randn(size, generator=draw) * 0.4 for name, size in shapes.items()}


def save_openvla(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Write it; returns the weights."""
    draw = torch.Generator().manual_seed(seed)
    joined = DINO["width"] + SIGLIP["width"]
    tensors = vit("vision_backbone.featurizer", DINO, draw) | vit("vision_backbone.fused_featurizer", SIGLIP, draw)
    for name, rows, columns in (("fc1", 4 * joined, joined), ("fc2", HIDDEN, 4 * joined), ("fc3", HIDDEN, HIDDEN)):
        tensors[f"projector.{name}.weight"] = torch.randn((rows, columns), generator=draw) * 0.3
        tensors[f"projector.{name}.bias"] = torch.randn((rows,), generator=draw) * 0.3
    torch.manual_seed(seed)
    language = LlamaForCausalLM(LlamaConfig(**{name: value for name, value in TEXT.items() if name != "torch_dtype"}))
    tensors |= {f"language_model.{name}": tensor.detach() * 4 for name, tensor in language.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    for name, content in (
        ("config", CONFIG),
        ("preprocessor_config", PREPROCESSOR),
        ("dataset_statistics", STATISTICS),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2))
    make_tokenizer().save_pretrained(folder)
    return tensors
