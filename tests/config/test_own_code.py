"""Code of users: what a run directory names is executed only where this user trained with it, or names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.config import Recipe
from shardtune.config.own_code import named_code, record_own_code, require_consent
from shardtune.errors import ConfigError

CONFIG = Path("runs/theirs/config.yaml")


def recipe(**model: object) -> Recipe:
    return Recipe.model_validate(
        {
            "plugins": ["/theirs/plugin.py", "a_module"],
            "runner": {
                "callbacks": ["/theirs/calls.py:One", "/theirs/calls.py:Two"],
                "logger": {"logger_backends": ["jsonl", "their.package:Tracker"]},
            },
            "actor": {"model": {"model_path": "/theirs/model", "adapter": "/theirs/adapter.py:Mine", **model}},
            "eval": {"match": "exact", "environment": "reach"},
        }
    )


ALL = {
    "/theirs/plugin.py": "plugins",
    "a_module": "plugins",
    "/theirs/adapter.py": "actor.model.adapter",
    "/theirs/calls.py": "runner.callbacks",
    "their.package:Tracker": "runner.logger.logger_backends",
}


def test_all_code_that_a_recipe_names() -> None:
    assert named_code(recipe()) == ALL
    remote = {"/theirs/model": "actor.model.trust_remote_code"}
    assert named_code(recipe(trust_remote_code=True)) == {**ALL, **remote}
    assert named_code(Recipe()) == {}


def test_consent_names_each_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"--trust /theirs/plugin.py --trust a_module --trust /theirs/ad") as told:
        require_consent(recipe(), [], CONFIG)
    assert told.value.where == str(CONFIG)
    with pytest.raises(ConfigError, match=r"trained with: /theirs/calls.py \(runner.callbacks\)\n"):
        require_consent(recipe(), ALL.keys() - {"/theirs/calls.py"}, CONFIG)
    require_consent(recipe(), ALL, CONFIG)
    monkeypatch.chdir("/")
    require_consent(
        recipe(),
        ["their.package:Tracker", "theirs/plugin.py", "a_module", "theirs/adapter.py", "./theirs/calls.py"],
        CONFIG,
    )


def test_consent_to_what_is_not_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    record_own_code(recipe())
    with pytest.raises(ConfigError, match=r"plugins.py is no code that .* names") as told:
        require_consent(recipe(), ["/theirs/plugin.py", "plugins.py"], CONFIG)
    assert told.value.where == "--trust plugins.py"
    assert "named there: /theirs/plugin.py, a_module" in str(told.value.remedy)


def test_who_trained_with_it_needs_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    record_own_code(recipe())
    require_consent(recipe(), [], CONFIG)
    with pytest.raises(ConfigError, match="/theirs/model"):
        require_consent(recipe(trust_remote_code=True), [], CONFIG)
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/nowhere")
    record_own_code(recipe())
    with pytest.raises(ConfigError, match="a_module"):
        require_consent(recipe(), [], CONFIG)
