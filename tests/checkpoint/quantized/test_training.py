"""Training from quantised checkpoints is plain PyTorch's from the values that transformers makes of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import quantized
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import Trace, make_tokenizer, recipe, run_flat, run_recipe, save_model, save_rows

STEPS = 3


def checkpoints(folder: Path) -> tuple[Path, Path]:
    """A checkpoint in FP8, and what transformers makes of it, as a plain one."""
    coded = save_model("dense", folder / "coded", torch.bfloat16)
    quantized.recode(coded, quantized.fp8, quantized.FP8_SETTINGS)
    values = quantized.by_transformers(coded, torch.float64)
    plain = AutoModelForCausalLM.from_config(values.config, dtype=torch.float64)
    plain.load_state_dict(values.state_dict())  # `values` itself would be saved in FP8 again
    plain.save_pretrained(folder / "plain")
    make_tokenizer().save_pretrained(folder / "plain")
    return coded, folder / "plain"


def largest_gap(one: Trace, other: Trace) -> float:
    gaps = [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    shared = one.weights.keys() & other.weights.keys()
    assert shared
    return max(*gaps, *(float((one.weights[name] - other.weights[name]).abs().max()) for name in shared))


@pytest.mark.lengthy
@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_and_weights_are_those_of_a_plain_loop_over_the_values(tmp_path: Path, ranks: int) -> None:
    coded, plain = checkpoints(tmp_path)
    rows = save_rows(tmp_path / "rows.jsonl", 16)
    keys = {"runner__max_steps": STEPS, "actor__micro_batch_size": 2 if ranks == 2 else 4}
    values = recipe(coded, rows, **keys)
    found = run_recipe(values) if ranks == 1 else run_ranks(run_recipe, ranks, values)[0]
    expected = run_flat(plain, rows, precision="fp64", steps=STEPS)
    assert len(found.losses) == STEPS
    assert all(math.isfinite(loss) for loss in found.losses)
    assert largest_gap(found, expected) < 1e-10
    assert any("in FP8" in note for note in found.notes)


@pytest.mark.lengthy
def test_lora_over_a_quantised_base_is_lora_over_its_values(tmp_path: Path) -> None:
    coded, plain = checkpoints(tmp_path)
    rows = save_rows(tmp_path / "rows.jsonl", 8)
    keys = {"runner__max_steps": 2, "actor__model__is_lora": True, "actor__micro_batch_size": 4}
    one, other = (run_recipe(recipe(path, rows, **keys)) for path in (coded, plain))
    assert one.losses == other.losses
    assert largest_gap(one, other) == 0.0
