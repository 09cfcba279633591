"""Relative and delta actions: the actions of a chunk as differences from the state, or from the action before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from shardtune.data.robot.dimensions import GivenMask, dimension_mask
from shardtune.errors import ConfigError, DataError

ABSOLUTE, RELATIVE, DELTA = "absolute", "relative", "delta"
KEY: Final = "actor.model.action_representation"
MASK_KEY: Final = "actor.model.action_representation_mask"
REMEDY = (
    "name its column (data.columns: {state: …}), or let data.transform make one with the dimensions of an action, in "
    "their order, and the environment too; or leave the key out: actions are then absolute"
)
ENTRY = "action_representation"
"""The key of a data set's statistics that has `Representation.to_json`; absolute actions have none."""


@dataclass(frozen=True, slots=True)
class Representation:
    """How the actions of a chunk are represented, where they are not absolute.

    | kind | the action of step k |
    |---|---|
    | relative | a[k] - state |
    | delta | a[k] - a[k - 1], for the first step a[0] - state |

    The state is that of the chunk's first frame. Both directions are computed in float64, where the differences of
    float32 numbers, and so the round trip, are exact.

    Attributes:
        kind: relative or delta.
        given: which dimensions are converted: one truth value for each, or (name or number, truth value) of some;
            None: all. Others stay absolute.
        names: of the dimensions, where the data set has them.
    """

    kind: str
    given: tuple[bool, ...] | tuple[tuple[str, bool], ...] | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, kind: str, given: GivenMask | None) -> Representation | None:
        """That of the recipe's keys; None for absolute actions."""
        if kind == ABSOLUTE:
            return None
        if given is None:
            return cls(kind)
        return cls(kind, tuple(given.items()) if isinstance(given, Mapping) else tuple(given))

    def named(self, names: Sequence[str] | None) -> Representation:
        """The same for a data set whose dimensions have these names."""
        return replace(self, names=tuple(names or ()))

    def mask(self, dimensions: int) -> np.ndarray:
        """Bool [dimensions]: which are converted.

        Raises:
            ConfigError: the mask of the recipe does not fit.
        """
        if self.given is None:
            return np.ones(dimensions, dtype=bool)
        pairs = [one for one in self.given if isinstance(one, tuple)]
        given: GivenMask = dict(pairs) if pairs else [bool(one) for one in self.given]
        return np.array(dimension_mask(given, self.names, [True] * dimensions, "the data", MASK_KEY))

    def convert(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Absolute actions [..., C, A] to converted ones, float64.

        Args:
            actions: of a chunk.
            state: [..., A], at the chunk's first frame.
        """
        values = np.asarray(actions, np.float64)
        return values - np.where(self.mask(values.shape[-1]), self._before(values, state), 0.0)

    def undo(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """The reverse of `convert`, float64."""
        values, start = np.asarray(actions, np.float64), np.asarray(state, np.float64)[..., None, :]
        if self.kind == RELATIVE:
            absolute = values + start
        else:
            absolute = np.cumsum(np.concatenate([start, values], axis=-2), axis=-2)[..., 1:, :]
        return np.where(self.mask(values.shape[-1]), absolute, values)

    def _before(self, values: np.ndarray, state: np.ndarray) -> np.ndarray:
        """What is subtracted from the action of each step."""
        start = np.asarray(state, np.float64)[..., None, :]
        if self.kind == RELATIVE:
            return np.broadcast_to(start, values.shape)
        return np.concatenate([start, values[..., :-1, :]], axis=-2)

    def converted(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row of robot data with its actions converted, float32, and those of earlier frames.

        An earlier action is taken from the state of the row's own frame (relative) or of its own (delta).

        Raises:
            ConfigError: the mask does not fit, or no dimension is converted.
            DataError: the row has no state, or one of another number of dimensions than an action.
        """
        if not self.mask(np.shape(row["actions"])[-1]).any():
            raise ConfigError(
                f"{KEY} is {self.kind}, and {MASK_KEY} is false for all dimensions: nothing would be converted",
                where=MASK_KEY,
                remedy=f"let it be true for some, or leave both out; {KEY}: absolute converts nothing",
            )
        actions, state = np.asarray(row["actions"], np.float32), self.checked_state(row["state"], row["actions"])
        found = {**row, "actions": self.convert(actions, state).astype(np.float32)}
        if "earlier" in row:
            found["earlier"] = [
                {**one, "action": self._earlier(one, state).astype(np.float32)} for one in row["earlier"]
            ]
        return found

    def _earlier(self, frame: Mapping[str, Any], state: np.ndarray) -> np.ndarray:
        action = np.asarray(frame["action"], np.float32)
        own = state if self.kind == RELATIVE else self.checked_state(frame["state"], action[None])
        return self.convert(action[None], own)[0]

    def checked_state(self, state: object, actions: Any, *, where: str = KEY, remedy: str = REMEDY) -> np.ndarray:
        """The state that actions [C, A] are relative to, [A].

        Args:
            state: of a row or an observation.
            actions: of a chunk.
            where, remedy: for errors.

        Raises:
            DataError: there is none, or one of another number of dimensions.
        """
        dimensions = np.shape(actions)[-1]
        if state is None:
            raise DataError(
                f"{KEY} is {self.kind}, and there is no state that actions could be relative to",
                where=where,
                remedy=remedy,
            )
        found = np.asarray(state)
        if found.shape != (dimensions,):
            raise DataError(
                f"{KEY} is {self.kind}, and the state has the shape {list(found.shape)}, an action {dimensions} "
                "dimensions",
                where=where,
                remedy=remedy,
            )
        return found

    def to_json(self, dimensions: int) -> dict[str, Any]:
        """`{"kind": …, "mask": […]}`, with a truth value for each dimension, and their names where they have some."""
        names = {"names": list(self.names)} if self.names else {}
        return {"kind": self.kind, "mask": self.mask(dimensions).tolist(), **names}

    @classmethod
    def from_json(cls, content: Mapping[str, Any] | None) -> Representation | None:
        """The reverse of `to_json`; None for None."""
        if content is None:
            return None
        return cls(str(content["kind"]), tuple(map(bool, content["mask"])), tuple(content.get("names") or ()))


def described(form: Representation | None, dimensions: int) -> str:
    """The representation in words, for the first lines of a run; empty for absolute actions."""
    if form is None:
        return ""
    mask = form.mask(dimensions)
    kept = [f"{at} ({form.names[at]})" if form.names else str(at) for at in np.flatnonzero(~mask).tolist()]
    what = "to the state" if form.kind == RELATIVE else "to the action before, the first to the state"
    return f"actions are {form.kind} {what}" + (f"; absolute: {', '.join(kept)}" if kept else "")


def check_statistics(found: Mapping[str, Any] | None, wanted: Representation | None, where: str) -> None:
    """Refuse statistics of actions in another representation than the recipe's.

    Args:
        found: what the statistics have as `ENTRY`.
        wanted: the recipe's.
        where: the statistics, for errors.

    Raises:
        ConfigError: they differ.
    """
    own = ABSOLUTE if found is None else str(found["kind"])
    kind = ABSOLUTE if wanted is None else wanted.kind
    if own != kind:
        raise ConfigError(
            f"the statistics are of {own} actions, and {KEY} is {kind}",
            where=where,
            remedy=f"set model.action_representation: {own}, or leave these statistics out, so that they are computed "
            "from the training rows (model.action_statistics; model.from_scratch for those of a directory)",
        )
    if found is not None and wanted is not None:
        mask = wanted.named(found.get("names")).mask(len(found["mask"])).tolist()
        if mask != list(found["mask"]):
            raise ConfigError(
                f"the statistics are of actions with the mask {list(found['mask'])}, and {MASK_KEY} is {mask}",
                where=where,
                remedy="give the same mask, or leave these statistics out",
            )
