"""Returns of frames, for a value head: read from a column, or computed from the rewards until the episode's end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardtune.config import ValueHeadConfig
from shardtune.data.encoder import FrameOptions, Row, RowError

RETURN = "return"
"""A row's key: the return of its frame, float."""


def with_returns(options: FrameOptions, values: ValueHeadConfig | None) -> FrameOptions:
    """Options with those of the returns that a value head is trained on; None: there is no value head."""
    return options if values is None else replace(options, returns=True, discount=values.discount)


def role_of(options: FrameOptions) -> str | None:
    """The role of the column that returns come from; None: rows have none."""
    if not options.returns:
        return None
    return RETURN if options.discount is None else "reward"


def discounted(rewards: np.ndarray, discount: float) -> np.ndarray:
    """The return of each frame of an episode, float64 [n]: its reward and those after it, discounted.

    Rewards [1, 0, 2] with the discount 0.5 are [1 + 0.25 * 2, 0.5 * 2, 2] = [1.5, 1, 2]. A reward that is NaN makes the
    returns up to it NaN.
    """
    found = rewards.astype(np.float64)
    for frame in range(len(found) - 2, -1, -1):
        found[frame] += discount * found[frame + 1]
    return found


def finite_return(value: float) -> float:
    """The return of a row. Raises `RowError` where it is no finite number."""
    if not np.isfinite(value):
        raise RowError(
            f"the return is {value}: it, or a reward from here to the episode's end, is missing or no finite number"
        )
    return float(value)


def return_of(row: Row) -> float:
    """The return of a row. Raises `RowError` where it has none."""
    if RETURN not in row:
        raise RowError(
            "the row has no return, which model.add_value_head trains on: name its column in data.columns "
            '({return: …}), give row["return"] in data.transform, or set model.value_head.discount, which computes '
            "it from rewards"
        )
    return finite_return(float(row[RETURN]))
