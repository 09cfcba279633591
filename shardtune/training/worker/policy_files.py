"""What a directory with a policy's weights needs to act without its run: the settings of the model, and its code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtune.config import Recipe
from shardtune.config.recipe_file import read_stored
from shardtune.config.values import FUNCTION_IN_FILE
from shardtune.models.action.acting import ActingAdapter
from shardtune.models.adapter import Adapter

POLICY_FILE = "policy.json"
"""Beside the weights: the parts of the run's recipe that describe the model and its input."""
KEPT: Mapping[str, tuple[str, ...]] = {
    "runner": ("seed",),  # a low-rank adapter may stand on weights that are drawn
    "actor": ("model", "tokenizer", "worker"),
    "data": (
        *("chat_template", "template_kwargs", "on_prompt_mismatch", "system_prompt", "max_length", "on_too_long"),
        *("train_on", "thinking", "ignored_keys"),
    ),
    "eval": ("action_steps", "temporal_ensembling"),
}
"""The keys of the recipe, by section. Data, optimizer and machine have no part in it."""


def policy_files(recipe: Recipe, adapter: Adapter) -> dict[str, object]:
    """The files of a model that acts: JSON, or bytes of the file of its code, by name; empty for any other model.

    References to the environment stay as they are written.
    """
    if not isinstance(adapter, ActingAdapter):
        return {}
    tree: dict[str, Any] = read_stored(recipe.to_yaml())
    kept = {section: {key: tree[section][key] for key in keys} for section, keys in KEPT.items()}
    kept["actor"]["model"] |= {"compile": False, "action_normalization_mask": None, **adapter.acting_settings()}
    found: dict[str, object] = {POLICY_FILE: {"plugins": tree["plugins"], **kept}}
    code = FUNCTION_IN_FILE.fullmatch(recipe.actor.model.adapter or "")
    if code is not None and Path(code["file"]).is_file():
        found[Path(code["file"]).name] = Path(code["file"]).read_bytes()
    return found
