"""Truth values for the dimensions of an action, as keys of the recipe have them: by name, by number, or a list."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from shardtune.errors import ConfigError

GivenMask = Sequence[bool] | Mapping[str, bool]
"""One truth value per dimension, or those of some dimensions by name or number."""


def dimension_mask(
    given: GivenMask, names: Sequence[str], default: Sequence[bool], dataset: str, key: str
) -> list[bool]:
    """The truth values of all dimensions.

    Args:
        given: the recipe's.
        names: of the dimensions, where the data set has them.
        default: of dimensions that are not given.
        dataset: its name, for errors.
        key: of the recipe, for errors.

    Raises:
        ConfigError: there are not so many dimensions, or none of that name.
    """
    if not isinstance(given, Mapping):
        if len(given) != len(default):
            raise ConfigError(
                f"{key} has {len(given)} values, an action of {dataset} has {len(default)} dimensions",
                where=key,
                remedy="give one per dimension, or some by name or number: {6: false}",
            )
        return list(given)
    mask = list(default)
    for name, value in given.items():
        mask[_place(name, names, len(mask), dataset, key)] = value
    return mask


def _place(name: str, names: Sequence[str], size: int, dataset: str, key: str) -> int:
    if name in names:
        return names.index(name)
    number = int(name) if name.removeprefix("-").isdecimal() else None
    if number is not None and -size <= number < size:
        return number % size
    near = difflib.get_close_matches(name, names, n=1)
    known = f"0 to {size - 1}" + (f", or {', '.join(names)}" if names else "; they have no names")
    raise ConfigError(
        f"{key}: the actions of {dataset} have no dimension {name}",
        where=key,
        remedy=f"did you mean {near[0]}?" if near else f"the dimensions are {known}",
    )
