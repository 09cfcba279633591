"""What makes all layouts of a recipe compute the same numbers: fp64, and no draws that depend on the layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from shardtune.config import Recipe
from shardtune.verify.result import Skipped

CLOSE = 1e-10
"""The relative difference allowed between numbers in fp64: far above rounding, below any fault."""
DROPOUT_KEYS = ("dropout", "pdrop")
"""In the names of a configuration's settings."""
LOSSY = {"nf4": "actor.model.lora.base_dtype: nf4 rounds frozen weights to four bits, in bf16 or fp32 alone"}


def in_fp64(recipe: Recipe) -> tuple[dict[str, object], list[str]]:
    """Changes to a recipe that make its numbers comparable over layouts, and what they leave out.

    Raises:
        Skipped: the recipe cannot be computed in fp64.
    """
    actor = recipe.actor
    lora = actor.model.lora
    if actor.model.is_lora and lora.base_dtype == "nf4":
        raise Skipped(f"{LOSSY['nf4']}: set lora.base_dtype=auto to check the rest")
    changes: dict[str, object] = {"actor.model.precision": "fp64", "actor.optim.state_dtype": "fp32"}
    notes = []
    if actor.optim.state_dtype != "fp32":
        notes.append(f"optimizer states in full precision instead of {actor.optim.state_dtype}")
    for section, key in (("kernels", "source"), ("fp8", "scaling")):
        if actor.model.model_dump(exclude_defaults=True).get(section, {}).get(key) is not None:
            changes[f"actor.model.{section}"] = {}
            notes.append(f"actor.model.{section} off")
    if actor.model.is_lora:
        changes["actor.model.lora.base_dtype"] = "auto"
        if lora.dropout:
            changes["actor.model.lora.dropout"] = 0.0
            notes.append("LoRA's dropout off")
    if recipe.data.augmentation.is_on:
        changes["data.augmentation"] = {}
        notes.append("data.augmentation off")
    dropped = dropouts(actor.model.model_path, actor.model.config_overrides)
    if dropped:
        changes["actor.model.config_overrides"] = {**actor.model.config_overrides, **dict.fromkeys(dropped, 0.0)}
        notes.append(f"{', '.join(dropped)} off")
    return changes, notes


def dropouts(model_path: str | None, overrides: Mapping[str, object]) -> list[str]:
    """The settings of dropout of a model in a local directory that are not 0; what it draws depends on the layout."""
    file = Path(model_path or "") / "config.json"
    stored = json.loads(file.read_text()) if model_path and file.is_file() else {}
    settings: dict[str, object] = {**stored, **overrides}
    return sorted(
        name
        for name, value in settings.items()
        if any(part in name for part in DROPOUT_KEYS) and isinstance(value, float) and value > 0
    )
