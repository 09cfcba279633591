"""Secrets and other values of the environment: a stored recipe keeps the reference, and a later value is compared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardtune.config import Recipe, load_recipe
from shardtune.config.environment import digests, is_value, variables
from shardtune.errors import CheckpointError
from shardtune.run.preflight import take_inventory
from shardtune.run.resume_check import check_changes
from shardtune.training.experiment.services import SERVICES
from shardtune.training.loggers import open_tracker

TEXT = """\
runner:
  logger: {project_name: "${oc.env:TOKEN}", log_path: "${oc.env:OUT}/runs"}
actor:
  global_batch_size: ${oc.decode:${oc.env:ROWS}}
  model: {model_path: "${oc.env:OUT}/model"}
  optim: {lr: "${oc.env:LR}", args: {eps: 1.0e-7, name: "${oc.env:TOKEN}"}}
data:
  train_data_paths: [{path: "${oc.env:DATA}/a.jsonl", weight: 2.0}, "b \\\\${x}.jsonl"]
  chat_template: chatml
  cache_dir: ${oc.env:CACHE}
"""
VALUES = {"TOKEN": "geheim", "ROWS": "8", "LR": "1e-5", "OUT": "/out", "DATA": "data", "CACHE": "~/cache"}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """Load the recipe in an environment."""
    (tmp_path / "recipe.yaml").write_text(TEXT)

    def load(path: Path = tmp_path / "recipe.yaml", *overrides: str, **values: str) -> Recipe:
        for name, value in {**VALUES, **values}.items():
            monkeypatch.setenv(name, value)
        return load_recipe(path, overrides, files_must_exist=False)

    return load


def test_a_stored_recipe_keeps_references_and_loads_back(load: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = load()
    assert recipe.runner.logger.project_name == "geheim"
    text = recipe.to_yaml()
    assert not [value for value in ("geheim", "1e-5", "1.0e-05", "/out") if value in text]
    stored = yaml.safe_load(text)
    assert stored["runner"]["logger"] == {
        **stored["runner"]["logger"], "project_name": "${oc.env:TOKEN}", "log_path": "${oc.env:OUT}/runs"
    }  # fmt: skip
    assert stored["data"]["train_data_paths"][0]["path"] == f"{tmp_path}/${{oc.env:DATA}}/a.jsonl"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(text)
    again = load(tmp_path / "run" / "config.yaml")
    assert again == recipe
    assert again.to_yaml() == text
    elsewhere = load(tmp_path / "run" / "config.yaml", OUT="/other")
    assert elsewhere.actor.model.model_path == "/other/model"
    assert variables(recipe.references) == set(VALUES)


def test_what_a_reference_refers_to_is_not_stored_either(load: Callable[..., Recipe], tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(TEXT + "plugins: ['${runner.logger.project_name}.py', '${data.max_length}.py']")
    text = load(tmp_path / "b.yaml").to_yaml()
    assert "geheim" not in text
    assert f"{tmp_path}/${{runner.logger.project_name}}.py" in text


def test_another_value_is_noticed_when_the_run_goes_on(load: Callable[..., Recipe], tmp_path: Path) -> None:
    recorded = (lambda recipe: digests(recipe.to_dict(), recipe.references))(load())
    assert "geheim" not in json.dumps(recorded)
    assert check_changes(load(), load(), tmp_path, recorded) == ()
    now = load(LR="1e-4")
    with pytest.raises(CheckpointError, match=re.escape("actor.optim.lr: what ${oc.env:LR} was -> ${oc.env:LR}")):
        check_changes(load(LR="1e-4"), now, tmp_path, recorded)
    assert check_changes(load(TOKEN="other"), load(TOKEN="other"), tmp_path, {
        key: value for key, value in recorded.items() if key != "actor.optim.args"}) == ()  # fmt: skip
    allowed = load(tmp_path / "recipe.yaml", "runner.allow_changes=[actor.optim.lr]", LR="1e-4")
    (note,) = check_changes(load(LR="1e-4"), allowed, tmp_path, recorded)
    assert note.startswith("actor.optim.lr: what ${oc.env:LR} was")
    assert is_value(recorded["actor.optim.lr"], 1e-5)


def test_ranks_and_trackers_get_no_value(
    load: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = take_inventory(load()).recipe, take_inventory(load(LR="1e-4")).recipe
    assert "geheim" not in json.dumps(first)
    assert {key for key in first if first[key] != other[key]} == {"actor.optim.lr (hashed)"}
    seen: list[Any] = []
    monkeypatch.setitem(SERVICES, "wandb", lambda run: seen.append(run.recipe))
    logger = load().runner.logger.model_copy(update={"logger_backends": ["wandb"]})
    open_tracker(tmp_path, logger, config=load().to_stored(), done=-1)
    assert "geheim" not in json.dumps(seen)
