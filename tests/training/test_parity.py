"""The numbers of shardtune are those of the flat script, however rows are cut; `bench/parity.py` is the long form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardtune.config import load_recipe
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.chosen import chosen, slow_except
from tests.support.dist.parity import EXACT, LAYOUTS, ROUNDED, ROUNDED_WEIGHTS, Case, Comparison, distance
from tests.support.dist.training import quiet, recipe

# Gemma's norms compute in fp32 whatever the model's dtype, so fp64 proves nothing there.
# On four ranks: tests/parallel/test_layouts.py.
FP64 = [
    *(Case(*layout) for layout in LAYOUTS),
    *(Case(2, 4, kind=kind, filled=kind != "mistral") for kind in ("mixtral", "qwen3_moe", "mistral")),
    Case(1, 8, filled=True),
]
FP32 = [
    *(Case(*layout, precision="fp32", optimizer="SGD") for layout in ((1, 8), (2, 4))),
    Case(2, 4, kind="gemma", precision="fp32", optimizer="SGD"),
]
BF16 = [Case(*layout, precision="bf16") for layout in ((1, 8), (2, 4))]
KINDS = ("dense", "mixtral", "qwen3_moe", "gemma", "mistral")


def most(cases: Sequence[Case], *others: Case) -> list[Any]:
    """The others are slow."""
    return slow_except(cases, *(case for case in cases if case not in others))


@pytest.fixture(scope="module")
def comparison(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Of five steps; the third has the one row that is left of an epoch."""
    made = Comparison(tmp_path_factory.mktemp("parity"), steps=5, rows=17)
    made.run(chosen(request, "case"))
    return made


@pytest.mark.lengthy
@pytest.mark.parametrize("case", most(FP64, Case(4, 2)), ids=str)
def test_fp64_is_exact(comparison: Comparison, case: Case) -> None:
    flat = comparison.flat(case.kind, case.precision, case.optimizer)
    assert min(flat.norms) > 0.5, "the clip must be active"
    apart = comparison.distance(case)
    assert max(apart.loss, apart.norm, apart.gradient, apart.weight) < EXACT, apart


def test_documents_that_fill_micro_batches_change_only_rounding(comparison: Comparison) -> None:
    apart = distance(comparison.traces[Case(1, 8, filled=True)], comparison.traces[Case(1, 8)])
    assert max(apart.loss, apart.norm, apart.gradient, apart.weight) < 1e-12, apart


@pytest.mark.parametrize("case", most(FP32, Case(1, 8, precision="fp32", optimizer="SGD")), ids=str)
def test_fp32_differs_by_rounding(comparison: Comparison, case: Case) -> None:
    apart = comparison.distance(case)
    assert max(apart.loss, apart.norm) < ROUNDED, apart
    assert apart.weight < ROUNDED_WEIGHTS, apart


@pytest.mark.parametrize("case", most(BF16, Case(1, 8, precision="bf16")), ids=str)
def test_bf16_is_as_far_from_the_truth_as_the_flat_script(comparison: Comparison, case: Case) -> None:
    own, flat = comparison.bf16_error(case)
    assert own < 1.5 * flat


def test_every_kind_trains_on_packed_rows(comparison: Comparison) -> None:
    notes = {case.kind: trace.notes for case, trace in comparison.traces.items()}
    assert notes == {kind: [] for kind in KINDS}


def test_the_loss_falls(comparison: Comparison) -> None:
    losses = comparison.traces[Case(1, 8)].losses
    assert sum(losses[-2:]) < 0.8 * sum(losses[:2])


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_loads_and_gives_the_same_logits_bitwise(comparison: Comparison, kind: str, tmp_path) -> None:
    values = recipe(comparison.model(kind), comparison.rows, actor__model__precision="fp32", runner__max_steps=2)
    worker = SFTWorker(load_recipe(values), report=quiet)
    worker.setup()
    while not worker.finished:
        worker.run_training()
    worker.export(tmp_path / "fp32", "fp32")
    worker.export(tmp_path / "bf16", "bf16")
    trained = worker.inner_model.eval()
    worker.adapter.sharing.one_row_per_forward(trained)
    input_ids = torch.arange(30)[None] * 7 % 250
    for dtype, folder in ((torch.float32, tmp_path / "fp32"), (torch.bfloat16, tmp_path / "bf16")):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
        for parameter in trained.parameters():
            parameter.data = parameter.data.to(dtype)
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=input_ids).logits, trained(input_ids=input_ids).logits)
