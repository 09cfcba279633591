"""Standard output of commands whose results programs read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ADAPTER = """
import numpy as np
from torch import nn

from shardtune import Adapter, LossSum, Sample

print("imported")


class Talking(Adapter):
    def build(self):
        print("a model of 3 parameters")
        return nn.Linear(2, 1)

    def encode(self, row):
        print("a row")
        return Sample(fields={"x": np.array([row["x"], 1.0], np.float32)})

    def loss(self, model, batch):
        print("a loss")
        return LossSum(model(batch["x"]).square().sum(), len(batch["x"]))

    def predict_rows(self, model, batch):
        print("predictions")
        return model(batch["x"])[:, 0]
"""
RECIPE = """
global_batch_size: 2
model: {adapter: talking.py:Talking, precision: fp32}
data: {train_data_paths: rows.jsonl, eval_data_paths: rows.jsonl, num_workers: 0, cache_dir: cache}
runner: {max_steps: 1, logger: {logger_backends: [jsonl]}}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("talking")
    (folder / "talking.py").write_text(ADAPTER)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"x": x}) + "\n" for x in (0.5, 1.5, 2.5, 3.5)))
    run_command(folder, "train", "recipe.yaml")
    return folder


def run_command(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "shardtune", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert words[0] == "train" or "a model of 3 parameters" in done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "runs/recipe", "data.cache_dir=other"),
        ("replay", "runs/recipe", "--step", "1", "--json"),
        ("plan", "recipe.yaml", "--json"),
    ],
    ids=lambda words: words[0],
)
def test_what_a_model_prints_is_not_in_the_json_of_a_command(trained: Path, words: tuple[str, ...]) -> None:
    assert isinstance(json.loads(run_command(trained, *words)), dict)


def test_each_line_of_predictions_is_json(trained: Path) -> None:
    lines = run_command(trained, "predict", "runs/recipe", "--file", "rows.jsonl").splitlines()
    assert [json.loads(line)["x"] for line in lines] == [0.5, 1.5, 2.5, 3.5]
