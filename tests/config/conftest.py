"""A small recipe on disk, and a way to load it with overrides."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shardtune.config import Recipe, load_recipe

RECIPE = """\
actor:
  model:
    model_path: org/model
data:
  train_data_paths: train.jsonl
"""


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def load(recipe_path: Path) -> Callable[..., Recipe]:
    """Load the small recipe with overrides."""
    return lambda *overrides, **options: load_recipe(recipe_path, overrides, **options)


@pytest.fixture
def load_text(tmp_path: Path) -> Callable[..., Recipe]:
    """Load a recipe from its text."""

    def load(text: str, *overrides: str) -> Recipe:
        (tmp_path / "mine.yaml").write_text(text)
        return load_recipe(tmp_path / "mine.yaml", overrides)

    return load
