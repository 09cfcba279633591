"""Tiny models of the kinds that differ on disk or in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from shardtune.checkpoint.hf_load import init_empty_weights

_SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

KINDS = ("qwen2", "qwen2_tied", "llama", "llama_tied", "mistral", "gemma3", "mixtral", "qwen3_moe")


def config(kind: str) -> PreTrainedConfig:
    """The configuration of one of `KINDS`."""
    tied = {"tie_word_embeddings": kind.endswith("_tied") or kind == "gemma3"}
    sizes = {**_SIZES, **tied}
    if kind.startswith("qwen2"):
        return Qwen2Config(**sizes)
    if kind.startswith("llama"):
        return LlamaConfig(**sizes)
    if kind == "mistral":
        return MistralConfig(**sizes, sliding_window=8)
    if kind == "gemma3":
        return Gemma3TextConfig(**{**sizes, "pad_token_id": 0}, head_dim=8, sliding_window=8)
    if kind == "mixtral":
        return MixtralConfig(**sizes, num_local_experts=5, num_experts_per_tok=2)
    return Qwen3MoeConfig(**sizes, head_dim=8, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12)


def model(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A real model, every parameter random (norms and biases too, so that a mix-up shows)."""
    made = AutoModelForCausalLM.from_config(config(kind), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + 0.01)
    return made.eval()


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """A real model that transformers itself saved to `folder`."""
    made = model(kind, dtype)
    made.save_pretrained(folder, **options)
    return made


def empty(configuration: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model without memory for its parameters."""
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(configuration, dtype=dtype).eval()


def shard(made: PreTrainedModel, ranks: int) -> PreTrainedModel:
    """FSDP2 over all ranks, a layer a unit."""
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in made.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made


def logits(made: PreTrainedModel) -> torch.Tensor:
    """The logits of a fixed input, longer than the sliding windows."""
    with torch.no_grad():
        return made(input_ids=(torch.arange(20) * 7 % 67)[None]).logits
