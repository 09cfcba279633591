"""Paths in overrides, which start at the working directory, as any other path that is typed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from shardtune.config.layers import Layer
from shardtune.config.paths import exists, make_absolute
from shardtune.config.tree import flatten
from shardtune.config.values import FUNCTION_IN_FILE
from shardtune.errors import ConfigError

TYPED = ("override ", "config group ")
"""How the origin of a layer of the command line begins."""


def from_working_directory(layer: Layer, beside: Path) -> Layer:
    """A layer whose paths are absolute if it was typed; any other as it is.

    Args:
        layer: under our names. References (`${…}`) are not resolved in it; a value with one is left as it is.
        beside: the recipe's own directory.

    Raises:
        ConfigError: a path that is not in the working directory, but beside the recipe.
    """
    if not layer.origin.startswith(TYPED) or "${" in str(layer.tree):
        return layer
    here = _absolute(layer, Path.cwd())
    if Path.cwd() != beside:
        _check_place(flatten(here), flatten(_absolute(layer, beside)), layer)
    return replace(layer, tree=here)


def _absolute(layer: Layer, base: Path) -> dict[str, object]:
    tree = deepcopy(dict(layer.tree))
    make_absolute(tree, base, dict.fromkeys(flatten(tree), layer.origin))
    return tree


def _check_place(here: Mapping[str, object], beside: Mapping[str, object], layer: Layer) -> None:
    for name, value in here.items():
        for path, other in zip(_files(value), _files(beside[name]), strict=True):
            if path != other and not exists(Path(path)) and exists(Path(other)):
                raise ConfigError(
                    f"{name}: there is no {path} in the working directory, where a path that is typed starts; there is "
                    "one beside the recipe",
                    where=layer.origin,
                    remedy=f"type {os.path.relpath(other)}",
                )


def _files(value: object) -> list[str]:
    """The texts in a value, those of file.py:name without the name."""
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _files(item)]
    if isinstance(value, list):
        return [text for item in value for text in _files(item)]
    if not isinstance(value, str):
        return []
    found = FUNCTION_IN_FILE.fullmatch(value)
    return [found["file"] if found else value]
