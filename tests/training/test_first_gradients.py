"""Parameters that the first step does not reach are named, once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shardtune import Adapter, Batch, LossSum, Sample
from shardtune.config import load_recipe
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.ranks import run_ranks


class Branches(nn.Module):
    """A layer that the loss depends on, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.spare(x)
        return self.used(x)


class Spare(Adapter):
    """A regression that leaves a layer out."""

    def build(self) -> nn.Module:
        return Branches()

    def encode(self, row: Mapping[str, float]) -> Sample:
        return Sample(fields={"x": np.array([row["x"]], np.float32)})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        return LossSum(model(batch["x"]).square().sum(), len(batch.rows))


def reported(folder: str) -> tuple[list[str], list[dict[str, float]]]:
    """The lines about gradients, and the metrics, of two steps."""
    lines: list[str] = []
    recipe = {
        "actor": {
            "micro_batch_size": 1,
            "global_batch_size": 4,
            "model": {"adapter": f"{__file__}:Spare", "precision": "fp32"},
        },
        "data": {"train_data_paths": f"{folder}/rows.jsonl", "cache_dir": f"{folder}/cache", "num_workers": 0},
    }
    worker = SFTWorker(load_recipe(recipe), report=lines.append)
    worker.setup()
    metrics = [worker.run_training(), worker.run_training()]
    worker.release()
    return [line for line in lines if "gradient" in line], metrics


def check(found: tuple[list[str], list[dict[str, float]]]) -> None:
    (line,), metrics = found
    assert line.startswith("no gradient in the first step for 2 of 4 trained parameters: spare.weight, spare.bias. ")
    for one in metrics:
        assert one["train/samples"] == 4.0
        assert one["perf/samples_per_second"] > 0
        assert not {"train/tokens", "perf/tokens_per_second"} & one.keys(), "the rows have no tokens"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"x": 1.0 + n}) + "\n" for n in range(8)))
    return str(tmp_path)


def test_parameters_without_a_gradient_are_named(folder: str) -> None:
    check(reported(folder))


def test_parameters_without_a_gradient_are_named_on_ranks(folder: str) -> None:
    found: Sequence[tuple[list[str], list[dict[str, float]]]] = run_ranks(reported, 2, folder)
    check(found[0])
    assert found[1][0] == []
