"""The settings of a saved LoRA adapter, which replace those of the recipe that starts from it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardtune.config.layers import Merged
from shardtune.config.parameter_patterns import is_pattern
from shardtune.config.shown import as_written
from shardtune.config.tree import Tree, get_section
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
    "exclude_modules": "exclude_modules",
    "layers_to_transform": "layers_to_transform",
    "layers_pattern": "layers_pattern",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
}
EMPTY: dict[str, object] = {"layers_to_transform": None, "rank_pattern": {}, "alpha_pattern": {}}
"""What stands for null in PEFT's file; for the other keys it is an empty list."""
FREE = {"dropout": "lora_dropout"}
NAMING = ("target_modules", "modules_to_save")
"""The keys that name modules, in a recipe by endings or patterns."""
OF_EVERY_METHOD = ("target_modules", "modules_to_save", "exclude_modules", "layers_to_transform", "layers_pattern")
PATTERNS = ("rank_pattern", "alpha_pattern")
"""The keys that give values to modules by patterns, of which the first that matches decides."""
LORA = "LORA"
ALL_LINEAR = "all-linear"


def adopt_adapter(tree: Tree, given: Merged, base: Path, *, must_exist: bool) -> list[ConfigError]:
    """Fill in, from the adapter that a recipe starts from, the keys of `actor.model.lora` that it does not give.

    Args:
        tree: the recipe, all keys present; filled in place.
        given: the keys that were given.
        base: the directory of relative paths.
        must_exist: whether a missing adapter is an error.

    Returns:
        What is wrong: there is no adapter, or the recipe gives keys other values than it has.
    """
    section = get_section(tree, SECTION)
    path = section["load_from"]
    if not isinstance(path, str) or not path:
        return []
    key = f"{SECTION}.load_from"
    file = Path(os.path.normpath(base / Path(path).expanduser())) / CONFIG_FILE
    try:
        stored: Mapping[str, object] = json.loads(file.read_text())
        method = str(stored.get("peft_type") or LORA)
        keys = {**FIXED, **FREE} if method == LORA else {name: name for name in OF_EVERY_METHOD}
        found = {ours: _value(stored, theirs) for ours, theirs in keys.items() if theirs in stored}
        found |= {"peft": {"peft_type": method}} if method != LORA else {}
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
    modules = [name for key in ("target_modules", "target_parameters") for name in _listed(found.get(key))]
    for name, value in found.items():
        written = given.given(f"{SECTION}.{name}")
        if written is None:
            section[name] = value
        elif must_exist and name not in FREE and not _may_agree(name, section[name], value, modules):
            problems.append(
                ConfigError(
                    f"{SECTION}.{name}: {as_written(section[name])}, but the adapter in {file.parent} has "
                    f"{as_written(value)}",
                    where=given.origins.get(f"{SECTION}.{name}"),
                    remedy="leave it out: with load_from, the adapter's own value is used",
                )
            )
    return problems


def _value(stored: Mapping[str, object], name: str) -> object:
    value = stored[name]
    if name != "r" and (value is None or value in ("", [], {})):
        return EMPTY.get(name, [])
    if isinstance(value, list):
        return sorted(value)
    return float(value) if isinstance(value, int) and name in ("lora_alpha", "lora_dropout") else value


def _may_agree(name: str, given: object, stored: object, modules: Sequence[str]) -> bool:
    """Whether a recipe may say what a stored adapter does.

    Modules are stored by their full names. A recipe that gives endings or a pattern for all of these may mean others of
    the model as well, which is checked once there is a model (`shardtune.models.lora.attach`). Patterns for values are
    stored as full names where their order matters.

    Args:
        name: the key.
        given: its value in the recipe.
        stored: in the adapter.
        modules: what the adapter adapts.
    """
    if _comparable(given) == _comparable(stored):
        return True
    if name in PATTERNS and isinstance(given, dict) and isinstance(stored, dict):
        return _same_values(given, stored, modules)
    if name not in NAMING or not isinstance(stored, list) or not stored:
        return False
    if isinstance(given, str) and (given == ALL_LINEAR or is_pattern(given)):
        return given == ALL_LINEAR or _matches_all(given, stored)
    endings = given if isinstance(given, list) else [given]
    found = {ending: [each for each in stored if f".{each}".endswith(f".{ending}")] for ending in endings}
    covered = {each for matched in found.values() for each in matched} == set(stored)
    return all(found.values()) and (covered or name == "modules_to_save")  # which has modules of shared weights, too


def _matches_all(pattern: str, names: list[str]) -> bool:
    """Whether a pattern matches each of these names; one that does not compile is refused where keys are checked."""
    try:
        return all(re.fullmatch(pattern, name) for name in names)
    except re.error:
        return True


def _same_values(given: Mapping[str, object], stored: Mapping[str, object], modules: Sequence[str]) -> bool:
    """Whether the patterns of both give each module the same value, and each pattern decides about one of them."""
    try:
        one, other = (
            [next((key for key in patterns if re.match(rf"(.*\.)?({key})$", name)), None) for name in modules]
            for patterns in (given, stored)
        )
    except re.error:
        return True
    used = given.keys() <= {*one} and stored.keys() <= {*other}
    return used and [given.get(str(key)) for key in one] == [stored.get(str(key)) for key in other]


def _listed(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _comparable(value: object) -> object:
    return sorted(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else value
