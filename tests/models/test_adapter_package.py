"""A package with an adapter, installed with pip, is found by its name: the files that docs/add-a-model.md prints."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardtune.config import model_names
from tests.support.doc_blocks import blocks
from tests.support.workspace import run_cli, write_rows

NAME = "houses-packaged"
RECIPE = f"""\
actor:
  model: {{model_type: {NAME}, options: {{width: 4}}, precision: fp32}}
data: {{train_data_paths: houses.jsonl, num_workers: 0, cache_dir: cache}}
runner: {{max_steps: 2, logger: {{log_path: runs}}}}
"""


def printed(file: str) -> str:
    """A file as the page prints it."""
    return next(block.text for block in blocks("python", "toml") if block.file == file)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package in it, as pip lays it out."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(printed("pyproject.toml"))
    (source / "houses_model.py").write_text(printed("houses.py"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    ran = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return target


@pytest.fixture
def reader(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of somebody who has installed the package."""
    monkeypatch.syspath_prepend(str(installed))
    importlib.invalidate_caches()
    monkeypatch.setattr(model_names, "_registered", {})
    monkeypatch.chdir(tmp_path)
    rows = [{"rooms": n % 5 + 1, "area": 0.1 * n, "price": 0.3 * n} for n in range(12)]
    write_rows(tmp_path / "houses.jsonl", rows)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def test_it_is_listed_without_being_imported(reader: Path):
    listed = run_cli("models")
    assert listed.code == 0
    assert f"{NAME}: houses_model:Houses of houses-model 1.0\n" in listed.out
    assert "causal_lm: " in listed.out
    assert "houses_model" not in sys.modules or NAME not in model_names._registered


def test_it_trains_by_its_name(reader: Path):
    outcome = run_cli("train", "recipe.yaml")
    assert outcome.code == 0, outcome.err
    assert (reader / "runs" / "recipe" / "final" / "model.safetensors").is_file()
    evaluated = run_cli("eval", "runs/recipe", "data.eval_data_paths=houses.jsonl")
    assert evaluated.code == 0, evaluated.err
    assert "eval/close" in evaluated.out


def test_two_ranks_find_it_too(reader: Path, installed: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=os.pathsep)
    outcome = run_cli("train", "recipe.yaml", "runner.nproc_per_node=2", "runner.logger.experiment_name=two")
    assert outcome.code == 0, outcome.err
    alone = run_cli("train", "recipe.yaml")
    assert alone.code == 0, alone.err
    losses = [json.loads(line)["train/loss"] for line in logged(reader / "runs" / "two")]
    expected = [json.loads(line)["train/loss"] for line in logged(reader / "runs" / "recipe")]
    assert losses == pytest.approx(expected, rel=1e-5)


def logged(run: Path) -> list[str]:
    """The lines of a run's steps."""
    return [line for line in (run / "metrics.jsonl").read_text().splitlines() if "train/loss" in line]


@pytest.mark.parametrize("begun", [False, True])
def test_its_options_are_checked(reader: Path, begun: bool):
    if begun:
        assert run_cli("train", "recipe.yaml", "runner.max_steps=1").code == 0
        changed = run_cli("train", "recipe.yaml", "runner.max_steps=1", "++actor.model.options.width=3")
        assert changed.code == 2
        assert "the recipe is not the one this run was made with" in changed.err
    outcome = run_cli("train", "recipe.yaml", "++actor.model.options.widht=3")
    assert outcome.code == 2
    assert "actor.model.options.widht is not an option of this model" in outcome.err
    assert "did you mean width?" in outcome.err


def test_a_name_that_nobody_has_lists_those_that_there_are(reader: Path):
    outcome = run_cli("train", "recipe.yaml", "actor.model.model_type=houses-pakcaged")
    assert outcome.code == 2
    assert NAME in outcome.err


def test_what_a_plugin_registers_is_listed_too(reader: Path):
    (reader / "plugin.py").write_text(
        "import shardtune\n\n@shardtune.register_model('of-a-plugin')\ndef make(cfg):\n    return None\n"
    )
    (reader / "with_plugin.yaml").write_text("plugins: [plugin.py]\n" + RECIPE)
    listed = run_cli("models", "with_plugin.yaml")
    assert listed.code == 0, listed.err
    assert f"of-a-plugin: function make in {reader / 'plugin.py'}" in listed.out
