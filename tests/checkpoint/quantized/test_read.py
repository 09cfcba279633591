"""Quantised weights are read as the values that transformers makes of them, by as much as a rank needs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from shardtune.checkpoint import safetensors_file
from shardtune.checkpoint.hf_load import load_weights, save_pretrained
from shardtune.checkpoint.quantized import tensor as tensors_read
from shardtune.checkpoint.quantized.read import dequantized_weights
from shardtune.checkpoint.quantized.scheme import CONVERTERS, METHODS
from shardtune.checkpoint.quantized.tensor import DequantizedTensor
from shardtune.config import ModelConfig
from shardtune.errors import ModelError
from shardtune.models.lora.nf4 import BLOCK, BLOCK_BYTES, CODE_BYTES, LEVELS, NF4Linear, to_nf4
from shardtune.models.pretrained import load_config
from tests.support import quantized
from tests.support import tiny_checkpoint as tiny
from tests.support.dist.ranks import run_ranks

CODERS = {
    "fp8": (quantized.fp8, quantized.FP8_SETTINGS),
    "nf4": (quantized.nf4, quantized.NF4_SETTINGS),
    "nested": (lambda name, weight: quantized.nf4(name, weight, nested=True), quantized.NF4_SETTINGS),
    "int8": (quantized.int8, quantized.INT8_SETTINGS),
}
PLAIN = PreTrainedConfig()


def save(form: str, folder: Path, kind: str = "llama") -> None:
    """A tiny checkpoint in one of the formats."""
    if form == "mxfp4":
        quantized.save_mxfp4(folder)
    else:
        tiny.saved(kind, folder, torch.bfloat16)
        quantized.recode(folder, *CODERS[form])


def empty(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny.empty(load_config(ModelConfig(model_path=str(folder))), dtype)


def differing(model: PreTrainedModel, reference: PreTrainedModel) -> list[str]:
    ours, theirs = model.state_dict(), reference.state_dict()
    assert ours.keys() == theirs.keys()
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in ours.items()}
    return [
        name for name in ours if whole[name].dtype != theirs[name].dtype or not torch.equal(whole[name], theirs[name])
    ]


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("form", "kind", "dtype", "told"),
    [
        ("fp8", "llama", torch.float32, "14 in FP8 with blocks of 4 x 4"),
        ("fp8", "qwen3_moe", torch.bfloat16, "38 in FP8 with blocks of 4 x 4"),
        ("mxfp4", "", torch.bfloat16, "4 in MXFP4"),
        ("mxfp4", "", torch.float64, "4 in MXFP4"),
    ],
)
def test_weights_are_those_of_transformers_and_are_saved_plain(
    tmp_path: Path, form: str, kind: str, dtype: torch.dtype, told: str
) -> None:
    save(form, tmp_path / "in", kind)
    reference = quantized.by_transformers(tmp_path / "in", dtype)
    model = empty(tmp_path / "in", dtype)
    report = load_weights(model, tmp_path / "in", dtype=dtype)
    assert differing(model, reference) == []
    assert len(report.notes) == 1
    assert told in report.notes[0]
    assert report.unexpected == ()
    save_pretrained(model, tmp_path / "out", dtype=torch.bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for parameter in reference.parameters():
        parameter.data = parameter.data.bfloat16()
    assert differing(again, reference) == []


@pytest.mark.parametrize("form", ["nf4", "nested", "int8"])
def test_weights_of_bitsandbytes_are_level_times_scale(tmp_path: Path, form: str) -> None:
    save(form, tmp_path)
    on_disk = load_file(tmp_path / "model.safetensors")
    model = empty(tmp_path)
    load_weights(model, tmp_path, dtype=torch.float32)
    for name in (name for name, tensor in on_disk.items() if tensor.dtype in (torch.int8, torch.uint8)):
        if not name.endswith(".weight"):
            continue
        assert torch.equal(model.get_parameter(name), values_of(on_disk, name)), name
    assert torch.equal(model.lm_head.weight, on_disk["lm_head.weight"].float())


def values_of(on_disk: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The values of a matrix of bitsandbytes, whole; four bits are rounded to the dtype that it was made from."""
    codes = on_disk[name]
    if codes.dtype == torch.int8:
        return codes * on_disk[name.removesuffix("weight") + "SCB"][:, None] * 7.874015718698502e-3
    state = json.loads(bytes(on_disk[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
    scales = on_disk[f"{name}.absmax"]
    if "nested_blocksize" in state:
        largest = on_disk[f"{name}.nested_absmax"].repeat_interleave(256)[: len(scales)]
        scales = on_disk[f"{name}.nested_quant_map"][scales.int()] * largest + state["nested_offset"]
    halves = torch.cat([codes >> 4, codes & 0xF], dim=1).view(-1).int()
    count = state["shape"][0] * state["shape"][1]
    values = torch.tensor(LEVELS)[halves[:count]] * scales.repeat_interleave(BLOCK)[:count]
    return values.view(state["shape"]).bfloat16().float()


def test_weights_of_bitsandbytes_are_those_that_it_gives(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(48, 80, generator=torch.Generator().manual_seed(1)).bfloat16()
    for kind in ("nf4", "fp4"):
        codes, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=True)
        save_file(
            {"a.weight": codes, **{f"a.weight.{key}": x for key, x in state.as_dict(packed=True).items()}},
            tmp_path / "model.safetensors",
        )
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantized.NF4_SETTINGS}))
        found = dequantized_weights(tmp_path, PLAIN, torch.bfloat16)[0]["a.weight"]
        assert torch.equal(found.read(), functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize("form", ["fp8", "mxfp4", "nested", "int8"])
def test_any_part_is_that_of_the_whole_and_takes_a_buffer_alone(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(form, tmp_path)
    found = dequantized_weights(tmp_path, PLAIN)[0]
    coded = [tensor for tensor in found.values() if isinstance(tensor, DequantizedTensor)]
    whole = {tensor.name: tensor.read() for tensor in coded}
    draw, limit, held = random.Random(0), 512, list[int]()
    monkeypatch.setattr(tensors_read, "_BUFFER_BYTES", limit)
    monkeypatch.setattr(safetensors_file, "_BUFFER_BYTES", limit)
    kind = type(coded[0])
    values = kind.values

    def counted(self: Any, offsets: Any, sizes: Any) -> torch.Tensor:
        made = values(self, offsets, sizes)
        held.append((made.numel() * 4) // max(1, made[0].numel() * 4 // limit))
        return made

    monkeypatch.setattr(kind, "values", counted)
    for tensor in coded[:6]:
        for _ in range(4):
            spans = [sorted(draw.sample(range(size + 1), 2)) for size in tensor.shape]
            part = tensor.read_slice([start for start, _ in spans], [end - start for start, end in spans])
            assert torch.equal(part, whole[tensor.name][tuple(slice(*span) for span in spans)]), (tensor.name, spans)
    assert max(held) < 2 * limit


def test_blocks_at_the_edges_of_a_matrix_may_be_smaller(tmp_path: Path) -> None:
    """Where the scales would also divide the matrix evenly, too: 24 rows in blocks of 16, not twice 12."""
    weight = torch.randn(24, 20, generator=torch.Generator().manual_seed(1))
    coded = quantized.fp8("a.weight", weight, (16, 8))
    save_file(coded, tmp_path / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": [16, 8]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    scales = coded["a.weight_scale_inv"].repeat_interleave(16, 0)[:24].repeat_interleave(8, 1)[:, :20]
    found = dequantized_weights(tmp_path, PLAIN)[0]["a.weight"].read()
    assert torch.equal(found, coded["a.weight"].float() * scales)
    assert (found - weight).abs().max() < 0.04 * weight.abs().max()


def test_other_forms_of_fp8(tmp_path: Path) -> None:
    """A scale for all or for rows, exponents alone, other names, FP4 in bytes; scales of inputs are left out."""
    codes = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    packed = torch.arange(-64, 64, dtype=torch.int8).view(4, 32)
    exponents = torch.tensor([[120, 130]] * 4, dtype=torch.uint8)
    rows = torch.tensor([[1.5], [2.0], [0.25], [3.0]])
    save_file(
        {
            "all.weight": codes,
            "all.weight_scale_inv": torch.tensor(0.5),
            "all.activation_scale": torch.tensor(2.0),
            "rows.weight": codes.clone(),
            "rows.qscale_weight": rows,
            "mx.weight": codes.clone(),
            "mx.weight_scale_inv": exponents,
            "four.weight": packed,
            "four.scale": exponents.clone().view(torch.float8_e8m0fnu),
        },
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp8"}}))
    found = dequantized_weights(tmp_path, PLAIN)[0]
    assert found.keys() == {"all.weight", "rows.weight", "mx.weight", "four.weight"}
    power = (exponents.float() - 127).exp2().repeat_interleave(32, 1)
    assert torch.equal(found["all.weight"].read(), codes.float() * 0.5)
    assert torch.equal(found["rows.weight"].read(), codes.float() * rows)
    assert torch.equal(found["mx.weight"].read(), codes.float() * power)
    four = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    bits = torch.stack([packed.view(torch.uint8) & 0xF, packed.view(torch.uint8) >> 4], -1).view(4, 64).int()
    assert torch.equal(found["four.weight"].read(), torch.where(bits < 8, 1, -1) * four[bits % 8] * power)


def test_frozen_layers_keep_the_codes_of_bitsandbytes(tmp_path: Path) -> None:
    for nested in (False, True):
        folder = tmp_path / str(nested)
        config = tiny.config("llama")
        config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        quantized.recode(folder, *CODERS["nested" if nested else "nf4"])
        on_disk = load_file(folder / "model.safetensors")
        model = empty(folder).requires_grad_(False)
        to_nf4(model, {model.lm_head}, torch.float32)
        notes = load_weights(model, folder, dtype=torch.float32).notes
        assert notes[1] == "14 of 14 layers in NF4 keep the codes and scales of the checkpoint"
        for name, layer in model.named_modules():
            if not isinstance(layer, NF4Linear):
                continue
            blocks = layer.packed.view(-1, BLOCK_BYTES)
            assert torch.equal(blocks[:, :CODE_BYTES].reshape(-1, 1), on_disk[f"{name}.weight"]), name
            assert torch.equal(layer.weight.bfloat16().float(), values_of(on_disk, f"{name}.weight")), name


def on_ranks(folders: list[Path]) -> list[list[str]]:
    """What differs on this rank's model from transformers' own, by format; and that it read its part alone."""
    found = []
    for folder in folders:
        model = tiny.shard(empty(folder), 2)
        load_weights(model, folder, dtype=torch.float32)
        found.append(differing(model, quantized.by_transformers(folder, torch.float32)))
    return found


def test_two_ranks_read_what_one_does(tmp_path: Path) -> None:
    folders = [tmp_path / "fp8", tmp_path / "mxfp4"]
    save("fp8", folders[0], "qwen3_moe")
    save("mxfp4", folders[1])
    assert run_ranks(on_ranks, 2, folders) == [[[], []]] * 2


# What cannot be read.


@pytest.mark.parametrize("method", [*(name for name in CONVERTERS if name not in METHODS), "of-next-year", None])
def test_what_is_not_read_is_refused_with_what_converts_it(tmp_path: Path, method: str | None) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {"quantization_config": {"quant_method": method, "bits": 4}}})
    )
    with pytest.raises(ModelError) as caught:
        dequantized_weights(tmp_path, PLAIN)
    assert (method or "without a name") in caught.value.what
    assert str(tmp_path / "config.json") in (caught.value.where or "")
    assert CONVERTERS.get(method or "", "the tool that quantised it") in (caught.value.remedy or "")


Change = Callable[[dict[str, torch.Tensor]], object]
QUERY = "model.layers.1.self_attn.q_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.down_proj"


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def other(name: str, value: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("form", "change", "told"),
    [
        ("fp8", without(f"{QUERY}_scale_inv"), f"'{QUERY}' is stored as float8_e4m3fn, and '{QUERY}_scale_inv'"),
        ("fp8", other(f"{QUERY}_scale_inv", torch.ones(5, 4)), r"has shape \[5, 4\], which does not fit"),
        ("fp8", other(f"{QUERY}_scale_inv", torch.ones(4, 4, dtype=torch.int32)), "a scale as int32"),
        ("fp8", other(QUERY, torch.ones(16, 16)), f"'{QUERY}' is stored as float32, and yet has a scale"),
        ("mxfp4", without(f"{EXPERTS}_scales"), f"'{EXPERTS}_blocks' is stored as uint8, and '{EXPERTS}_scales'"),
        ("mxfp4", other(f"{EXPERTS}_scales", torch.ones(5, 64, 2, dtype=torch.uint8)), r"\[5, 64, 2\], which does not"),
        ("nf4", without(f"{QUERY}.absmax"), f"{QUERY}.absmax"),
        ("nf4", without(f"{QUERY}.quant_state.bitsandbytes__nf4"), "quant_state"),
        ("nf4", other(f"{QUERY}.quant_state.bitsandbytes__nf4", torch.tensor([1], dtype=torch.uint8)), "describe how"),
        ("nf4", other(f"{QUERY}.absmax", torch.ones(3)), r"has shape \[3\], which does not fit"),
        ("int8", without(f"{QUERY.removesuffix('weight')}SCB"), "SCB"),
        ("int8", other(f"{QUERY.removesuffix('weight')}weight_format", torch.tensor(2)), "layout of one kind of GPU"),
    ],
)
def test_incomplete_weights_are_refused(tmp_path: Path, form: str, change: Change, told: str) -> None:
    save(form, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ModelError, match=told) as caught:
        load_weights(empty(tmp_path), tmp_path, dtype=torch.float32)
    assert caught.value.remedy


@pytest.mark.parametrize("form", ["fp8", "mxfp4", "nf4", "int8"])
def test_codes_are_no_weights_where_config_json_does_not_describe_them(tmp_path: Path, form: str) -> None:
    save(form, tmp_path)
    quantized.describe(tmp_path, None)
    with pytest.raises(ModelError, match=r"nothing beside it gives the values|are not among the weights|has shape"):
        load_weights(empty(tmp_path), tmp_path, dtype=torch.float32)


def test_plain_weights_that_are_called_quantised_are_read_as_they_are(tmp_path: Path) -> None:
    reference = tiny.saved("llama", tmp_path)
    quantized.describe(tmp_path, quantized.FP8_SETTINGS)
    model = empty(tmp_path)
    report = load_weights(model, tmp_path, dtype=torch.float32)
    assert differing(model, reference) == []
    assert re.search("all of its tensors are plain", report.notes[0])
