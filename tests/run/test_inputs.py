"""A finished run's result is returned for what it was made from alone: data, weights, code and objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import shardtune
from shardtune.config.user_code import import_file
from shardtune.errors import CheckpointError
from shardtune.run import inputs
from shardtune.run.inputs import model_fingerprint
from shardtune.run.run import Run
from tests.support.tiny_run import Tiny, make_model, make_tiny, make_tokenizer, rows
from tests.support.workspace import run_cli

pytestmark = pytest.mark.lengthy

LOSS = """
from torch.nn.functional import cross_entropy

def loss(outputs, targets):
    return cross_entropy(outputs, targets, reduction="none")
"""
SHORT: dict[str, Any] = {"runner__max_steps": 1, "runner__save_interval": -1}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def other_weights(tiny: Tiny) -> None:
    model = make_model(make_tokenizer())
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1.0
    model.save_pretrained(tiny.folder / "model")


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    """With `run`: finished, from files alone."""
    tiny = make_tiny(tmp_path, save_interval=-1)
    (tiny.folder / "loss.py").write_text(LOSS)
    return tiny


def written(tiny: Tiny, **changes: Any) -> Path:
    """The recipe of a short run in a file."""
    values = tiny.recipe(
        **SHORT,
        actor__loss=f"{tiny.folder}/loss.py:loss",
        data__eval_data_paths={"held_out": str(tiny.folder / "eval.jsonl")},
        **changes,
    )
    file = tiny.folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def test_changed_files_are_named_and_nothing_is_overwritten(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = written(tiny)
    run = shardtune.train(recipe)
    assert shardtune.train(recipe).metrics == run.metrics, "nothing has changed"
    before = tree(run.dir)
    evaluation = "data.eval_data_paths.held_out: "
    changes: dict[str, tuple[Callable[[], object], str]] = {
        # of the same size each
        "train.jsonl": (lambda: edit(tiny.folder / "train.jsonl", "say 5 ", "say 6 "), "data.train_data_paths: "),
        "eval.jsonl": (lambda: edit(tiny.folder / "eval.jsonl", "say 101 ", "say 107 "), evaluation),
        "loss.py": (lambda: edit(tiny.folder / "loss.py", '"none")', '"none") * 9'), "actor.loss: "),
        "model.safetensors": (lambda: other_weights(tiny), "actor.model.model_path: "),
    }
    for name, (change, says) in changes.items():
        file = next(tiny.folder.rglob(name))
        content = file.read_bytes()
        change()
        outcome = run_cli("train", str(recipe))
        error = " ".join(outcome.err.split())
        assert outcome.code == 2, error
        assert f"{says}{file} has changed where:" in error
        assert error.count(" has changed") == 2, "that anything has, and this file alone"
        assert "runner.overwrite=true" in error
        file.write_bytes(content)
    assert tree(run.dir) == before
    edit(tiny.folder / "train.jsonl", "say 5 ", "say 6 ")
    key = "data.train_data_paths"
    assert shardtune.train(recipe, f"runner.allow_changes=[{key}]").metrics == run.metrics
    assert f"{key}: {tiny.folder / 'train.jsonl'} has changed (allowed by" in capsys.readouterr().err


def test_other_objects_are_refused_and_the_trained_ones_are_not(tiny: Tiny) -> None:
    model, tokenizer, data = make_model(make_tokenizer()), make_tokenizer(), rows(12)
    values = tiny.recipe(**SHORT)
    del values["actor"]["model"]["model_path"], values["data"]["train_data_paths"]

    def train(**changed: Any) -> Run:
        objects = {"model": model, "tokenizer": tokenizer, "train_data": data, "eval_data": {"a": rows(5)}, **changed}
        return shardtune.train(values, **objects)

    untrained = model_fingerprint(model)
    metrics = train().metrics
    assert model_fingerprint(model) != untrained, "it is trained in place"
    assert train().metrics == metrics, "the trained model"
    assert train(model=make_model(make_tokenizer()), train_data=rows(12)).metrics == metrics, "equal objects"
    reversed_template = make_tokenizer()
    reversed_template.chat_template = str(reversed_template.chat_template).replace("<|im_end|>\n", "<|im_end|>")
    for changed, says in (
        ({"train_data": rows(12)[::-1]}, r"data\.train_data_paths: rows in memory has changed"),
        ({"eval_data": {"a": rows(5, start=1)}}, r"data\.eval_data_paths\.a: rows in memory has changed"),
        (
            {"model": make_model(make_tokenizer(), width=8)},
            r"actor\.model\.model_path: the object in memory has changed",
        ),
        ({"eval_data": None}, r"data\.eval_data_paths\.a: rows in memory is gone"),
        ({"tokenizer": reversed_template}, r"actor\.tokenizer\.tokenizer_model: the object in memory has changed"),
    ):
        with pytest.raises(CheckpointError, match=says):
            train(**changed)


def test_a_run_that_goes_on_names_what_has_changed(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    shardtune.train(written(tiny))
    edit(tiny.folder / "eval.jsonl", "say 101 ", "say 107 ")
    shardtune.train(written(tiny), "runner.max_steps=2")
    expected = f"data.eval_data_paths.held_out: {tiny.folder}/eval.jsonl has changed since this run was started"
    assert "".join(expected.split()) in "".join(capsys.readouterr().err.split()), "the screen breaks lines"
    shardtune.train(written(tiny), "runner.max_steps=2")  # finished, with the data that it ended with
    before, now = [(str(tiny.folder / name), "1") for name in ("eval.jsonl", "lost.jsonl")], [("other.jsonl", "2")]
    kept, lost, _ = inputs._changes(before, now)
    assert (kept.partition(" is ")[2], lost.partition(" is ")[2]) == ("there, but no longer named", "gone")


def test_a_class_registered_in_python(tiny: Tiny) -> None:
    code = """
import torch
from shardtune import Adapter, LossSum, Sample, register_model
import numpy as np

@register_model("of_inputs")
class Model(Adapter):
    def build(self): return torch.nn.Linear(1, 1)
    def encode(self, row): return Sample(fields={"x": np.array([len(row["prompt"])], np.float32)})
    def loss(self, model, batch): return LossSum(model(batch["x"]).square().sum() * SCALE, len(batch.rows))
"""
    values = tiny.recipe(**SHORT, actor__model={"model_type": "of_inputs", "precision": "fp32"})

    def define(scale: str) -> None:
        file = tiny.folder / "notebook.py"
        file.write_text(code.replace("SCALE", scale))
        import_file(file, "the test")

    define("1.0")
    metrics = shardtune.train(values).metrics
    assert shardtune.train(values).metrics == metrics
    define("2.0")
    with pytest.raises(CheckpointError, match=r"actor\.model\.model_type: Model has changed"):
        shardtune.train(values)


def test_a_model_is_recognised_in_another_precision() -> None:
    model = make_model(make_tokenizer()).bfloat16()
    before = model_fingerprint(model)
    assert model_fingerprint(model.float()) == before
    with torch.no_grad():
        next(model.parameters())[3, 5] += 1
    assert model_fingerprint(model) != before
