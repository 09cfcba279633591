"""Linear layers in FP8, by torchao's emulation on a CPU; `make test-fast-parts` installs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardtune
from shardtune.config.schema import Fp8Config, ModelConfig
from shardtune.errors import ConfigError
from shardtune.models.fast_parts.start import FP8_BOUND, FastParts
from tests.models.fast_parts.test_replacement import ALONE, TOKENS, tiny
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import Trace, recipe, run_recipe, save_model, save_rows
from tests.support.tiny_run import Tiny, assert_same_tensors, make_tiny

pytest.importorskip("torchao")
pytestmark = pytest.mark.lengthy

BY_TOKEN = "rowwise_with_gw_hp"
FP8: dict[str, Any] = {"actor__model__fp8__scaling": BY_TOKEN, "actor__model__fp8__emulate": True}


def converted(model: Any, scaling: Any, exclude: list[str] | None = None) -> tuple[FastParts, list[str]]:
    config = ModelConfig(fp8=Fp8Config(scaling=scaling, exclude=exclude or [], emulate=True))
    found = FastParts(model, config)
    with torch.no_grad():
        return found, found.start(lambda: model(TOKENS), ALONE, model.dtype)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", BY_TOKEN])
def test_the_error_is_that_of_rounding(scaling: str) -> None:
    model = tiny("qwen3", torch.bfloat16)
    found, notes = converted(model, scaling)
    errors = [one.errors[0] for one in found._layers]
    assert len(errors) == 14
    assert all(0.005 < error < FP8_BOUND for error in errors)
    assert "not in FP8: the head (lm_head)" in notes[0]
    assert (len(notes) == 1) == (scaling == BY_TOKEN)


def test_layers_that_are_left_out() -> None:
    model = tiny("qwen3")
    model.model.layers[0].mlp.gate_proj = torch.nn.Linear(32, 60, bias=False)
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(32, 60, bias=False)
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(60, 32, bias=False)
    found, notes = converted(model, BY_TOKEN, [r"v_proj$"])
    assert len(found._layers) == 14 - 3 - 2
    assert "sizes that 16 does not divide (model.layers.*.mlp.gate_proj," in notes[0]
    assert "excluded (model.layers.*.self_attn.v_proj)" in notes[0]
    with pytest.raises(ConfigError, match="the pattern w_proj matches no linear layer"):
        converted(tiny("qwen3"), BY_TOKEN, ["w_proj"])


def test_a_row_is_rounded_by_itself() -> None:
    """With scales of single tokens another row in the forward changes nothing."""
    model = tiny("qwen3")
    converted(model, BY_TOKEN)
    layer = model.model.layers[0].mlp.up_proj
    row, other = torch.randn(5, 32), 100 * torch.randn(3, 32)
    assert torch.equal(layer(torch.cat([row, other]))[:5], layer(row))


def run(values: dict[str, Any]) -> Trace:
    return run_recipe(values)


def test_ranks_and_micro_batches_do_not_matter(tmp_path: Path) -> None:
    """Two ranks with two micro-batches each, in fp64 with operands in FP8: the same losses, norms and weights."""
    model = save_model("dense", tmp_path / "model")
    rows = save_rows(tmp_path / "rows.jsonl")
    values = recipe(model, rows, runner__max_steps=6, **FP8)
    alone = run(values)
    halves = recipe(model, rows, runner__max_steps=6, actor__micro_batch_size=2, **FP8)
    both = run_ranks(run, 2, halves)[0]
    assert any(note.startswith("fp8: 14 linear layers") for note in alone.notes)
    plain = run(recipe(model, rows, runner__max_steps=6))
    assert max(abs(one - own) for one, own in zip(alone.losses, plain.losses, strict=True)) > 1e-5
    torch.testing.assert_close(torch.tensor(both.losses), torch.tensor(alone.losses), rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.tensor(both.norms), torch.tensor(alone.norms), rtol=1e-5, atol=0)
    for name, weight in alone.weights.items():
        torch.testing.assert_close(both.weights[name], weight, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


BF16: dict[str, Any] = {
    **FP8,
    "actor__model__precision": "bf16",
    "actor__optim__lr_scheduler": "constant",
    "runner__max_epochs": -1,
}


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_resumes_bitwise_and_exports_plain_weights(tiny_run: Tiny, lora: bool) -> None:
    changes = {**BF16, "actor__model__is_lora": lora}
    whole = shardtune.train(tiny_run.recipe(f"whole-{lora}", **changes, runner__max_steps=4))
    shardtune.train(tiny_run.recipe(f"parts-{lora}", **changes, runner__max_steps=2))
    parts = shardtune.train(tiny_run.recipe(f"parts-{lora}", **changes, runner__max_steps=4))
    assert_same_tensors(*(run.dir / "checkpoints" / "global_step_4" for run in (whole, parts)))
    final = load_file(whole.dir / "final" / ("adapter_model.safetensors" if lora else "model.safetensors"))
    assert {tensor.dtype for tensor in final.values()} == {torch.float32}  # as the base has it
    if not lora:
        assert "quantization_config" not in json.loads((whole.dir / "final" / "config.json").read_text())
        assert final.keys() == load_file(tiny_run.folder / "model" / "model.safetensors").keys()
