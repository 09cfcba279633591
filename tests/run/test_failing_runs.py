"""Runs that fail late lose nothing, and runs that train nothing do not pass for runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardtune
from shardtune.errors import ConfigError, ModelError
from tests.support.tiny_run import Tiny, lines, make_tiny

METRIC = "def half(outputs, targets, weights):\n    {}\n"
ADAPTER = """
import numpy as np
from torch import nn
from shardtune import Adapter, LossSum, Sample


class Empty(Adapter):
    def build(self):
        return nn.Linear(1, 1)

    def encode(self, row):
        return Sample(fields={"x": np.ones(1, np.float32)})

    def loss(self, model, batch):
        return LossSum(model(batch["x"]).sum() * float("nan"), len(batch["x"]))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def test_an_evaluation_that_fails_after_the_last_step_loses_no_training(tiny: Tiny) -> None:
    metric = tiny.folder / "metric.py"
    metric.write_text(METRIC.format("return 3.0"))
    keys = {
        "data__eval_data_paths": str(tiny.folder / "eval.jsonl"),
        "eval__metrics": [f"{metric}:half"],
        "runner__save_interval": -1,
    }
    recipe = tiny.recipe("late", **keys)
    with pytest.raises(ConfigError, match="half"):
        shardtune.train(recipe)
    trained = sorted(path.name for path in (tiny.run("late") / "checkpoints").glob("global_step_*"))
    assert len(trained) == 1, "the last step is there"
    metric.write_text(METRIC.format("return 1.0, 2.0"))
    run = shardtune.train(recipe)
    assert run.metrics["eval/half"] == 0.5
    steps = [line["step"] for line in lines(run.dir)]
    assert steps == list(range(1, int(trained[0].rpartition("_")[2]) + 1)), "each step is logged once"


def test_a_run_that_trains_nothing_is_an_error_that_names_the_rows(tiny: Tiny, tmp_path: Path) -> None:
    adapter = tmp_path / "empty.py"
    adapter.write_text(ADAPTER)
    keys = {"actor__model__adapter": f"{adapter}:Empty", "actor__model__from_scratch": True}
    with pytest.raises(ModelError, match="nothing was trained: all") as failed:
        shardtune.train(tiny.recipe("nothing", **keys))
    assert "train.jsonl:" in str(failed.value)
    assert not (tiny.run("nothing") / "final").exists()
