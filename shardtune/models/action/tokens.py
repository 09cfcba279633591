"""Robot actions as tokens and back: bins, normalisation by a dataset's statistics, chunks of steps.

The arithmetic is that of OpenVLA (Kim et al., 2024, arXiv:2406.09246): values are normalised to [-1, 1] by their 1st
and 99th percentile and cut into bins, each of which is one token of the model's vocabulary.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardtune.errors import ConfigError, DataError, ModelError

UNNORM_KEY = "actor.model.unnorm_key"
CHOOSE = "choose one of them: model.unnorm_key of a recipe, unnorm_key of load_policy or run.policy"
STATISTICS_FILE = "dataset_statistics.json"
"""Beside the weights: {unnorm_key: {"action": {…}, "proprio": {…}, "num_transitions": n, "num_trajectories": n}}."""


@dataclass(frozen=True)
class Bins:
    """Evenly spaced bins over [-1, 1]: `count` edges, and between them `count - 1` centres.

    Attributes:
        count: of the edges, and of the tokens.
    """

    count: int = 256

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ConfigError(
                f"num_action_bins is {self.count}", where="actor.model.num_action_bins", remedy="give 2 or more"
            )

    @cached_property
    def edges(self) -> np.ndarray:
        """float64 [count]."""
        return np.linspace(-1.0, 1.0, self.count)

    @cached_property
    def centres(self) -> np.ndarray:
        """float64 [count - 1]."""
        return (self.edges[:-1] + self.edges[1:]) / 2.0

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Normalised values [...] to bin numbers int64 [...] in [1, count]; values outside [-1, 1] are clipped.

        Raises:
            DataError: a value is not finite.
        """
        values = np.asarray(values, dtype=np.float64)
        require_finite(values, "normalised values")
        return np.digitize(np.clip(values, -1.0, 1.0), self.edges).astype(np.int64)

    def decode(self, numbers: np.ndarray) -> np.ndarray:
        """Bin numbers int [...] to the values at their centres, float64 [...]; numbers outside go to the nearest bin.

        1 is the only value with the number `count`; it shares the last centre.
        """
        return self.centres[np.clip(np.asarray(numbers) - 1, 0, self.count - 2)]


@dataclass(frozen=True, slots=True)
class ActionTokens:
    """The token ids of bins: bin number n is `top - n`, so low values have high ids.

    Attributes:
        top: one more than the highest id of an action. For OpenVLA the size of the text vocabulary (32000), without
            the rows that only pad the embedding.
        bins: of the values.
    """

    top: int
    bins: Bins = Bins()

    def __post_init__(self) -> None:
        if self.top < self.bins.count:
            raise ModelError(
                f"{self.bins.count} action tokens do not fit below id {self.top}",
                where="actor.model.num_action_bins",
                remedy="use fewer bins",
            )

    @property
    def first(self) -> int:
        """The lowest id of an action."""
        return self.top - self.bins.count

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Normalised values [...] to token ids int64 [...]."""
        return self.top - self.bins.encode(values)

    def decode(self, ids: np.ndarray) -> np.ndarray:
        """Token ids int [...] to normalised values float64 [...]; ids of other tokens go to the nearest bin."""
        return self.bins.decode(self.top - np.asarray(ids))


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """The range of the values of a dataset, per dimension.

    Attributes:
        low: float64 [dimensions], the 1st percentile.
        high: float64 [dimensions], the 99th percentile.
        mask: bool [dimensions]: which dimensions are normalised; others (a gripper in [0, 1]) stay as they are.
    """

    low: np.ndarray
    high: np.ndarray
    mask: np.ndarray

    @classmethod
    def from_json(cls, section: Mapping[str, object], where: str) -> Statistics:
        """From one section (action or proprio) of a dataset's statistics: lists `q01`, `q99` and perhaps `mask`.

        Raises:
            DataError: a list is missing, of another length than the others, or holds a value that is not finite.
        """
        missing = [name for name in ("q01", "q99") if name not in section]
        if missing:
            raise DataError(
                f"the statistics have no {' and no '.join(missing)}, but {_names(section)}",
                where=where,
                remedy="compute them anew from the actions themselves",
            )
        try:
            low, high = (np.array(section[name], dtype=np.float64) for name in ("q01", "q99"))
        except (TypeError, ValueError) as error:
            raise DataError(f"q01 and q99 are no lists of numbers: {error}", where=where) from error
        mask = np.array(section.get("mask", np.ones(low.shape, dtype=bool)))
        if low.ndim != 1 or low.shape != high.shape or low.shape != mask.shape or mask.dtype != bool:
            raise DataError(
                f"q01 has shape {list(low.shape)}, q99 {list(high.shape)}, mask {list(mask.shape)} of {mask.dtype}",
                where=where,
                remedy="give one number, one number and one true or false for each dimension",
            )
        require_finite(np.stack([low, high]), "q01 and q99", where)
        if np.any(low > high):
            wrong = int(np.argmax(low > high))
            raise DataError(f"dimension {wrong}: q01 is {low[wrong]}, q99 is {high[wrong]}, which is less", where=where)
        return cls(low, high, mask)

    @property
    def dimensions(self) -> int:
        return len(self.low)

    def outside(self, values: np.ndarray, tolerance: float) -> int | None:
        """The first dimension that stays as it is and has a value outside of [-1, 1], which would be clipped."""
        beyond = np.abs(self._checked(values)) > 1 + tolerance
        found = np.flatnonzero(~self.mask & beyond.reshape(-1, self.dimensions).any(axis=0))
        return int(found[0]) if len(found) else None

    def normalise(self, values: np.ndarray) -> np.ndarray:
        """Values [..., dimensions] to float64 in [-1, 1], where the mask is true: 2 (a - q01) / (q99 - q01) - 1.

        A dimension that is constant gives 0. Where the mask is false values stay as they are.

        Raises:
            DataError: another number of dimensions, or a value that is not finite.
        """
        values = self._checked(values)
        spread = self.high - self.low
        scaled = 2.0 * (values - self.low) / np.where(spread > 0, spread, 1.0) - 1.0
        scaled = np.where(spread > 0, np.clip(scaled, -1.0, 1.0), 0.0)
        return np.where(self.mask, scaled, values)

    def unnormalise(self, normalised: np.ndarray) -> np.ndarray:
        """Normalised values [..., dimensions] to float64 in the dataset's units: 0.5 (n + 1) (q99 - q01) + q01."""
        normalised = self._checked(normalised)
        return np.where(self.mask, 0.5 * (normalised + 1.0) * (self.high - self.low) + self.low, normalised)

    def _checked(self, values: np.ndarray) -> np.ndarray:
        values = np.asarray(values, dtype=np.float64)
        if not values.ndim or values.shape[-1] != self.dimensions:
            raise DataError(
                f"values of shape {list(values.shape)} do not have the {self.dimensions} dimensions of the statistics",
                remedy="check actor.model.action_token_len and actor.model.unnorm_key",
            )
        require_finite(values, "values")
        return values


def require_finite(values: np.ndarray, what: str, where: str | None = None) -> None:
    """Refuse NaN and infinities; the error names the place of the first one.

    Raises:
        DataError: there is one.
    """
    wrong = ~np.isfinite(values)
    if wrong.any():
        place = tuple(int(index) for index in np.unravel_index(int(np.argmax(wrong)), values.shape))
        raise DataError(
            f"{what}: {values[place]} at {list(place)}",
            where=where,
            remedy="give finite numbers; data.on_bad_row: skip leaves such rows out",
        )


def choose_key(statistics: Mapping[str, object], unnorm_key: str | None, where: str = UNNORM_KEY) -> str:
    """The key of the dataset whose statistics apply: the given one; without one the only one there is.

    Raises:
        ConfigError: there is no such key, or none is given and there are several; lists them.
    """
    known = ", ".join(statistics)
    if not statistics:
        raise ConfigError(
            "there are no action statistics", where=where, remedy=f"put {STATISTICS_FILE} beside the weights"
        )
    if unnorm_key is None:
        if len(statistics) > 1:
            raise ConfigError(
                f"unnorm_key is not given, and there are statistics of {len(statistics)} datasets: {known}",
                where=where,
                remedy=CHOOSE,
            )
        return next(iter(statistics))
    if unnorm_key not in statistics:
        near = difflib.get_close_matches(unnorm_key, statistics, n=1)
        raise ConfigError(
            f"there are no action statistics of {unnorm_key!r}; there are of: {known}",
            where=where,
            remedy=f"did you mean {near[0]}?" if near else "choose one of them",
        )
    return unnorm_key


def action_statistics(
    statistics: Mapping[str, Mapping[str, object]], unnorm_key: str | None, dimensions: int | None = None
) -> Statistics:
    """The statistics of actions of one dataset.

    Args:
        statistics: of all datasets, as `dataset_statistics.json` has them.
        unnorm_key: the dataset; None: the only one.
        dimensions: of an action, if known.

    Raises:
        ConfigError: no such dataset, or actions of another number of dimensions.
        DataError: statistics that cannot be used.
    """
    key = choose_key(statistics, unnorm_key)
    found = _section(statistics[key], key, "action")
    if dimensions is not None and found.dimensions != dimensions:
        raise ConfigError(
            f"action_token_len is {dimensions}, the actions of {key} have {found.dimensions} dimensions",
            where="actor.model.action_token_len",
            remedy=f"set it to {found.dimensions}, or choose another unnorm_key",
        )
    return found


def state_statistics(statistics: Mapping[str, Mapping[str, object]], unnorm_key: str | None) -> Statistics:
    """The statistics of one dataset's proprioception; as `action_statistics`."""
    key = choose_key(statistics, unnorm_key)
    return _section(statistics[key], key, "proprio")


def _section(dataset: Mapping[str, object], key: str, name: str) -> Statistics:
    where = f"{STATISTICS_FILE}: {key}.{name}"
    section = dataset.get(name)
    if not isinstance(section, Mapping):
        raise DataError(
            f"the statistics of {key} have no {name!r}, but {_names(dataset)}",
            where=where,
            remedy="compute them anew from the data set",
        )
    return Statistics.from_json(section, where)


def _names(mapping: Mapping[str, object]) -> str:
    return ", ".join(map(str, mapping)) or "nothing"


@dataclass(frozen=True, slots=True)
class ActionCodec:
    """Chunks of actions to tokens and back.

    Attributes:
        tokens: ids of the bins.
        statistics: of the dataset.
        chunk: number of steps that are predicted at once.
    """

    tokens: ActionTokens
    statistics: Statistics
    chunk: int = 1

    @property
    def length(self) -> int:
        """Tokens of a chunk: its steps in order, each with its dimensions in order."""
        return self.chunk * self.statistics.dimensions

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Actions [..., chunk, dimensions] in the dataset's units to token ids int64 [..., chunk * dimensions].

        Raises:
            DataError: another shape, or a value that is not finite.
        """
        actions = np.asarray(actions)
        if actions.ndim < 2 or actions.shape[-2] != self.chunk:
            raise DataError(
                f"actions of shape {list(actions.shape)} are no chunks of {self.chunk} steps",
                remedy="check actor.model.action_chunks_len",
            )
        ids = self.tokens.encode(self.statistics.normalise(actions))
        return ids.reshape(*actions.shape[:-2], self.length)

    def normalised(self, ids: np.ndarray) -> np.ndarray:
        """Token ids int [..., chunk * dimensions] to normalised actions float64 [..., chunk, dimensions]."""
        ids = np.asarray(ids)
        if not ids.ndim or ids.shape[-1] != self.length:
            raise DataError(f"token ids of shape {list(ids.shape)} are no chunks of {self.length} tokens")
        return self.tokens.decode(ids).reshape(*ids.shape[:-1], self.chunk, self.statistics.dimensions)

    def decode(self, ids: np.ndarray) -> np.ndarray:
        """Token ids int [..., chunk * dimensions] to actions float32 [..., chunk, dimensions], in its units."""
        return self.statistics.unnormalise(self.normalised(ids)).astype(np.float32)
