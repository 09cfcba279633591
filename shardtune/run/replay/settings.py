"""The settings with which a step was trained, where the run was continued with others after it."""

from __future__ import annotations

from shardtune.config import Recipe, flatten, load_recipe
from shardtune.config.stored_recipe import stored_recipe
from shardtune.config.tree import get_value, set_value
from shardtune.run.identity import read_manifest
from shardtune.run.replay.record import Record
from shardtune.run.resume_check import has_moved, is_free

OF_THE_CUT = (
    "actor.training_backend",
    "actor.micro_batch_size",
    "actor.max_tokens_per_micro_batch",
    "actor.fill_micro_batches",
    "actor.parallel",
)
"""Keys that a continuation is free to change, and on which what dropout draws depends."""


def settings_of(recipe: Recipe, record: Record, step: int) -> Recipe:
    """The recipe of a run as it was at a step; where that is not known, as it was last.

    A checkpoint holds the recipe with which the run was going on as it was saved. Places on disk, and all else that no
    number depends on, are those of today.

    Args:
        recipe: of the run, as it was last.
        record: of the run.
        step: of the run.
    """
    file = record.recipe_at(step)
    if file is None:
        return recipe
    in_memory = read_manifest(record.run_dir).get("in_memory", [])
    then = load_recipe(file, in_memory=in_memory, files_must_exist=False).to_dict()
    before, now, today = flatten(then), flatten(recipe.to_dict()), recipe.to_dict()
    kept = {
        key
        for key, value in now.items()
        if key in before and (has_moved(before[key], value) or (is_free(key) and not key.startswith(OF_THE_CUT)))
    }
    for key in kept:
        set_value(then, key, get_value(today, key))
    return recipe if then == today else stored_recipe(then)
