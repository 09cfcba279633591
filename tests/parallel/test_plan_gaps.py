"""Plans of transformers that leave something out of a layer, or take too much of it: the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from shardtune.parallel.plan_gaps import PARTIAL, without_gaps
from tests.support.chosen import slow_except
from tests.support.dist.parity import distance
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import make_tokenizer, recipe, run_recipe, run_recipes, save_rows
from tests.support.tiny_architectures import DECODERS, shake, tiny_config

WITHIN = 1e-6
"""Some of these models compute norms and positions in float32."""
FAMILIES = ("apertus", "gemma3n_text", "deepseek_v2", "llama4_text")


def made(family: str) -> Any:
    return AutoModelForCausalLM.from_config(tiny_config(family, DECODERS.get(family, {})))


def test_weights_of_an_activation_between_cut_matrices_have_gradients_in_parts() -> None:
    model = made("apertus")
    added = without_gaps(model, model.tp_plan).items() - model.tp_plan.items()
    assert added == {(f"model.layers.*.mlp.act_fn.alpha_{sign}", PARTIAL) for sign in "np"}


def test_a_layer_that_keeps_its_largest_features_is_computed_whole() -> None:
    model = made("gemma3n_text")
    left_out = model.tp_plan.keys() - without_gaps(model, model.tp_plan).keys()
    assert left_out == {f"model.layers.*.mlp.{part}_proj" for part in ("gate", "up", "down")}
    for module in model.modules():
        if isinstance(module, Gemma3nTextMLP):
            module.activation_sparsity = 0.0
    assert without_gaps(model, model.tp_plan) == model.tp_plan


@pytest.mark.lengthy
@pytest.mark.parametrize("family", slow_except(FAMILIES, "apertus"))
def test_families_whose_plans_have_gaps_are_shared_exactly(family: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = made(family).double()
    with torch.no_grad():
        shake(model)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    settings = {"runner__max_steps": 2, "actor__micro_batch_size": 2, "actor__optim__lr": 1e-3}
    values = recipe(tmp_path / "model", save_rows(tmp_path / "rows.jsonl", 9, longest=24), **settings)
    alone = run_recipe(values)
    values["actor"]["parallel"] = {"tensor": 2}
    (shared,) = run_ranks(run_recipes, 2, [values])[0]
    apart = distance(shared, alone)
    assert max(apart.loss, apart.norm, apart.gradient) < WITHIN, apart
