"""The recipe of a run, read again for what is done with its model later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardtune.config.loading import load_recipe
from shardtune.config.schema import Recipe
from shardtune.config.tree import get_value

MAY_BE_ABSENT = ("actor.model.model_path", "data.train_data_paths", "data.eval_data_paths")
"""The keys that may be absent from the recipe of a run: it may have been trained with objects in memory."""


def stored_recipe(values: Mapping[str, Any], overrides: Sequence[str] = (), *, splits: object = None) -> Recipe:
    """The recipe with these values, without its files, and without what was passed as an object in training.

    Args:
        values: of the recipe of a run, or made from them.
        overrides: `key=value` on top.
        splits: the share of the training rows that is held out, where `overrides` name another; None: that of `values`.

    Raises:
        ConfigError: a value cannot be used.
    """
    splits = get_value(values, "data.eval_split") if splits is None else splits
    absent = MAY_BE_ABSENT[:2] if splits else MAY_BE_ABSENT  # a split and evaluation rows in memory exclude each other
    return load_recipe(values, overrides, in_memory=absent, files_must_exist=False)
