"""Sections at the top that stand below another one here, as other systems print them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.config import load_recipe
from shardtune.errors import ConfigError

PRINTED = """\
model:
  model_type: "your_model_type"
  action_token_len: 7
  precision: "fp32"
tokenizer:
  tokenizer_model: somewhere
actor:
  micro_batch_size: 3
  model:
    hidden_size: 16
"""


def test_a_model_at_the_top_is_that_of_the_actor(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(PRINTED)
    recipe = load_recipe(file, ["model.precision=bf16"], files_must_exist=False)
    actor = recipe.actor
    assert (actor.model.model_type, actor.model.action_token_len, actor.model.hidden_size) == ("your_model_type", 7, 16)
    assert (actor.model.precision, actor.micro_batch_size) == ("bf16", 3)
    assert str(actor.tokenizer.tokenizer_model).endswith("somewhere")
    assert recipe.where("actor.model.action_token_len") == f"{file}:3"


def test_a_key_in_both_places_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(PRINTED + "    precision: fp64\n")
    with pytest.raises(ConfigError, match=r"model\.precision and actor\.model\.precision are the same key") as error:
        load_recipe(file, files_must_exist=False)
    assert f"{file}:4, {file}:11" in str(error.value)


def test_a_misspelt_key_there_is_found_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("model:\n  model_type: mine\n  precsion: fp32\n")
    with pytest.raises(ConfigError, match=r"unknown key model\.precsion") as error:
        load_recipe(file)
    assert f"{file}:3" in str(error.value)
