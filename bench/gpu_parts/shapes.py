"""Shapes of published models with random weights, rows of ragged lengths, and the recipes that train them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from gpu_parts.records import Setting
from tests.support.dist.training import make_tokenizer
from tests.support.vision import save_vision_model

hf: Any = transformers
ROWS = 512
MICRO_BATCHES = 4
"""Of a step: its tokens are those of so many full ones."""


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        model: a key of `MODELS`.
        lora: a LoRA of rank 16 on all linear layers; otherwise all weights.
        length: the longest row; a micro-batch has as many tokens.
    """

    model: str
    lora: bool
    length: int

    def __str__(self) -> str:
        size = f"{self.length // 1024}k" if self.length >= 1024 else f"{self.length} tokens"
        return f"{self.model} {'LoRA' if self.lora else 'full'} {size}"


def _qwen3(width: int, inner: int, layers: int, heads: int, groups: int, tied: bool) -> Any:
    return hf.Qwen3Config(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, head_dim=128, vocab_size=151_936, max_position_embeddings=40_960,
        tie_word_embeddings=tied, eos_token_id=257, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip


def _mixture() -> Any:
    """A fifth of Qwen3-30B-A3B: its layers, fewer of them."""
    return hf.Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=8, num_experts=128,
        num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151_936,
        max_position_embeddings=40_960, tie_word_embeddings=False, norm_topk_prob=True, eos_token_id=257,
        bos_token_id=None, pad_token_id=0,
    )  # fmt: skip


def _gemma2() -> Any:
    """Gemma 2 2B: soft caps on scores and logits, a window in every second layer."""
    return hf.Gemma2Config(
        hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4,
        head_dim=256, vocab_size=256_000, sliding_window=4096, max_position_embeddings=8192, eos_token_id=257,
        bos_token_id=None, pad_token_id=0,
    )  # fmt: skip


MODELS: Mapping[str, Any] = {
    "0.6B": lambda: _qwen3(1024, 3072, 28, 16, 8, True),
    "1.7B": lambda: _qwen3(2048, 6144, 28, 16, 8, True),
    "4B": lambda: _qwen3(2560, 9728, 36, 32, 8, True),
    "8B": lambda: _qwen3(4096, 12288, 36, 32, 8, False),
    "mixture 5B": _mixture,
    "Gemma 2 2B": _gemma2,
}
"""Configurations as published for Qwen3 and Gemma 2; of the mixture eight layers."""
TINY: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_experts": 4,
    "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "sliding_window": 64, "layer_types": None,
}  # fmt: skip
"""The same keys, for a trial on a CPU."""


def config_of(model: str, small: bool) -> Any:
    """A model's configuration."""
    config = MODELS[model]()
    if not small:
        return config
    given = {key: value for key, value in config.to_dict().items() if key not in ("layer_types", "model_type")}
    return type(config)(**{**given, **{key: value for key, value in TINY.items() if key in given}})


def save_shape(model: str, setting: Setting) -> Path:
    """A directory with a configuration and a tokenizer, and without weights."""
    folder = setting.work("shapes", model.replace(" ", "-"))
    if not (folder / "config.json").exists():
        make_tokenizer().save_pretrained(folder)
        config_of(model, setting.small).save_pretrained(folder)
    return folder


def lengths(longest: int, count: int, seed: int = 0) -> list[int]:
    """Ragged, a quarter of the longest in the middle, as chats have them."""
    draw = random.Random(seed)
    return [max(16, min(longest, round(draw.lognormvariate(0, 0.8) * longest / 4))) for _ in range(count)]


def save_rows(length: int, setting: Setting) -> Path:
    """Rows of random tokens, all of them targets but the first quarter of each.

    The tokens are those of the tokenizer; the rest of a vocabulary is computed all the same. None is the padding token:
    a row that begins with it has no finite gradient where the weights are random (docs/errors/checkpoints.md).
    """
    file = setting.work("shapes") / f"rows-{length}.jsonl"
    if not file.exists():
        draw = random.Random(1)
        with file.open("w") as lines:
            for size in lengths(length, 24 if setting.small else ROWS):
                ids = [draw.randrange(1, 250) for _ in range(size)]
                labels = [-100] * (size // 4) + ids[size // 4 :]
                lines.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")
    return file


def recipe_of(case: Case, setting: Setting, **changes: Any) -> dict[str, Any]:
    """The recipe of a case in bf16: micro-batches of at most `length` tokens.

    Args:
        changes: dotted keys with `__` for the dots.
    """
    model: dict[str, Any] = {
        "model_path": str(save_shape(case.model, setting)), "from_scratch": True, "precision": "bf16",
        "gradient_checkpointing": checkpointed(case),
    }  # fmt: skip
    if case.lora:
        # Drawn at random, a base has values that bf16 lacks, and would be held in fp32 beside.
        model |= {"is_lora": True, "lora": {"r": 16, "target_modules": "all-linear", "base_dtype": "bf16"}}
    made: dict[str, Any] = {
        "runner": {
            "max_steps": 10_000, "max_epochs": -1, "save_interval": -1, "device": setting.device,
            "logger": {
                "log_path": str(setting.work("runs")), "experiment_name": str(case).replace(" ", "-"),
                "logger_backends": ["jsonl"],
            },
        },
        "actor": {
            "micro_batch_size": None, "max_tokens_per_micro_batch": case.length,
            "global_batch_tokens": MICRO_BATCHES * case.length, "model": model,
            "optim": {"lr": 1e-5, "lr_scheduler": "constant"},
        },
        "data": {
            "train_data_paths": str(save_rows(case.length, setting)), "max_length": case.length,
            "num_workers": 0, "cache_dir": str(setting.work("cache")),
        },
    }  # fmt: skip
    if states := state_dtype(case):
        made["actor"]["optim"]["state_dtype"] = states
    for key, value in changes.items():
        section = made
        *path, last = key.split("__")
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return made


def checkpointed(case: Case) -> bool:
    """Where activations do not fit beside weights and states."""
    return case.length > 4096 and case.model in ("4B", "8B")


def state_dtype(case: Case) -> str | None:
    """Of the 8B's 16 + 32 + 32 + 64 GB of weights, masters, gradients and states only 8-bit states leave room."""
    return "int8" if case.model == "8B" and not case.lora else None


def save_vision(setting: Setting) -> Path:
    """LLaVA with SigLIP: on a GPU of the size of a 0.5B, on a CPU tiny."""
    folder = setting.work("shapes", "vision")
    if not (folder / "config.json").exists():
        save_vision_model("llava_siglip", folder)
    return folder
