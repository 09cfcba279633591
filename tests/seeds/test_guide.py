"""The guide's worker, its three ways of being known, and its YAML: trained, evaluated and resumed, on 1 and 2 ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardtune
from shardtune.checkpoint.atomic import read_json
from shardtune.config import load_recipe
from tests.seeds.guide import (
    ABSTRACT,
    FILE,
    LOOP,
    MODEL,
    PROVIDER,
    RECIPE,
    REGISTERED,
    WORKER,
    Change,
    changed,
)
from tests.support.registry import nothing_registered
from tests.support.tiny_run import assert_same_tensors, lines, make_tiny, rows, train_on_ranks, write_rows

ROWS, HELD_OUT = 72, 7
CONSTANT = "actor.optim.lr_scheduler=constant"
"""So that a run of three steps is the beginning of one of all."""


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    with nothing_registered():
        yield


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, rows, and for each way of registering a worker file and a recipe."""
    folder = tmp_path_factory.mktemp("guide")
    make_tiny(folder)
    write_rows(folder / "train_path", rows(ROWS))
    write_rows(folder / "eval_path", rows(HELD_OUT, start=100))
    recipe = changed(
        RECIPE,
        (
            Change("/path/to/model", str(folder / "model"), "a path"),
            Change("/path/to/train_path", str(folder / "train_path"), "a path"),
            Change("/path/to/eval_path", str(folder / "eval_path"), "a path"),
        ),
    )
    for way, change in REGISTERED.items():
        (folder / f"{way}.py").write_text(changed(WORKER, (*FILE, change)))
        # The guide's author edits the system's own source; a user's file is named instead.
        (folder / f"{way}.yaml").write_text(f"plugins: [{way}.py]\n{recipe}")
    return folder


def keys(reader: Path, name: str, *others: str) -> list[str]:
    here = f"runner.logger.log_path={reader / 'runs'}"
    return [
        here,
        f"runner.logger.experiment_name={name}",
        "runner.device=cpu",
        CONSTANT,
        "actor.optim.lr=1e-3",
        *others,
    ]


def as_mapping(reader: Path, *overrides: str) -> dict[str, Any]:
    """The Enum's recipe as the ranks of a test take it."""
    return load_recipe(reader / "enum.yaml", overrides).to_dict()


def test_one_rank_trains_evaluates_and_resumes_bitwise(reader: Path) -> None:
    """Five epochs of three steps, the last one smaller; stopped in the middle of the second epoch."""
    recipe = reader / "enum.yaml"
    whole = shardtune.train(recipe, *keys(reader, "whole"))
    assert whole.metrics["step"] == 15
    first, last = lines(whole.dir)[0], lines(whole.dir)[-1]
    assert last["train/loss"] < first["train/loss"]
    assert read_json(whole.dir / "manifest.json")["worker"] == "FSDPMyModelSftWorker"
    assert list(read_json(whole.dir / "manifest.json")["user_code"]) == [str(reader / "enum.py")]

    parts = keys(reader, "parts")
    shardtune.train(recipe, *parts, "runner.max_steps=4")
    resumed = shardtune.train(recipe, *parts)
    step_4 = lines(resumed.dir)[3]  # where the shorter run had its last evaluation
    assert lines(resumed.dir) == [*lines(whole.dir)[:3], step_4, *lines(whole.dir)[4:]]
    assert_same_tensors(whole.dir / "checkpoints/global_step_15", resumed.dir / "checkpoints/global_step_15")

    final = read_json(whole.dir / "final" / "metrics.json")
    assert shardtune.load_run(whole.dir).evaluate() == {"eval/eval_accuracy": final["eval/eval_accuracy"]}
    assert final["eval/eval_accuracy"] in {n / HELD_OUT for n in range(HELD_OUT + 1)}
    AutoModelForCausalLM.from_pretrained(whole.dir / "final")
    assert AutoTokenizer.from_pretrained(whole.dir / "final")("say")["input_ids"]


def test_two_ranks_train_evaluate_and_resume_bitwise(reader: Path) -> None:
    whole, parts = keys(reader, "whole-2"), keys(reader, "parts-2")
    jobs = [as_mapping(reader, *whole), as_mapping(reader, *parts, "runner.max_steps=4"), as_mapping(reader, *parts)]
    train_on_ranks(2, jobs)
    one, other = (reader / "runs" / name for name in ("whole-2", "parts-2"))
    assert_same_tensors(one / "checkpoints/global_step_15", other / "checkpoints/global_step_15")
    assert lines(other)[4:] == lines(one)[4:]
    alone = lines(shardtune.train(reader / "enum.yaml", *keys(reader, "alone")).dir)
    for mine, theirs in zip(alone, lines(one), strict=True):
        for name in ("train/supervised_tokens", "train/tokens", "epoch"):
            assert mine[name] == theirs[name]
        assert theirs["train/loss"] == pytest.approx(mine["train/loss"], rel=2e-3)  # bf16, as the guide has it


@pytest.mark.parametrize("way", ["decorator", "function"])
def test_a_worker_is_known_by_a_decorator_and_by_a_function(reader: Path, way: str) -> None:
    run = shardtune.train(reader / f"{way}.yaml", *keys(reader, way, "runner.max_steps=2"))
    assert run.metrics["step"] == 2
    twin = shardtune.train(reader / f"{way}.yaml", *keys(reader, f"{way}-again", "runner.max_steps=2"))
    assert lines(run.dir) == lines(twin.dir)
    with nothing_registered():
        enum = shardtune.train(reader / "enum.yaml", *keys(reader, f"{way}-enum", "runner.max_steps=2"))
    assert lines(enum.dir) == lines(run.dir)


def test_ranks_are_started_for_it(reader: Path) -> None:
    keys_here = keys(reader, "started", "runner.max_steps=2", "runner.nproc_per_node=2")
    run = shardtune.train(reader / "decorator.yaml", *keys_here)
    assert (run.metrics["step"], read_json(run.dir / "manifest.json")["world_size"]) == (2, 2)


def test_the_loop_is_as_the_guide_describes_it(reader: Path) -> None:
    """What it says of `self.data_iter`, `self.get_train_model_output` and `get_model(self.cfg.actor.model)`."""
    recipe = load_recipe(reader / "decorator.yaml", keys(reader, "loop"))
    shardtune.config.user_code.import_plugins(recipe.plugins)
    (kind,) = shardtune.config.model_names.registered("my_new_model")
    worker = kind(recipe.as_dict_config())
    made: dict[str, Any] = {"self": worker, "get_model": shardtune.get_model}
    exec(PROVIDER, made)
    assert type(made["model"]).__name__ == "Qwen2ForCausalLM"
    worker.setup()
    exec(LOOP, made)
    assert made["batch"]["input_ids"].shape[0] == 2
    assert made["losses"].requires_grad
    for _ in range(15):
        exec(LOOP, made)
    assert worker._data_iter_offset == 32  # a step's worth of rows


def test_what_is_abstract_and_what_is_named() -> None:
    named = set(re.findall(r"@abstractmethod\ndef (\w+)", ABSTRACT))
    assert named == shardtune.FSDPSftWorker.__abstractmethods__
    printed = yaml.safe_load(MODEL)
    recipe = load_recipe(printed, files_must_exist=False)
    assert recipe.actor.model.model_type == "my_new_model"
    assert recipe.actor.model.model_path == printed["actor"]["model"]["model_path"]


def test_a_changed_plugin_is_announced_on_resume(reader: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe, here = reader / "changing.yaml", keys(reader, "changing")
    text = (reader / "decorator.py").read_text()
    (reader / "changing.py").write_text(text)
    recipe.write_text((reader / "decorator.yaml").read_text().replace("decorator.py", "changing.py"))
    shardtune.train(recipe, *here, "runner.max_steps=1")
    (reader / "changing.py").write_text(f"{text}\n\nADDED = 1\n")
    run = shardtune.train(recipe, *here, "runner.max_steps=2")
    told = f"{reader / 'changing.py'} has changed since this run was started"
    assert "".join(told.split()) in "".join(capfd.readouterr().err.split())  # in a column of a table
    assert json.loads((run.dir / "manifest.json").read_text())["user_code"]
