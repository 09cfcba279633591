"""The loss of a user's adapter is tried on two rows before training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import shardtune
from shardtune.errors import ModelError
from tests.support.tiny_run import lines, train_on_ranks

pytestmark = pytest.mark.lengthy

CODE = """\
import random
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from shardtune import Adapter, LossSum, Sample, WholeStepAdapter


class Sum(Adapter):
    calls = 0

    def build(self):
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))

    def encode(self, row):
        x = np.array([row["x"], 1 - row["x"]], np.float32)
        return Sample(fields={"x": x, "y": np.array([row["y"]], np.float32)})

    def loss(self, model, batch):
        self.calls += 1
        return LossSum(self.total(model, batch), len(batch["x"]))

    def total(self, model, batch):
        return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum")


class Mean(Sum):
    def total(self, model, batch):
        return F.mse_loss(model(batch["x"]), batch["y"])


class Penalty(Sum):
    def total(self, model, batch):
        return super().total(model, batch) + 3.0


class Numpy(Sum):
    def total(self, model, batch):
        return F.mse_loss(model(batch["x"] + 0.01 * np.random.randn()), batch["y"], reduction="sum")


class OwnGenerator(Sum):
    draws = random.Random(0)

    def total(self, model, batch):
        return F.mse_loss(model(batch["x"] + 0.01 * self.draws.random()), batch["y"], reduction="sum")


class Stateful(Sum):
    def total(self, model, batch):
        return super().total(model, batch) * (1 + 0.001 * self.calls)


class Drawn(Sum):
    def total(self, model, batch):
        return F.mse_loss(model(batch["x"] + torch.randn_like(batch["x"])), batch["y"], reduction="sum")


class DrawnInCollate(Sum):
    def collate(self, samples, rows, weights):
        batch = super().collate(samples, rows, weights)
        x = batch["x"]
        return replace(batch, fields={**batch.fields, "x": x + torch.randn_like(x) * np.random.rand()})


class OfRows(Sum):
    def total(self, model, batch):
        return F.mse_loss(model(batch["x"] + batch.randn_like("noise", batch["x"])), batch["y"], reduction="sum")


class Measured(Sum):
    def metrics(self, model, batch):
        errors = (model(batch["x"]) - batch["y"]).abs()
        return {"error": (float(errors.sum()), len(errors))}


class MeanMetric(Sum):
    def metrics(self, model, batch):
        return {"error": (float((model(batch["x"]) - batch["y"]).abs().mean()), 1)}


class NoPair(Sum):
    def metrics(self, model, batch):
        return {"error": float((model(batch["x"]) - batch["y"]).abs().mean())}


class Layer(Sum):
    def total(self, model, batch):
        layer = nn.Linear(1, 1, dtype=batch["x"].dtype)
        return F.mse_loss(layer(model(batch["x"])), batch["y"], reduction="sum")


class InPlace(Sum):
    def total(self, model, batch):
        batch["x"].mul_(2)
        return super().total(model, batch)


class Normed(Sum):
    def total(self, model, batch):
        scaled = nn.LayerNorm(2)(batch["x"])
        return F.mse_loss(model(batch["x"]), batch["y"] + 0 * scaled.sum(), reduction="sum")


class Terms(Sum):
    def weights(self, sample):
        return {"all": 1.0, "high": float(sample.fields["y"][0] > 3)}

    def loss(self, model, batch):
        high = batch["y"][:, 0] > 3
        errors = (model(batch["x"]) - batch["y"])[:, 0].square()
        found = {"all": LossSum(errors.sum(), len(errors))}
        return found | ({"high": LossSum(errors[high].sum(), int(high.sum()))} if len(errors) > 1 else {})


class Broken(Sum):
    def total(self, model, batch):
        total = super().total(model, batch)
        if not torch.is_grad_enabled():
            raise ZeroDivisionError("as what needs a gradient in the loss")
        return total
"""


def recipe(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    (folder / "own.py").write_text(CODE)
    rows = [{"x": number / 8, "y": number / 3 + 1} for number in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    logger = {"log_path": str(folder / "runs"), "experiment_name": "run", "logger_backends": ["jsonl"]}
    return {
        "runner": {"logger": logger, "overwrite": True},
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "model": {"adapter": f"{folder}/own.py:{name}", "precision": "fp32"},
        "data": {"train_data_paths": str(folder / "rows.jsonl"), "cache_dir": str(folder / "cache")},
        **changes,
    }


def with_evaluation(made: dict[str, Any]) -> dict[str, Any]:
    return {**made, "data": {**made["data"], "eval_data_paths": made["data"]["train_data_paths"]}}


def noted(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The notes of the first screen about a loss, each in one line."""
    entries = re.sub(r" *\n +", " ", "".join(capfd.readouterr())).splitlines()
    return [
        entry.removeprefix("note").strip()
        for entry in entries
        if entry.startswith("note") and re.search(r"\.(loss|metrics)", entry)
    ]


@pytest.mark.parametrize(
    ("name", "what", "remedy"),
    [
        ("Mean", "for two rows alone, and ", "looks like a mean"),
        ("Penalty", "both together, not the sum", "each row's share depend on that row alone"),
        ("Layer", "a layer is made while the loss is computed (Linear)", "make layers in build"),
    ],
)
def test_a_loss_that_is_no_sum_is_refused(tmp_path: Path, name: str, what: str, remedy: str) -> None:
    with pytest.raises(ModelError) as refused:
        shardtune.train(recipe(tmp_path, name))
    assert what in str(refused.value)
    assert remedy in str(refused.value.remedy)
    assert refused.value.where == f"{name}.loss"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("OwnGenerator", "draws from a generator of its own"),
        ("Stateful", "keeps state between calls"),
        ("InPlace", "changes 'x' of its batch in place"),
        ("MeanMetric", "what evaluation reports depends on how rows are cut into batches"),
    ],
)
def test_what_is_odd_is_noted(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, said: str) -> None:
    shardtune.train(with_evaluation(recipe(tmp_path, name)))
    (note,) = noted(capfd)
    assert note.startswith(f"{name}.{'metrics' if 'Metric' in name else 'loss'}")
    assert said in note


@pytest.mark.parametrize("name", ["Sum", "Drawn", "DrawnInCollate", "Numpy", "OfRows", "Normed", "Measured"])
def test_other_losses_are_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    """Dropout, draws of torch, numpy and rows, and a norm that is made in the loss."""
    shardtune.train(with_evaluation(recipe(tmp_path, name)))
    assert noted(capfd) == []


def test_metrics_are_those_of_runs_with_evaluation_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shardtune.train(recipe(tmp_path, "NoPair"))
    assert noted(capfd) == []
    with pytest.raises(ModelError, match=r"not a pair \(sum, weight\)") as refused:
        shardtune.train(with_evaluation(recipe(tmp_path, "NoPair")))
    assert refused.value.where == "NoPair.metrics"


def test_rows_that_never_share_a_forward_are_not_compared(tmp_path: Path) -> None:
    shardtune.train(recipe(tmp_path, "Mean", micro_batch_size=1))


def test_a_term_that_rows_alone_lack_is_not_compared(tmp_path: Path) -> None:
    shardtune.train(recipe(tmp_path, "Terms"))


def losses(run: Path) -> list[float]:
    return [line["train/loss"] for line in lines(run) if "train/loss" in line]


@pytest.mark.parametrize("backend", ["fsdp", "fsdp1", "ddp"])
def test_a_loss_that_cannot_be_tried_trains(tmp_path: Path, backend: str) -> None:
    """Without dropout, so that all have the same numbers."""
    made = [
        recipe(tmp_path, name, training_backend=backend, model={"adapter": f"{tmp_path}/still.py:{name}"})
        for name in ("Sum", "Broken")
    ]
    (tmp_path / "still.py").write_text(CODE.replace("nn.Dropout(0.5)", "nn.Identity()"))
    for name, each in zip(("tried", "untried"), made, strict=True):
        each["runner"]["logger"]["experiment_name"] = name
    train_on_ranks(2, made)
    found = losses(tmp_path / "runs" / "untried")
    assert len(found) == 2
    assert found == losses(tmp_path / "runs" / "tried")


def test_the_same_on_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train_on_ranks(2, [recipe(tmp_path, "InPlace")])
    assert len(noted(capfd)) == 1
    with pytest.raises(AssertionError, match="looks like a mean"):
        train_on_ranks(2, [recipe(tmp_path, "Mean")])
