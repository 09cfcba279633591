"""Layers with a state over packed rows: by kernels that begin anew at each row, or by a call for each row."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.lfm2_moe import modeling_lfm2_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from shardtune.config import load_recipe
from shardtune.models.mixers import Mixers
from shardtune.models.packing_probe import MIXED
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.training import quiet
from tests.support.tiny_architectures import tiny_config
from tests.support.zoo import by_shardtune, changed, decoder


def convolution(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As the function of causal-conv1d: rows apart, by `seq_idx`."""
    own = inspect.unwrap(plain)

    def apart(hidden: torch.Tensor, *args: Any, seq_idx: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        lengths = [hidden.shape[-1]] if seq_idx is None else seq_idx[0].bincount().tolist()
        return torch.cat([own(row, *args, **kwargs) for row in hidden.split(lengths, dim=-1)], dim=-1)

    return apart


def recurrence(plain: Callable[..., Any]) -> Callable[..., Any]:
    """As the function of flash-linear-attention: rows apart, by `cu_seqlens`."""
    own = inspect.unwrap(plain)

    def apart(query: torch.Tensor, *args: Any, cu_seqlens: torch.Tensor | None = None, **kwargs: Any) -> Any:
        kwargs = {key: value for key, value in kwargs.items() if key in inspect.signature(own).parameters}
        lengths = [query.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
        rows = zip(*(tensor.split(lengths, dim=1) for tensor in (query, *args)), strict=True)
        gates = zip(kwargs.pop("g").split(lengths, dim=1), kwargs.pop("beta").split(lengths, dim=1), strict=True)
        outputs = [own(*row, g=g, beta=beta, **kwargs)[0] for row, (g, beta) in zip(rows, gates, strict=True)]
        return torch.cat(outputs, dim=1), None

    return apart


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("family", "module", "kernels"),
    [
        ("lfm2_moe", modeling_lfm2_moe, {"causal_conv1d_fn": convolution}),
        (
            "qwen3_next",
            modeling_qwen3_next,
            {"causal_conv1d_fn": convolution, "torch_chunk_gated_delta_rule": recurrence},
        ),
    ],
)
def test_kernels_that_keep_rows_apart_are_given_their_boundaries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, module: Any, kernels: dict[str, Any]
) -> None:
    for name, make in kernels.items():
        monkeypatch.setattr(module, name, make(getattr(module, name)))
    worker = SFTWorker(load_recipe(decoder(family, tmp_path, "fp64").values), report=quiet)
    worker.setup()
    assert worker.notes == []
    assert worker.adapter.rows_share_forwards
    worker.release()


class Mixing(nn.Module):
    """Adds up all tokens up to each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 1)

    def forward(self, hidden: torch.Tensor, places: tuple[torch.Tensor, None], **kwargs: Any) -> tuple[Any, None]:
        assert "seq_idx" not in kwargs
        return hidden.cumsum(1) + places[0], None


def test_each_row_is_computed_by_itself_until_that_is_switched_off() -> None:
    layer, cu_seqlens = Mixing(), torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    mixers, hidden = Mixers([layer]), torch.ones(1, 5, 2)
    places = (torch.arange(5.0)[None, :, None], None)
    assert mixers.pack(cu_seqlens)["seq_idx"].tolist() == [[0, 0, 0, 2, 2]]
    mixers.run_row_by_row(True)
    assert mixers.pack(cu_seqlens) == {}
    summed, nothing = layer(hidden, places=places, seq_idx=1)
    assert nothing is None
    assert summed[0, :, 0].tolist() == [1, 3, 5, 4, 6]
    mixers.whole()
    assert layer(hidden, places=places)[0][0, :, 0].tolist() == [1, 3, 5, 7, 9]
    mixers.run_row_by_row(False)
    assert "forward" not in vars(layer)


@pytest.mark.parametrize(
    ("family", "layer"), [("minimax", "MiniMaxLightningAttention"), ("qwen3_next", "Qwen3NextGatedDeltaNet")]
)
def test_linear_attention_is_found_with_a_convolution_or_without(family: str, layer: str) -> None:
    """MiniMax's has none, nor a kernel that receives where rows begin."""
    model = AutoModelForCausalLM.from_config(tiny_config(family, {}))
    mixers = Mixers.of(model)
    assert mixers.without_boundaries == (family == "minimax")
    mixers.run_row_by_row(True)
    assert {type(module).__name__ for module in model.modules() if "forward" in vars(module)} == {layer}


@pytest.mark.lengthy
def test_packed_rows_run_one_by_one_through_linear_attention_in_half_precision(tmp_path: Path) -> None:
    """Where the packing probe's tolerance would let what they leak pass."""
    values = changed(decoder("minimax", tmp_path, "fp32").values, actor={"model": {"precision": "bf16"}})
    assert any(note.endswith(MIXED) for note in by_shardtune(changed(values, runner={"max_steps": 1})).notes)


@pytest.mark.lengthy
def test_recomputation_in_the_backward_pass_has_the_same_rows(tmp_path: Path) -> None:
    values = changed(decoder("mamba", tmp_path, "fp64").values, runner={"max_steps": 2})
    plain = by_shardtune(values)
    assert plain.notes[0].endswith(MIXED)
    again = by_shardtune(changed(values, actor={"model": {"gradient_checkpointing": True}}), prepared=plain.prepared)
    assert again.numbers == pytest.approx(plain.numbers, rel=1e-12)
