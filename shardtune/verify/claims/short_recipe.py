"""A user's recipe, shortened: few steps, an epoch that ends within them, no effects outside of a folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardtune.config import Recipe, load_recipe
from shardtune.config.tree import get_value, set_value

STEPS = 6
"""Optimizer steps of a shortened run, unless `--steps` gives another number."""
STEPS_PER_EPOCH = 2.5
"""About so many steps are an epoch of a shortened run: it ends within the run, with a step that is not full."""
SHORT_ROW = 8
"""Where steps are cut by tokens, a row is taken to have this part of `data.max_length`."""
ALONE: Mapping[str, object] = {
    "runner.max_epochs": -1,
    "runner.resume_dir": "auto",
    "runner.overwrite": False,
    "runner.save_interval": 1,
    "runner.keep_last": 1_000_000,
    "runner.keep_every": None,
    "runner.eval_interval": -1,
    "runner.eval_before_training": False,
    "runner.early_stop.enabled": False,
    "runner.best.monitor": None,
    "runner.callbacks": [],
    "runner.profile_steps": [],
    "runner.push_to_hub": None,
    "runner.launcher": "local",
    "runner.num_ranks": None,
    "runner.max_restarts": 0,
    "runner.min_ranks": None,
    "runner.master_port": None,
    "runner.logger.logger_backends": ["jsonl"],
    "runner.logger.log_interval": 1,
    "runner.logger.rank_logs": False,
    "data.eval_data_paths": None,
    "eval.generate": False,
    "eval.metrics": [],
    "eval.harness": [],
    "eval.environment": None,
}
"""What a shortened run sets: it saves after each step, evaluates nothing and reports nowhere."""


OF_USERS = ("runner.callbacks", "eval.metrics", "eval.environment")
"""The keys of `ALONE` that name code of the user's."""


def notes_on(recipe: Recipe) -> list[str]:
    """A sentence about code of the user's that no shortened run calls; nothing where there is none."""
    values = recipe.to_dict()
    given = {key: value for key in OF_USERS if (value := get_value(values, key))}
    named = [f"{key} ({', '.join(v) if isinstance(v, list) else v})" for key, v in given.items()]
    return [f"the shortened runs do not call {', '.join(named)}"] if named else []


def shortened(
    recipe: Recipe,
    folder: Path,
    name: str,
    steps: int,
    ranks: int,
    changes: Mapping[str, object],
    *,
    fewer_rows: bool,
) -> Recipe:
    """The recipe of a shortened run.

    Args:
        recipe: the user's.
        folder: of the run directory.
        name: of the run directory.
        steps: optimizer steps.
        ranks: on this machine.
        changes: further values by dotted key, over all others.
        fewer_rows: whether the rows are cut; a loader of the user's reads what it reads.
    """
    values = recipe.to_dict()
    own: dict[str, object] = {
        "runner.max_steps": steps,
        "runner.nproc_per_node": ranks,
        "runner.logger.log_path": str(folder),
        "runner.logger.experiment_name": name,
    }
    if fewer_rows:
        own["data.train_data_paths"] = _fewer_rows(recipe)
    for dotted, value in {**ALONE, **own, **changes}.items():
        set_value(values, dotted, value)
    return load_recipe(values)


def _fewer_rows(recipe: Recipe) -> object:
    """The training data as entries that hold about `STEPS_PER_EPOCH` steps of rows together."""
    paths = recipe.data.train_data_paths
    given = [] if paths is None else [paths] if not isinstance(paths, Sequence) or isinstance(paths, str) else paths
    entries: list[dict[str, Any]] = [
        {"path": entry} if isinstance(entry, str) else entry.model_dump() for entry in given
    ]
    rows = math.ceil(rows_of_a_step(recipe) * STEPS_PER_EPOCH / (1.0 - recipe.data.eval_split))
    share = max(1, math.ceil(rows / max(1, len(entries))))
    for entry in entries:
        entry["max_samples"] = min(entry.get("max_samples") or share, share)
    return entries


def rows_of_a_step(recipe: Recipe) -> int:
    """The rows of an optimizer step; estimated where steps are cut by tokens."""
    actor = recipe.actor
    if actor.global_batch_tokens:
        return max(1, actor.global_batch_tokens * SHORT_ROW // recipe.data.max_length)
    return actor.global_batch_size or 1
