"""Which dimensions of an action are normalised, as `actor.model.action_normalization_mask` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardtune.data.robot.dimensions import GivenMask, dimension_mask
from shardtune.errors import ConfigError

MASK_KEY = "actor.model.action_normalization_mask"
TOLERANCE = 0.01
"""How far beyond [-1, 1] a value may lie that is not normalised before it becomes a token."""


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
    return dimension_mask(given, list(section.get("names") or ()), default, dataset, MASK_KEY)


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
