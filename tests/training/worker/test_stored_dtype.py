"""An adapter's base is loaded as its files have it, where that is the dtype of the computation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardtune.checkpoint.quantized.read import holds_only
from shardtune.config import load_recipe
from shardtune.parallel import masters
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.model_state import ModelState
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import make_tokenizer, quiet, recipe, save_model, save_rows, whole
from tests.support.quantized import FP8_SETTINGS, INT8_SETTINGS, Coder, fp8, gpt_oss_config, int8, recode, save_mxfp4

LORA = {"actor__model__is_lora": True, "actor__model__precision": "bf16"}


def saved_in(dtype: torch.dtype, folder: Path, but: str = "") -> Path:
    """A model whose tensors are all of a dtype; one in whose name `but` is, in fp32 with values that bf16 lacks."""
    file = save_model("dense", folder) / "model.safetensors"
    stored = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    if but:
        (name,) = [name for name in stored if but in name]
        stored[name] = torch.full_like(stored[name], 1.001, dtype=torch.float32)
    save_file(stored, file, {"format": "pt"})
    return folder


def trained(model: Path, rows: Path, **changes: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    worker = SFTWorker(load_recipe(recipe(model, rows, runner__max_steps=3, **LORA, **changes)), report=quiet)
    worker.setup()
    losses = [worker.run_training()["train/loss"] for _ in range(3)]
    tensors = {name: tensor.detach().clone() for name, tensor in worker.weights.parameters.items()}
    worker.release()
    return losses, tensors


def test_weights_in_bf16_are_never_held_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the numbers are, bit by bit, those of a run that narrows them afterwards."""
    save_rows(rows := tmp_path / "rows.jsonl")
    model = saved_in(torch.bfloat16, tmp_path / "model")
    narrowed: list[torch.Size] = []
    fits = masters._fits
    monkeypatch.setattr(masters, "_fits", lambda tensor, dtype: narrowed.append(tensor.shape) or fits(tensor, dtype))
    losses, tensors = trained(model, rows)
    assert not narrowed
    monkeypatch.setattr(ModelState, "_stored_dtype", lambda *_: None)
    wanted, others = trained(model, rows)
    assert narrowed
    assert losses == wanted
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor, others[name]), name


@pytest.mark.parametrize("but", ["layers.0.input_layernorm", "layers.1.mlp.up_proj"])
def test_a_tensor_in_fp32_keeps_its_values(but: str, tmp_path: Path) -> None:
    save_rows(rows := tmp_path / "rows.jsonl")
    _, tensors = trained(saved_in(torch.bfloat16, tmp_path / "model", but), rows)
    (tensor,) = [tensor for name, tensor in tensors.items() if but in name and "lora" not in name]
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, torch.full_like(tensor, 1.001))


def test_new_rows_of_embeddings_and_subtracted_factors_are_not_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both change frozen weights, whose values bf16 would round."""
    save_rows(rows := tmp_path / "rows.jsonl")
    model = saved_in(torch.bfloat16, tmp_path / "model")
    for changes in (
        {"actor__model__lora": {"init": "pissa", "r": 4}},
        {"actor__tokenizer": {"new_tokens": [f"<|new {number}|>" for number in range(300)]}},  # more than spare rows
    ):
        _, tensors = trained(model, rows, **changes)
        with monkeypatch.context() as patched:
            patched.setattr(ModelState, "_stored_dtype", lambda *_: None)
            _, others = trained(model, rows, **changes)
        for name, tensor in tensors.items():
            assert tensor.dtype == others[name].dtype, name
            assert torch.equal(tensor, others[name]), name


def on_ranks(model: Path, rows: Path, changes: dict[str, Any]) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Losses and whole tensors with what is stored in bf16 held so, and with all of it held in fp32."""
    found = []
    with pytest.MonkeyPatch.context() as patched:
        for _ in range(2):
            losses, tensors = trained(model, rows, **changes)
            found.append((losses, {name: whole(tensor) for name, tensor in tensors.items()}))
            patched.setattr(ModelState, "_stored_dtype", lambda *_: None)
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"actor__training_backend": "fsdp1"}, marks=pytest.mark.slow),
        pytest.param({"actor__fsdp_config__cpu_offload": True}, marks=pytest.mark.slow),
        pytest.param({"actor__parallel__tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_shards_in_bf16_give_the_bits_of_shards_in_fp32(changes: dict[str, Any], tmp_path: Path) -> None:
    """Which every forward gathers in bf16."""
    save_rows(rows := tmp_path / "rows.jsonl")
    model = saved_in(torch.bfloat16, tmp_path / "model")
    for (losses, tensors), (wanted, others) in run_ranks(on_ranks, 2, model, rows, changes):
        assert losses == wanted
        for name, other in others.items():
            assert other.dtype == torch.float32
            assert tensors[name].dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name
            assert torch.equal(tensors[name].float(), other), name


@pytest.mark.slow
def test_a_tensor_in_fp32_keeps_the_shards_of_all_in_fp32(tmp_path: Path) -> None:
    save_rows(rows := tmp_path / "rows.jsonl")
    model = saved_in(torch.bfloat16, tmp_path / "model", "layers.0.input_layernorm")
    for (losses, tensors), (wanted, others) in run_ranks(on_ranks, 2, model, rows, {}):
        assert losses == wanted
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
        assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


def test_experts_in_mxfp4_are_held_in_bf16(tmp_path: Path) -> None:
    """Four bits and an exponent of two: nothing is rounded."""
    save_rows(rows := tmp_path / "rows.jsonl")
    save_mxfp4(model := tmp_path / "model", gpt_oss_config(300))
    make_tokenizer().save_pretrained(model)
    assert holds_only(model, torch.bfloat16)
    assert not holds_only(model, torch.float16)
    (losses, tensors), (wanted, others) = on_ranks(model, rows, {})
    assert losses == wanted
    experts = [name for name in tensors if name.endswith("experts.gate_up_proj")]
    assert experts
    assert all(tensors[name].dtype == torch.bfloat16 for name in experts)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


@pytest.mark.parametrize(("coder", "settings"), [(fp8, FP8_SETTINGS), (int8, INT8_SETTINGS)])
def test_other_codes_are_not(coder: Coder, settings: dict[str, object], tmp_path: Path) -> None:
    """Of eight bits and a scale in fp32."""
    recode(model := saved_in(torch.bfloat16, tmp_path / "model"), coder, settings)
    assert not holds_only(model, torch.bfloat16)


def test_codes_beside_scales_in_bf16_are_not(tmp_path: Path) -> None:
    """Products of them have more digits; only those of MXFP4 with powers of two have not."""
    tensors = {"a.weight": torch.ones(4, 4, dtype=torch.uint8), "a.weight_scale": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert not holds_only(tmp_path, torch.bfloat16)
    for method, fits in (("fp8", False), ("mxfp4", True)):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
        assert holds_only(tmp_path, torch.bfloat16) == fits
