"""A run's recipe with overrides, for what is done with its model later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shardtune.config import Recipe
from shardtune.config.checks.context import enumerated
from shardtune.config.overrides import read_overrides
from shardtune.config.stored_recipe import stored_recipe
from shardtune.config.tree import get_value, set_value
from shardtune.errors import ConfigError

PATHS, SPLIT = "data.eval_data_paths", "data.eval_split"


def overridden(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """A run's recipe with overrides; evaluation rows that they choose replace those that the run's recipe chooses.

    Raises:
        ConfigError: an override cannot be used.
    """
    if not overrides:
        return recipe
    values = recipe.to_dict()
    layers = read_overrides(overrides).values
    typed = [layer.tree for layer in layers]
    paths, split = ([value for tree in typed if (value := get_value(tree, key)) is not None] for key in (PATHS, SPLIT))
    if paths and not split:
        set_value(values, SPLIT, 0.0)
    elif any(split) and not paths:
        set_value(values, PATHS, None)
    rows = get_value(values, PATHS)
    if any(layer.named.startswith(f"{PATHS}.") for layer in layers) and not _named_sets(rows):
        set_value(values, PATHS, None)
    return stored_recipe(values, overrides, splits=split[-1] if split else None)


def _named_sets(rows: object) -> bool:
    return isinstance(rows, dict) and "path" not in rows


def require_kept(run: Recipe, asked: Recipe, made: Recipe, directory: Path) -> None:
    """Refuse what was changed in a run's recipe and is not taken, as an exported directory has its own.

    Args:
        run: the recipe.
        asked: with overrides.
        made: over the directory.
        directory: with a configuration and a tokenizer.

    Raises:
        ConfigError: overrides have no effect.
    """
    lost = list(_lost(run.to_dict(), asked.to_dict(), made.to_dict()))
    if lost:
        verb = "has" if len(lost) == 1 else "have"
        raise ConfigError(
            f"{enumerated([key.removeprefix('actor.') for key in lost])} {verb} no effect on {directory}, which has "
            "its own settings",
            where=f"override {lost[0]}",
            remedy="leave it out, or take a checkpoint, which the recipe builds: --checkpoint latest",
        )


def _lost(was: object, asked: object, made: object, name: str = "") -> Iterator[str]:
    """The dotted keys whose values were changed and are not those of the last tree."""
    if isinstance(asked, Mapping) and asked:
        for key, value in asked.items():
            before, after = (tree.get(key) if isinstance(tree, Mapping) else None for tree in (was, made))
            yield from _lost(before, value, after, f"{name}.{key}" if name else key)
    elif was != asked != made:
        yield name
