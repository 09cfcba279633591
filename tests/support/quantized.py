"""Tiny checkpoints that are quantised as published ones are, and what transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, GptOssConfig, PreTrainedModel
from transformers.utils.quantization_config import Mxfp4Config

from shardtune.models.lora.nf4 import BLOCK, LEVELS

Tensors = dict[str, torch.Tensor]
Coder = Callable[[str, torch.Tensor], Tensors]
FP8_BLOCK = (4, 4)


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    """Whether published checkpoints quantise a tensor: layers' matrices, no embedding, head or router."""
    return tensor.ndim == 2 and ".layers." in name and not name.endswith((".mlp.gate.weight", "router.weight"))


def fp8(name: str, weight: torch.Tensor, block: tuple[int, int] = FP8_BLOCK) -> Tensors:
    """A matrix in FP8 with a scale for each block; those at the edges may be smaller."""
    rows, columns = block
    high, wide = weight.shape
    padded = torch.zeros(-(-high // rows) * rows, -(-wide // columns) * columns)
    padded[:high, :wide] = weight
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448
    codes = (blocks / scales[:, None, :, None]).view(padded.shape)[:high, :wide].to(torch.float8_e4m3fn)
    return {name: codes.contiguous(), f"{name}_scale_inv": scales}


def nf4(name: str, weight: torch.Tensor, *, nested: bool = False) -> Tensors:
    """A matrix as bitsandbytes stores it in four bits, its codes end to end."""
    values = weight.float().reshape(-1)
    values = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = values.abs().amax(dim=1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": list(weight.shape)}
    extra: Tensors = {f"{name}.absmax": scales}
    if nested:
        levels = torch.linspace(-1, 1, 256)
        offset = float(scales.mean())
        groups = torch.nn.functional.pad(scales - offset, (0, -scales.numel() % 256)).view(-1, 256)
        largest = groups.abs().amax(dim=1)
        coded = (groups / largest[:, None] - levels.view(-1, 1, 1)).abs().argmin(0).to(torch.uint8)
        coded = coded.view(-1)[: scales.numel()]
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        extra = {f"{name}.absmax": coded, f"{name}.nested_absmax": largest, f"{name}.nested_quant_map": levels}
    divisor = torch.where(scales > 0, scales, 1.0)[:, None]
    codes = ((values / divisor)[..., None] - torch.tensor(LEVELS)).abs().argmin(-1).to(torch.uint8).view(-1)
    codes = codes[: weight.numel() + weight.numel() % 2]
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {
        name: (codes[0::2] << 4 | codes[1::2])[:, None],
        f"{name}.quant_map": torch.tensor(LEVELS),
        f"{name}.quant_state.bitsandbytes__nf4": text,
        **extra,
    }


def int8(name: str, weight: torch.Tensor) -> Tensors:
    """A matrix as bitsandbytes stores it in eight bits."""
    scales = weight.float().abs().amax(dim=1)
    stem = name.removesuffix("weight")
    codes = (weight.float() * 127 / scales[:, None]).round().to(torch.int8)
    return {name: codes, f"{stem}SCB": scales, f"{stem}weight_format": torch.tensor(0, dtype=torch.uint8)}


def recode(folder: Path, coder: Coder, settings: Mapping[str, object]) -> None:
    """Quantises the linear layers of a saved model in place."""
    file = folder / "model.safetensors"
    coded: Tensors = {}
    for name, tensor in load_file(file).items():
        coded |= coder(name, tensor) if is_linear(name, tensor) else {name: tensor.clone()}
    save_file(coded, file, metadata={"format": "pt"})
    describe(folder, settings)


def describe(folder: Path, settings: Mapping[str, object] | None) -> None:
    """Writes a `quantization_config`, or takes it out."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("quantization_config", None)
    if settings is not None:
        config["quantization_config"] = dict(settings)
    file.write_text(json.dumps(config))


FP8_SETTINGS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(FP8_BLOCK)}
NF4_SETTINGS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8_SETTINGS = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def gpt_oss_config(vocabulary: int = 67, **changes: Any) -> GptOssConfig:
    """A tiny gpt-oss, with an expert's matrices of more than one group."""
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "sliding_window": 8,
        "pad_token_id": None,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return GptOssConfig(**{**sizes, **changes})


def save_mxfp4(folder: Path, config: GptOssConfig | None = None) -> None:
    """A tiny gpt-oss whose experts are in MXFP4, as published."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config or gpt_oss_config(), dtype=torch.bfloat16).save_pretrained(folder)
    generator = torch.Generator().manual_seed(2)
    file = folder / "model.safetensors"
    coded: Tensors = {}
    for name, tensor in load_file(file).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            shape = (experts, rows, columns // 32)
            coded[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            coded[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
        else:
            coded[name] = tensor.clone()
    save_file(coded, file, metadata={"format": "pt"})
    describe(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})


def by_transformers(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model as transformers itself dequantises it while loading."""
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    how = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}[method](dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=how).eval()
    for parameter in model.parameters():  # beside weights in FP8 it leaves others in the dtype on disk
        parameter.data = parameter.data.to(dtype)
    return model
