"""A logger of the user's own: found by file or package, checked at the start, called on rank 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtune
from shardtune.config import load_recipe
from shardtune.config.schema.runner import LoggerConfig
from shardtune.errors import ConfigError
from shardtune.training.loggers import check_logger
from tests.support.tiny_run import make_tiny, tensors

GOOD = """\
import json, random, torch
from pathlib import Path

class Kept:
    def __init__(self, run):
        self.file = open(Path(run.run_dir) / "NAME.jsonl", "a")
        self.put("start", run.project, run.name, run.done, run.recipe["actor"]["optim"]["lr"])
    def put(self, *what):
        torch.manual_seed(0); random.seed(0)
        self.file.write(json.dumps(what) + "\\n")
    def log(self, step, metrics):
        self.put("log", step, sorted(metrics)[0])
        if step == FAILS: raise RuntimeError("full")
    def samples(self, step, name, answers):
        self.put("samples", step, name, len(answers), answers[0]["reference"])
    def close(self):
        self.put("close"); self.file.close()
"""


def logger(*names: str) -> LoggerConfig:
    return LoggerConfig(logger_backends=list(names))


@pytest.mark.lengthy
def test_it_receives_the_run_and_cannot_change_or_end_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = make_tiny(tmp_path, save_interval=-1)
    for name, step in (("good", 9), ("failing", 2)):
        (tmp_path / f"{name}_logger.py").write_text(GOOD.replace("FAILS", str(step)).replace("NAME", name))
    given: dict[str, Any] = {
        "runner__max_steps": 3,
        "data__eval_data_paths": str(tmp_path / "eval.jsonl"),
        "eval__generate": True,
        "eval__max_new_tokens": 2,
    }
    own = [f"{tmp_path}/{name}_logger.py:Kept" for name in ("good", "failing")]
    for name, backends in (("plain", ["jsonl"]), ("own", ["jsonl", *own])):
        torch.manual_seed(1)
        shardtune.train(tiny.recipe(name, runner__logger__logger_backends=backends, **given))
    first, other = (tensors(tiny.run(name) / "checkpoints/global_step_3") for name in ("plain", "own"))
    assert all(torch.equal(first[key], other[key]) for key in first)
    good, failing = (
        [json.loads(line) for line in (tiny.run("own") / f"{name}.jsonl").read_text().splitlines()]
        for name in ("good", "failing")
    )
    assert good == [
        ["start", "shardtune", "own", -1, 1e-3],
        *(["log", step, "epoch"] for step in (1, 2)),
        ["samples", 3, "samples", 7, "11 11 11 "],
        ["log", 3, "epoch"],
        ["close"],
    ]
    assert failing == [*good[:3], ["close"]]
    failed = [line for line in capsys.readouterr().err.splitlines() if "Kept failed and logs nothing more" in line]
    assert len(failed) == 1
    assert (tiny.run("own") / "final/model.safetensors").exists()
    assert len((tiny.run("own") / "metrics.jsonl").read_text().splitlines()) == 3
    manifest = json.loads((tiny.run("own") / "manifest.json").read_text())
    assert list(manifest["user_code"]) == [str(tmp_path / f"{name}_logger.py") for name in ("good", "failing")]


START, LOG = "  def __init__(self, run): ...\n", "  def log(self, step, metrics): ...\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("Kept = 1", "has no function or class 'Kept'"),
        ("def Kept(run): ...", "is not a class"),
        (f"class Kept:\n{START}{LOG.replace('log', 'logs')}", "has no method log, but logs"),
        (f"class Kept:\n{LOG}", r"as Kept\(run\)"),
        (f"class Kept:\n{START}  def log(self, metrics): ...", r"log\(self, step, metrics\)"),
        (f"class Kept:\n{START}{LOG}  def close(self, how): ...", r"called as close\(self\)"),
        (f"class Kept:\n{START}{LOG}  def sample(self, *a): ...", r"Kept\.sample would never be called.* is samples"),
        (f"class Kept:\n{START}{LOG}  def finish(self): ...", r"Kept\.finish would never be called.* is close"),
        ("import nothing_of_the_kind", "cannot be imported"),
    ],
)
def test_a_class_that_cannot_be_one_is_refused(tmp_path: Path, body: str, message: str) -> None:
    (tmp_path / "own.py").write_text(body + "\n")
    with pytest.raises(ConfigError, match=message):
        check_logger(logger(f"{tmp_path}/own.py:Kept"))


def test_a_class_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_loggers_package").mkdir()
    good = "class Kept:\n  def __init__(self, run): ...\n  def log(self, step, metrics): ...\n"
    (tmp_path / "own_loggers_package" / "__init__.py").write_text("")
    (tmp_path / "own_loggers_package" / "one.py").write_text(good)
    monkeypatch.syspath_prepend(str(tmp_path))
    check_logger(logger("own_loggers_package.one:Kept"))
    with pytest.raises(ConfigError, match=r"has no class 'Keep'(?s:.*)did you mean Kept\?"):
        check_logger(logger("own_loggers_package.one:Keep"))
    with pytest.raises(ConfigError, match="no_such_package cannot be imported: ModuleNotFoundError"):
        check_logger(logger("no_such_package:Kept"))


def test_names_in_a_recipe(tmp_path: Path) -> None:
    def load(name: str) -> list[str]:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"runner: {{logger: {{logger_backends: [jsonl, '{name}']}}}}\n")
        in_memory = ("actor.model.model_path", "data.train_data_paths")
        return load_recipe(recipe, (), in_memory=in_memory).runner.logger.logger_backends

    (tmp_path / "own.py").write_text("")
    assert load("own.py:Kept") == ["jsonl", f"{tmp_path}/own.py:Kept"]
    assert load("package.module:Kept") == ["jsonl", "package.module:Kept"]
    with pytest.raises(ConfigError, match=r"wandbb(?s:.*)wandb, mlflow"):
        load("wandbb")
