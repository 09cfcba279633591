"""Recipes as nested mappings, before and after validation: read and set values by dotted key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Tree: TypeAlias = dict[str, object]
"""Section or key name to a section's `Tree` or a key's value, as YAML gives it."""


def get_value(tree: Mapping[str, object], dotted: str) -> object:
    """The value of a dotted key; None where the tree has no such key."""
    value: object = tree
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def get_section(tree: Tree, dotted: str) -> Tree:
    """The section of a dotted name (the tree itself for ""), made where it is missing."""
    for part in dotted.split(".") if dotted else []:
        inner = tree.setdefault(part, {})
        if not isinstance(inner, dict):
            raise TypeError(f"{part} of {dotted} is {inner!r}, not a section")
        tree = inner
    return tree


def set_value(tree: Tree, dotted: str, value: object) -> None:
    """Set a dotted key."""
    parent, _, name = dotted.rpartition(".")
    get_section(tree, parent)[name] = value


def take_value(tree: Tree, dotted: str) -> tuple[bool, object]:
    """Remove a key, and its section where that is all it has; whether it was there, and its value."""
    first, _, rest = dotted.partition(".")
    if first not in tree:
        return False, None
    if not rest:
        return True, tree.pop(first)
    inner = tree[first]
    if not isinstance(inner, dict):
        return False, None
    found = take_value(inner, rest)
    if found[0] and not inner:
        del tree[first]
    return found


def copied(tree: Mapping[str, object]) -> Tree:
    """The same mappings, which can be changed, with the same values."""
    return {name: copied(value) if isinstance(value, Mapping) else value for name, value in tree.items()}


def overlay(under: object, over: object) -> object:
    """Two mappings merged, with the second one's values winning at every level; otherwise the second value."""
    if not isinstance(under, Mapping) or not isinstance(over, Mapping):
        return over
    return {**under, **{name: overlay(under.get(name), value) for name, value in over.items()}}


def flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one: dotted key -> value. Lists and empty mappings are values."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{dotted}."))
        else:
            flat[dotted] = value
    return flat
