"""`shardtune predict` for a user's own adapter: a value for each row, without targets, in order."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import shardtune
from shardtune.errors import ConfigError, DataError, ModelError
from tests.support.workspace import run_cli

CODE = """
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from shardtune import Adapter, FSDPSftWorker, LossSum, Sample


class Tagger(Adapter):
    padding = {"tokens": 0}

    def build(self):
        return nn.Sequential(nn.Embedding(16, 4), nn.Dropout(0.5), nn.Linear(4, 3))

    def encode(self, row):
        made = self.encode_input(row)
        return Sample(fields={**made.fields, "label": np.asarray(row["label"])})

    def encode_input(self, row):
        return Sample(fields={"tokens": np.asarray(row["tokens"])})

    def logits(self, model, batch):
        real = batch.mask("tokens")[..., None]
        return (model(batch["tokens"]) * real).sum(1)

    def loss(self, model, batch):
        return LossSum(F.cross_entropy(self.logits(model, batch), batch["label"], reduction="sum"), len(batch.rows))


class Scores(Tagger):
    def predict_rows(self, model, batch):
        return self.logits(model, batch)


class PaddedTarget(Scores):
    padding = {"tokens": 0, "label": 0}

    def encode(self, row):
        return Sample(fields={**self.encode_input(row).fields, "label": np.asarray([row["label"]])})

    def loss(self, model, batch):
        label = batch["label"][:, 0]
        return LossSum(F.cross_entropy(self.logits(model, batch), label, reduction="sum"), len(label))


class Named(Tagger):
    def predict_rows(self, model, batch):
        noise = torch.rand(len(batch.rows)) + batch.rand_like("noise", batch["tokens"][:, 0].float())
        rows = zip(self.logits(model, batch), noise)
        return [{"label": "abc"[int(one.argmax())], "scores": one, "noise": float(each)} for one, each in rows]


class WithTarget(Scores):
    encode_input = Adapter.encode_input

    def encode(self, row):
        return Sample(fields={"tokens": np.asarray(row["tokens"]), "label": np.asarray(row["label"])})


class Drawn(Scores):
    def encode_input(self, row):
        noise = torch.rand(1).item() + np.random.rand() + random.random()
        return Sample(fields={"tokens": np.asarray([1 + int(1000 * noise) % 15] * len(row["tokens"]))})


class NoSample(Scores):
    def encode(self, row):
        return Sample(fields={"tokens": np.asarray(row["tokens"]), "label": np.asarray(row["label"])})

    def encode_input(self, row):
        return {"tokens": np.asarray(row["tokens"])}


class Mean(Tagger):
    def predict_rows(self, model, batch):
        return self.logits(model, batch).mean(0)


class Fails(Tagger):
    def predict_rows(self, model, batch):
        return self.logitz(model, batch)


class Weighs(Scores):
    def collate(self, samples, rows, weights):
        weights["loss"]
        return super().collate(samples, rows, weights)


class Objects(Tagger):
    def predict_rows(self, model, batch):
        return [object() for _ in batch.rows]


class Worker(FSDPSftWorker):
    def model_provider_func(self):
        return nn.Linear(1, 1)

    def build_dataloader(self, data_paths, eval_dataset=False):
        return [{"x": torch.ones(4, 1, dtype=torch.float64)}], {"num_samples": 4}

    def get_train_model_output(self, batch):
        return self.model(batch["x"]).square().mean()

    def get_eval_model_output(self, batch):
        return 1
"""
ROWS = [{"tokens": [1 + (number * 7 + place) % 15 for place in range(1 + number % 4)]} for number in range(11)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("predicting")
    (made / "own.py").write_text(CODE)
    rows = [{**row, "label": number % 3} for number, row in enumerate(ROWS)]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def trained(
    folder: Path, kind: str, *, name: str = "", data: Mapping[str, Any] = MappingProxyType({})
) -> shardtune.Run:
    worker = kind == "Worker"
    model = {"precision": "fp64"} | ({} if worker else {"adapter": f"{folder}/own.py:{kind}"})
    return shardtune.train(
        {
            "runner": {"max_steps": 2, "logger": {"log_path": str(folder / "runs"), "experiment_name": name or kind}},
            "actor": {"micro_batch_size": 4, "global_batch_size": 4, "model": model, "optim": {"lr": 0.1}}
            | ({"worker": f"{folder}/own.py:Worker"} if worker else {}),
            "data": {"train_data_paths": str(folder / "rows.jsonl"), "cache_dir": str(folder / "cache"), **data},
        }
    )


def plain(run: shardtune.Run) -> list[list[float]]:
    """The logits of each row in plain PyTorch, from the saved weights."""
    weights = load_file(run.dir / "final" / "model.safetensors")
    found = []
    for row in ROWS:
        embedded = weights["0.weight"].double()[row["tokens"]]
        found.append((embedded @ weights["2.weight"].double().T + weights["2.bias"].double()).sum(0).tolist())
    return found


def test_each_row_has_the_prediction_of_its_own(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = trained(folder, "Scores")
    assert f"shardtune predict {run.dir} --file rows.jsonl" in "".join(capfd.readouterr())
    expected = plain(run)
    found = run.predict(ROWS)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-12)
    assert run.predict(ROWS[5:6])[0] == pytest.approx(expected[5], rel=1e-12)


def test_values_of_any_form_and_the_rows_columns_are_printed(folder: Path) -> None:
    run = trained(folder, "Named")
    rows = folder / "given.jsonl"
    rows.write_text("".join(json.dumps({**row, "prediction": number}) + "\n" for number, row in enumerate(ROWS)))
    text = run_cli("predict", str(run.dir), "--file", str(rows)).out
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["given_prediction"] for line in lines] == list(range(len(ROWS)))
    for line, expected in zip(lines, plain(run), strict=True):
        assert line["prediction"]["scores"] == pytest.approx(expected, rel=1e-12)
        assert line["prediction"]["label"] == "abc"[expected.index(max(expected))]
    before = torch.rand(1), torch.get_rng_state()
    assert [line["prediction"] for line in lines] == run.predict(ROWS)
    assert torch.equal(torch.get_rng_state(), before[1])
    assert len({line["prediction"]["noise"] for line in lines}) == len(ROWS)


def test_a_target_with_a_length_is_left_out(folder: Path) -> None:
    run = trained(folder, "PaddedTarget")
    for one, other in zip(run.predict(ROWS), plain(run), strict=True):
        assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("Mean", ModelError, "for 4 rows it returned 3 values"),
        ("NoSample", ModelError, "encode_input returned a dict, not a Sample"),
        ("Objects", ModelError, "a object for a row, which JSON has no form for"),
        ("Fails", ConfigError, r"Fails\.predict_rows failed: AttributeError: .*logitz"),
        ("Weighs", ConfigError, r"Weighs\.collate failed: KeyError: 'loss'"),
        ("Tagger", ConfigError, r"write Tagger\.predict_rows\(model, batch\)"),
        ("Worker", ConfigError, "a worker of your own reads its rows itself"),
        ("WithTarget", DataError, r"the row has no 'label', it has tokens \(own\.py:"),
    ],
)
def test_what_has_no_prediction_is_one_message(folder: Path, name: str, error: type[Exception], says: str) -> None:
    run = trained(folder, name)
    with pytest.raises(error, match=says) as found:
        run.predict(ROWS)
    if name in {"Fails", "Weighs"}:
        assert "own.py:" in str(found.value.where)
    if isinstance(found.value, DataError):
        assert found.value.where == "rows in memory: row 1"
        assert "write WithTarget.encode_input(row)" in str(found.value.remedy)


def test_a_row_that_is_cut_is_marked(folder: Path) -> None:
    run = trained(folder, "Scores", name="cut", data={"max_length": 3, "on_too_long": "truncate"})
    whole, lines = plain(run), list(run.predictions(ROWS))
    for row, line, expected in zip(ROWS, lines, whole, strict=True):
        assert line.get("truncated", False) == (len(row["tokens"]) > 3)
        assert (line["prediction"] == pytest.approx(expected, rel=1e-12)) == (len(row["tokens"]) <= 3)


def test_what_encode_input_draws_is_the_same_in_each_call_and_nothing_to_the_script(folder: Path) -> None:
    run = trained(folder, "Drawn")
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = run.predict(ROWS)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]
    np.random.seed(1)
    assert run.predict(ROWS) == first
