"""A recipe as a config: it turns back into the recipe, and error messages keep the places of its keys."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from shardtune.config import load_recipe
from shardtune.config.recipe_config import as_dict_config
from shardtune.errors import ConfigError
from shardtune.run.choose_worker import make_worker
from tests.training.worker import test_base as own

YAML = """\
actor:
  micro_batch_size: 2
  global_batch_size: 8
  worker: {file}:Typed
  model:
    precision: fp64
    val_micro_batch_size: 4
    options:
      width: 3
      dept: 2
runner:
  device: cpu
"""


class Typed(own.Task):
    class Options(BaseModel):
        width: int = 1
        depth: int = 1

    def __init__(self, cfg: Any) -> None:  # as the documents print it
        super().__init__(cfg)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "recipe.yaml"
    made.write_text(YAML.format(file=__file__))
    return made


def test_a_message_raised_in_a_users_worker_names_file_and_line(file: Path) -> None:
    with pytest.raises(ConfigError) as error:
        make_worker(load_recipe(file))
    assert error.value.where == f"{file}:8"


def test_an_unchanged_config_is_the_recipe(file: Path) -> None:
    recipe = load_recipe(file)
    config = as_dict_config(recipe)
    assert load_recipe(config) is recipe
    assert load_recipe(pickle.loads(pickle.dumps(config))) == recipe
    assert load_recipe(copy.deepcopy(config)) == recipe


def test_a_changed_config_is_read_again(file: Path) -> None:
    config = as_dict_config(load_recipe(file))
    config.actor.global_batch_size = 16
    changed = load_recipe(config)
    assert changed.actor.global_batch_size == 16
    assert changed.where("actor.global_batch_size") == "recipe"
    assert changed.where("actor.model.precision") == f"{file}:6"
    config.actor.globl = 1
    with pytest.raises(ConfigError, match=r"unknown key actor\.globl"):
        load_recipe(config)


def test_a_key_with_two_places_is_read_in_both(file: Path) -> None:
    """A loader with batch_size=None would yield single rows."""
    recipe = load_recipe(file)
    assert recipe.actor.model.val_micro_batch_size is None
    model = as_dict_config(recipe).actor.model
    assert (model.micro_batch_size, model.val_micro_batch_size) == (2, 4)
    assert "val_micro_batch_size: null" in recipe.to_yaml()
    assert load_recipe(recipe.to_dict(), ["actor.eval_micro_batch_size=1"]).actor.eval_micro_batch_size == 1
