"""Weights of compressed-tensors are read as that library decompresses them, whole and in parts, or refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils.quantization_config import CompressedTensorsConfig

from shardtune.checkpoint.hf_load import load_weights
from shardtune.checkpoint.quantized.read import dequantized_weights
from shardtune.config import ModelConfig
from shardtune.errors import ModelError
from shardtune.models.pretrained import load_config
from tests.support import quantized
from tests.support import tiny_checkpoint as tiny

ROWS, COLUMNS = 24, 80
INT8: dict[str, Any] = {"num_bits": 8, "type": "int"}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
WAYS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "int8 by row": ("naive-quantized", {**INT8, "strategy": "channel"}, (ROWS, 1)),
    "int8 by row with zeros": ("int-quantized", {**INT8, "strategy": "channel", "symmetric": False}, (ROWS, 1)),
    "fp8 as one": ("float-quantized", {**FP8, "strategy": "tensor"}, (1,)),
    "fp8 by row": ("float-quantized", {**FP8, "strategy": "channel"}, (ROWS, 1)),
    "fp8 in blocks": ("float-quantized", {**FP8, "strategy": "block", "block_structure": [10, 32]}, (3, 3)),
    "4 bits in groups": ("pack-quantized", {**INT4, "strategy": "group", "group_size": 16}, (ROWS, 5)),
    "4 bits with zeros": (
        "pack-quantized", {**INT4, "strategy": "group", "group_size": 16, "symmetric": False}, (ROWS, 5),
    ),
    "8 bits by row with zeros": ("pack-quantized", {**INT8, "strategy": "channel", "symmetric": False}, (ROWS, 1)),
}  # fmt: skip


def settings(form: str, weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    made = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {**made, "config_groups": groups, "ignore": ["lm_head"], **changes}


def coded(form: str, weights: dict[str, Any], blocks: tuple[int, ...], weight: torch.Tensor) -> tuple[Any, Any]:
    """The tensors of a weight by the library, and the values that it makes of them."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    schemes = pytest.importorskip("compressed_tensors.quantization")
    scheme = schemes.QuantizationScheme(targets=["Linear"], weights=schemes.QuantizationArgs(**weights))
    largest = 448 if weights["type"] == "float" else 2 ** (weights["num_bits"] - 1) - 1
    scale = (torch.rand(blocks) + 1).mul(2 / largest).bfloat16()
    zero = torch.randint(-3, 4, blocks, dtype=torch.int8)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(
        state if not weights.get("symmetric", True) else {**state, "weight_zero_point": None}, scheme
    )
    stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
    return stored, compressor.decompress(stored, scheme)["weight"]


@pytest.mark.parametrize("way", WAYS)
def test_values_are_those_of_the_library(tmp_path: Path, way: str) -> None:
    torch.manual_seed(0)
    form, weights, blocks = WAYS[way]
    stored, values = coded(form, weights, blocks, torch.randn(ROWS, COLUMNS).bfloat16())
    save_file(
        {**{f"a.{name}": tensor.contiguous() for name, tensor in stored.items()}, "a.input_scale": torch.ones(1)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings(form, weights)}))
    for dtype in (torch.bfloat16, torch.float32):
        found = dequantized_weights(tmp_path, PreTrainedConfig(), dtype)[0]
        assert list(found) == ["a.weight"]
        assert torch.equal(found["a.weight"].read(), values.to(dtype))
        draw = random.Random(0)
        for _ in range(20):
            row, column = draw.randrange(ROWS), draw.randrange(COLUMNS)
            rows, columns = draw.randint(0, ROWS - row), draw.randint(0, COLUMNS - column)
            part = found["a.weight"].read_slice((row, column), (rows, columns))
            assert torch.equal(part, values[row:][:rows, column:][:, :columns].to(dtype))


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_model_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    form, weights, _ = WAYS["4 bits in groups"]
    weights = {**weights, "group_size": 4}

    def coder(name: str, weight: torch.Tensor) -> quantized.Tensors:
        blocks = (weight.shape[0], weight.shape[1] // 4)
        made = coded(form, weights, blocks, weight)[0]
        return {f"{name.removesuffix('weight')}{key}": tensor for key, tensor in made.items()}

    tiny.saved(kind, tmp_path, torch.bfloat16)
    quantized.recode(tmp_path, coder, settings(form, weights))
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    model = tiny.empty(load_config(ModelConfig(model_path=str(tmp_path))), torch.bfloat16)
    report = load_weights(model, tmp_path, dtype=torch.bfloat16)
    assert "packed 4 bits of compressed-tensors" in report.notes[0]
    assert report.unexpected == ()
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": "nvfp4-pack-quantized"}, "in the format nvfp4-pack-quantized"),
        ({"config_groups": {}}, "in the format of no group"),
        ({"quantization_status": "frozen"}, "but not compressed"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "and sparse"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "with transforms"),
    ],
)
def test_other_forms_are_refused_with_what_converts_them(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    save_file({"a.weight": torch.ones(8, 8)}, tmp_path / "model.safetensors")
    described = settings("pack-quantized", {**INT4, "strategy": "channel"}, **changes)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": described}))
    with pytest.raises(ModelError, match=f"compressed-tensors {told}.*") as caught:
        dequantized_weights(tmp_path, PreTrainedConfig())
    assert "CompressedTensorsDequantizer" in (caught.value.remedy or "")


@pytest.mark.parametrize(
    ("bits", "further", "told"), [(3, {}, "other than 4 or 8 bits"), (4, {"a.weight_g_idx": torch.arange(80)}, "g_idx")]
)
def test_codes_in_another_order_or_across_words_are_refused(
    tmp_path: Path, bits: int, further: dict[str, torch.Tensor], told: str
) -> None:
    tensors = {
        "a.weight_packed": torch.zeros(ROWS, -(-COLUMNS * bits // 32), dtype=torch.int32),
        "a.weight_scale": torch.ones(ROWS, 1),
        "a.weight_shape": torch.tensor([ROWS, COLUMNS]),
        **further,
    }
    save_file(tensors, tmp_path / "model.safetensors")
    described = settings("pack-quantized", {**INT4, "num_bits": bits, "strategy": "channel"})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": described}))
    with pytest.raises(ModelError, match=told):
        dequantized_weights(tmp_path, PreTrainedConfig())
