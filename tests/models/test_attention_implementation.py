"""An attention that transformers cannot load is refused at once; FlashAttention 3 keeps packed rows apart."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import modeling_flash_attention_utils as flash

from shardtune.config import load_recipe
from shardtune.errors import ConfigError
from shardtune.models.attention_implementation import check_attention, takes_boundaries
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.training import quiet, recipe, save_model, save_rows

FA3 = "flash_attention_3"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (FA3, "flash_attn_interface"),
        ("flash_attention_2", "flash-attn"),
        ("kernels-community/vllm-flash-attn3", "is not installed"),
        ("sdpaa", "did you mean sdpa"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_a_model_is_built(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        check_attention(name)
    assert f"actor.model.attn_implementation: {name} cannot be used" in str(refused.value)


def test_half_precision_alone(tmp_path: Path) -> None:
    values = recipe(tmp_path, tmp_path / "rows.jsonl", actor__model__attn_implementation=FA3)
    with pytest.raises(ConfigError, match="computes in half precision alone"):
        load_recipe(values)


def stand_in(calls: list[list[int]]) -> ModuleType:
    """The package's interface, computed by SDPA document by document; the boundaries of each call are kept."""
    module = ModuleType("flash_attn_interface")

    def flash_attn_varlen_func(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:  # fmt: skip
        calls.append(cu_seqlens_q.tolist())
        lengths = cu_seqlens_q.diff().tolist()
        assert max_seqlen_q == max_seqlen_k == max(lengths)
        made = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in document), is_causal=causal, scale=softmax_scale, enable_gqa=True
            )[0].transpose(0, 1)
            for document in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        ]
        return torch.cat(made)

    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> torch.Tensor:
        raise AssertionError("packed rows need their boundaries")

    for function in (flash_attn_varlen_func, flash_attn_func):
        setattr(module, function.__name__, function)
    module.flash_attn_with_kvcache = None  # type: ignore[attr-defined]
    return module


@pytest.mark.lengthy
def test_flash_attention_3_gets_the_boundaries_of_packed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []
    here = {"general_availability_check": lambda: True, "supported_devices": ((lambda: True, "cpu"),)}
    entry = {**flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX[3], **here}
    monkeypatch.setitem(flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX, 3, entry)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", stand_in(calls))
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    model = save_model("dense", tmp_path / "model")
    rows = save_rows(tmp_path / "rows.jsonl", 16)
    losses = {}
    for name in ("auto", FA3):
        changes: dict[str, Any] = {"actor__model__attn_implementation": name, "actor__model__precision": "bf16"}
        changes["actor__fill_micro_batches"] = False
        worker = SFTWorker(load_recipe(recipe(model, rows, runner__max_steps=2, **changes)), report=quiet)
        worker.setup()
        assert not any("one row" in note or "of one length" in note for note in worker.notes)
        calls.clear()
        losses[name] = [worker.run_training()["train/loss"] for _ in range(2)]
        worker.release()
    assert {len(boundaries) for boundaries in calls} == {9}  # eight rows are packed
    torch.testing.assert_close(torch.tensor(losses[FA3]), torch.tensor(losses["auto"]), rtol=0.01, atol=0)


def test_names_of_the_hub_take_boundaries_too() -> None:
    names = {FA3: True, "kernels-community/vllm-flash-attn3": True, "kernels-community/paged": True, "sdpa": False}
    assert {name: takes_boundaries(name) for name in names} == names
