"""What a dry run says of the run to come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.workspace import run_cli

MINE = """
import numpy as np
import torch
from torch import nn
from shardtune import Adapter, LossSum, Sample


class Mine(Adapter):
    def build(self):
        return nn.Linear(1, 1)

    def initial_weights(self):
        return {"weight": torch.ones(1, 1), "bias": torch.zeros(1)}

    def encode(self, row):
        return Sample(fields={"x": np.array([row["x"]], np.float32)})

    def loss(self, model, batch):
        return LossSum(model(batch["x"]).square().sum(), len(batch["x"]))


class Drawn(Mine):
    def initial_weights(self):
        return {"weight": None, "bias": None}
"""


@pytest.mark.parametrize(
    ("name", "further", "origin"),
    [
        ("Mine", [], "2 entries of initial_weights()"),
        ("Mine", ["model.from_scratch=true"], "drawn from the seed"),
        ("Drawn", [], "drawn from the seed"),
    ],
)
def test_the_origin_of_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, further: list[str], origin: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"x": x}) + "\n" for x in range(1, 3)))
    (tmp_path / "recipe.yaml").write_text(
        "global_batch_size: 2\nmicro_batch_size: 2\ndata: {train_data_paths: rows.jsonl, num_workers: 0}\n"
        f"model: {{adapter: mine.py:{name}, precision: fp32}}\n"
    )
    found = run_cli("train", "recipe.yaml", "--dry-run", *further)
    assert found.code == 0, found.err
    assert f"✓ model weights: Linear of 2 parameters, {origin}" in found.err
    assert "✓ training data: 2 rows in 1 step\n" in found.err
