"""What a stored adapter says of itself: with `actor.model.lora.adapter_path`, its rank, scale and modules hold."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from shardtune.config.layers import Merged
from shardtune.errors import ConfigError

SECTION = "actor.model.lora"
CONFIG_FILE = "adapter_config.json"
# Our keys and PEFT's.
FIXED = {
    "r": "r",
    "alpha": "lora_alpha",
    "target_modules": "target_modules",
    "target_parameters": "target_parameters",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "modules_to_save": "modules_to_save",
}
FREE = {"dropout": "lora_dropout"}


def adopt_adapter(tree: dict[str, Any], given: Merged, base: Path, *, must_exist: bool) -> list[ConfigError]:
    """Fill in, from the adapter that a recipe starts from, the keys of `actor.model.lora` that it does not give.

    Args:
        tree: the recipe, all keys present; filled in place.
        given: what was written.
        base: what relative paths are relative to.
        must_exist: whether it is an error that the adapter is not there.

    Returns:
        What is wrong: no adapter there, or keys that say otherwise than it does.
    """
    path = tree["actor"]["model"]["lora"]["adapter_path"]
    if not isinstance(path, str) or not path:
        return []
    key = f"{SECTION}.adapter_path"
    file = Path(os.path.normpath(base / Path(path).expanduser())) / CONFIG_FILE
    try:
        stored = json.loads(file.read_text())
        found = {ours: _value(stored, theirs) for ours, theirs in {**FIXED, **FREE}.items() if theirs in stored}
    except (OSError, ValueError, TypeError) as problem:
        if not must_exist:
            return []
        reason = "is not there" if isinstance(problem, FileNotFoundError) else f"cannot be read: {problem}"
        return [
            ConfigError(
                f"{key}: {file} {reason}",
                where=given.origins.get(key),
                remedy="give a directory as PEFT saves it, or a LoRA run's final/; one on the Hub: download it first",
            )
        ]
    problems = []
    section = tree["actor"]["model"]["lora"]
    for name, value in found.items():
        written = given.given(f"{SECTION}.{name}")
        if written is None:
            section[name] = value
        elif must_exist and name in FIXED and _comparable(section[name]) != _comparable(value):
            problems.append(
                ConfigError(
                    f"{SECTION}.{name}: {section[name]!r}, but the adapter in {file.parent} has {value!r}",
                    where=given.origins.get(f"{SECTION}.{name}"),
                    remedy="leave it out: with adapter_path the adapter's own holds",
                )
            )
    return problems


def _value(stored: dict[str, Any], name: str) -> Any:
    value = stored[name]
    if isinstance(value, list):
        return sorted(value)
    if value is None and name != "r":
        return []  # of lists alone
    return float(value) if isinstance(value, int) and name in ("lora_alpha", "lora_dropout") else value


def _comparable(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else value
