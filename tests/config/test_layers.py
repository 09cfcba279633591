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


ROBOT = """\
model: {model_type: vision_language_action, model_path: m, add_value_head: true, value_head: {weight: 0.5}}
data:
  train_data_paths: a.jsonl
  augmentation: {random_affine: {degrees: 5}, color_jitter: {hue: 0.1}}
optim:
"""


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("data.augmentation=null", {"hue": 0.0, "degrees": 0.0, "weight": 0.5}),
        ("data.augmentation.color_jitter=null", {"hue": 0.0, "degrees": 5, "weight": 0.5}),
        ("actor.model.value_head=null", {"hue": 0.1, "degrees": 5, "weight": 1.0}),
        ("data={train_data_paths: b.jsonl, augmentation: null}", {"hue": 0.0, "degrees": 0.0, "weight": 0.5}),
    ],
)
def test_an_override_takes_back_what_the_recipe_gives_in_a_section(
    tmp_path: Path, override: str, kept: dict[str, float]
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(ROBOT)
    recipe = load_recipe(file, [override], files_must_exist=False)
    drawn = recipe.data.augmentation
    values = (drawn.color_jitter.hue, drawn.random_affine.degrees, recipe.actor.model.value_head.weight)
    assert dict(zip(kept, values, strict=True)) == kept
    later = load_recipe(file, [override, "data.augmentation.random_affine.shear=3"], files_must_exist=False)
    assert later.data.augmentation.random_affine.shear == 3


def test_an_override_by_an_empty_section_is_refused_where_it_would_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(ROBOT)
    with pytest.raises(
        ConfigError, match=r"data\.augmentation is overridden by an empty section.*random_affine"
    ) as error:
        load_recipe(file, ["data.augmentation={}"], files_must_exist=False)
    assert "'data.augmentation=null' sets all keys" in str(error.value)
    load_recipe(file, ["optim={}"], files_must_exist=False)
