"""Which dimensions of an action are normalised, as `actor.model.action_normalization_mask` says."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardtune.errors import ConfigError

MASK_KEY = "actor.model.action_normalization_mask"
TOLERANCE = 0.01
"""How far beyond [-1, 1] a value may lie that is not normalised before it becomes a token."""

GivenMask = Sequence[bool] | Mapping[str, bool]
"""One truth value per dimension, or those of some dimensions by name or number."""


def chosen_mask(given: GivenMask, section: Mapping[str, Any], default: Sequence[bool], dataset: str) -> list[bool]:
    """The mask of a data set's actions.

    Args:
        given: the recipe's.
        section: the statistics of its actions, with `names` where the data set names its dimensions.
        default: the mask of dimensions that are not given.
        dataset: its name, for errors.

    Raises:
        ConfigError: there are not so many dimensions, or none of that name.
    """
    if not isinstance(given, Mapping):
        if len(given) != len(default):
            raise ConfigError(
                f"{MASK_KEY} has {len(given)} values, an action of {dataset} has {len(default)} dimensions",
                where=MASK_KEY,
                remedy="give one per dimension, or some by name or number: {6: false}",
            )
        return list(given)
    names, mask = list(section.get("names") or ()), list(default)
    for name, value in given.items():
        mask[_place(name, names, len(mask), dataset)] = value
    return mask


def _place(name: str, names: Sequence[str], size: int, dataset: str) -> int:
    if name in names:
        return names.index(name)
    number = int(name) if name.removeprefix("-").isdecimal() else None
    if number is not None and -size <= number < size:
        return number % size
    near = difflib.get_close_matches(name, names, n=1)
    known = f"0 to {size - 1}" + (f", or {', '.join(names)}" if names else "; they have no names")
    raise ConfigError(
        f"{MASK_KEY}: the actions of {dataset} have no dimension {name}",
        where=MASK_KEY,
        remedy=f"did you mean {near[0]}?" if near else f"the dimensions are {known}",
    )


def check_range(section: Mapping[str, Any], mask: Sequence[bool], dataset: str) -> None:
    """Refuse to leave a dimension as it is whose values would be clipped.

    Raises:
        ConfigError: values outside of [-1, 1].
    """
    low, high = (np.asarray(section.get(name, np.zeros(len(mask))), float) for name in ("min", "max"))
    for number in np.flatnonzero(~np.asarray(mask) & ((low < -1 - TOLERANCE) | (high > 1 + TOLERANCE))):
        raise ConfigError(
            f"{MASK_KEY} leaves dimension {dimension_name(section, int(number))} of {dataset} as it is, and its values "
            f"are from {low[number]:g} to {high[number]:g}: they would be clipped to [-1, 1]",
            where=MASK_KEY,
            remedy="normalise it (leave it out of the mask), or scale it to [-1, 1] by data.transform",
        )


def dimension_name(section: Mapping[str, Any], number: int) -> str:
    """The number of a dimension, with its name where it has one."""
    names = section.get("names")
    return f"{number} ({names[number]})" if names else str(number)


def left_as_is(section: Mapping[str, Any], mask: Sequence[bool] | None) -> str:
    """The dimensions that are not normalised, for the first lines of a run; empty for none."""
    return ", ".join(dimension_name(section, number) for number, value in enumerate(mask or ()) if not value)
