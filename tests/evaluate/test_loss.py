"""Evaluation counts every row once, on any number of ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardtune import Adapter
from shardtune.batch import LossSum, Metric, Sample
from shardtune.config import load_recipe
from shardtune.errors import ModelError
from shardtune.evaluate.loss import as_metrics, summarize
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import flat_script, quiet, recipe, save_model, save_rows

EVALUATION_ROWS = 11


def evaluate(values: dict) -> dict[str, float]:
    worker = SFTWorker(load_recipe(values), report=quiet)
    worker.setup()
    return worker.run_eval()


def plain_evaluation(model: Any, rows: list) -> dict[str, float]:
    """The same metrics by one plain forward per row."""
    total = weight = correct = targets = 0.0
    with torch.no_grad():
        for input_ids, weights in rows:
            ids, of_target = torch.tensor(input_ids), torch.tensor(weights)[1:]
            logits = model(input_ids=ids[None]).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
            total += float((losses * of_target).sum())
            weight += float(of_target.sum())
            correct += float(((logits.argmax(-1) == ids[1:]) & (of_target > 0)).sum())
            targets += float((of_target > 0).sum())
    return {"loss": total / weight, "perplexity": math.exp(total / weight), "token_accuracy": correct / targets}


@pytest.mark.lengthy
def test_metrics_are_those_of_a_plain_evaluation_on_any_number_of_ranks(tmp_path) -> None:
    model = save_model("dense", tmp_path / "model")
    train = save_rows(tmp_path / "train.jsonl", 8)
    held_out = save_rows(tmp_path / "eval.jsonl", EVALUATION_ROWS, seed=9)
    values = recipe(model, train, data__eval_data_paths=str(held_out), actor__eval_micro_batch_size=2)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    wanted = plain_evaluation(plain, flat_script().read_rows(held_out, AutoTokenizer.from_pretrained(model)))
    for told in [evaluate(values), *run_ranks(evaluate, 2, values), *run_ranks(evaluate, 3, values)]:
        assert told == {f"eval/{name}": pytest.approx(value, rel=1e-10) for name, value in wanted.items()}


def test_several_terms_are_told_apart() -> None:
    sums = {"loss/ce": Metric(6.0, 3.0), "loss/router_balance": Metric(1.0, 2.0), "token_accuracy": Metric(1.0, 4.0)}
    assert "perplexity" not in summarize(sums), "a name alone does not make a term the cross-entropy of tokens"
    assert summarize(sums, "ce") == {
        "loss": 2.5,
        "loss/ce": 2.0,
        "loss/router_balance": 0.5,
        "perplexity": pytest.approx(math.exp(2.0)),
        "token_accuracy": 0.25,
    }
    assert math.isfinite(
        summarize({"loss/ce": Metric(1e6, 1.0), "token_accuracy": Metric(0.0, 1.0)}, "ce")["perplexity"]
    )


def test_metrics_of_a_model_are_pairs() -> None:
    given = {"near": (torch.tensor(3), 4), "far": Metric(1.0, 2.0)}
    assert as_metrics(given, "here") == {"near": Metric(3.0, 4.0), "far": Metric(1.0, 2.0)}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("near", torch.tensor(0.5), r"the metric 'near' is tensor\(0.5000\), not a pair \(sum, weight\)"),
        ("near", (1, 2, 3), "not a pair"),
        ("near", None, "not a pair"),
        ("near", (1, -2), "not a pair .* with a weight of 0 or more"),
        ("loss", (1.0, 2.0), "a metric is named 'loss'"),
        ("loss/near", (1.0, 2.0), "a metric is named 'loss/near'"),
        ("perplexity", (1.0, 2.0), "a metric is named 'perplexity'"),
    ],
)
def test_metrics_that_are_none(name: str, value: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        as_metrics({name: value}, "Net.metrics")


class Noisy(Adapter):
    """A denoiser, whose loss draws."""

    def build(self) -> nn.Module:
        return nn.Linear(2, 2)

    def encode(self, row: Any) -> Sample:
        return Sample(fields={"point": np.array(row["point"], np.float32)})

    def loss(self, model: nn.Module, batch: Any) -> LossSum:
        noise = torch.randn_like(batch["point"])
        return LossSum((model(batch["point"] + noise) - noise).pow(2).sum(), len(noise))


def test_a_loss_that_draws_is_measured_alike_each_time(tmp_path) -> None:
    values = {
        "actor": {"model": {"adapter": f"{__file__}:Noisy", "precision": "fp32"}},
        "data": {"num_workers": 0, "cache_dir": str(tmp_path)},
    }
    rows = [{"point": [0.1 * number, 1.0]} for number in range(7)]
    worker = SFTWorker(
        load_recipe(values, in_memory=("data.train_data_paths", "data.eval_data_paths")),
        train_data=rows,
        eval_data={"first": rows, "second": rows},
        report=quiet,
    )
    worker.setup()
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(worker.run_eval())
    assert found[0] == found[1]
    assert found[0]["eval/first/loss"] != found[0]["eval/second/loss"]


def test_a_term_that_no_row_of_the_set_has_is_no_part_of_the_loss() -> None:
    found = summarize({"loss/label": Metric(3.0, 2.0), "loss/price": Metric(0.0, 0.0)})
    assert found["loss"] == found["loss/label"] == 1.5
    assert math.isnan(found["loss/price"])
    assert math.isnan(summarize({"loss/price": Metric(0.0, 0.0)})["loss"])
