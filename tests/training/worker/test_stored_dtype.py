"""A process alone loads an adapter's base as its files have it, where that is the dtype of the computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardtune.config import load_recipe
from shardtune.parallel import fsdp2
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.model_state import ModelState
from tests.support.dist.training import quiet, recipe, save_model, save_rows

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
    fits = fsdp2._fits
    monkeypatch.setattr(fsdp2, "_fits", lambda tensor, dtype: narrowed.append(tensor.shape) or fits(tensor, dtype))
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
