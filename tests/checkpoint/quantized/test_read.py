"""Quantised weights are read as the values that transformers makes of them, by as much as a rank needs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardtune.checkpoint.hf_load import load_weights, save_pretrained
from shardtune.errors import ModelError
from tests.support import quantized
from tests.support import tiny_checkpoint as tiny
from tests.support.dist.ranks import run_ranks


def save(form: str, folder: Path) -> None:
    """A tiny checkpoint in one of the formats."""
    if form == "mxfp4":
        return quantized.save_mxfp4(folder)
    tiny.saved("qwen3_moe" if form == "fp8 experts" else "llama", folder, torch.bfloat16)
    coder, settings = {
        "fp8": (quantized.fp8, quantized.FP8_SETTINGS),
        "nf4": (quantized.nf4, quantized.NF4_SETTINGS),
        "int8": (quantized.int8, quantized.INT8_SETTINGS),
    }[form.partition(" ")[0]]
    quantized.recode(folder, coder, settings)


def config_of(folder: Path) -> Any:
    return quantized.gpt_oss_config() if "gpt_oss" in (folder / "config.json").read_text() else None


def loaded(folder: Path, dtype: torch.dtype, ranks: int = 1) -> tuple[PreTrainedModel, tuple[str, ...]]:
    from shardtune.config import ModelConfig
    from shardtune.models.pretrained import load_config

    model = tiny.empty(load_config(ModelConfig(model_path=str(folder))), dtype)
    if ranks > 1:
        tiny.shard(model, ranks)
    report = load_weights(model, folder, dtype=dtype)
    return model, report.notes


def same(model: PreTrainedModel, reference: PreTrainedModel) -> list[str]:
    theirs = reference.state_dict()
    assert model.state_dict().keys() == theirs.keys()
    return [
        name
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, theirs[name])
    ]
