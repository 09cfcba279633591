"""What a worker needs from a loader: optimizer steps from any position, and a state to save with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from pydantic import JsonValue


class MicroBatch(Protocol):
    """What one forward takes."""

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of each loss term over this micro-batch, known before the forward."""
        ...

    @property
    def counts(self) -> bool:
        """False for a batch that only keeps ranks in step."""
        ...

    @property
    def metric_weight(self) -> float:
        """How much a mean over this micro-batch counts in a metric."""
        ...


class Column(Protocol):
    """A value of each row of a data set: an array, or what reads one where it is indexed."""

    def __getitem__(self, rows: np.ndarray, /) -> np.ndarray: ...


B_co = TypeVar("B_co", bound=MicroBatch, covariant=True)


@dataclass(frozen=True, slots=True)
class DataState:
    """The position in the data: everything a resumed run needs, on any number of ranks.

    Attributes:
        epoch: from 0.
        rows_consumed: places of the epoch, of which rows that `data.quarantine` leaves out have one too.
    """

    epoch: int = 0
    rows_consumed: int = 0


def supervised(denominators: Mapping[str, float], token_term: str | None = None) -> float:
    """The supervised weight of a step: that of the term of tokens; without one the largest of all terms.

    Terms beside the main one weigh the same targets, or rows, of which there are fewer.
    """
    largest = max(denominators.values(), default=0.0)
    return largest if token_term is None else denominators.get(token_term, largest)


@dataclass(frozen=True, slots=True)
class Step(Generic[B_co]):
    """One optimizer step as one rank sees it.

    Attributes:
        state: the position before it.
        after: the position after it.
        rows: int64 [rows], the data set's rows of the whole step on all ranks, in order; empty where a loader of the
            user's does not number them.
        micro_batches: this rank's share; as many on every rank.
        denominators: per loss term, the weight of all rows of the step.
        num_tokens: input tokens of the step on all ranks; of rows without tokens their sizes.
        num_targets: the supervised weight of the step on all ranks, see `supervised`.
        unit: what `num_tokens` counts; samples where each row has the size 1.
    """

    state: DataState
    after: DataState
    rows: np.ndarray
    micro_batches: tuple[B_co, ...]
    denominators: Mapping[str, float]
    num_tokens: int
    num_targets: float
    unit: Literal["tokens", "samples"] = "tokens"


@runtime_checkable
class Loader(Protocol[B_co]):
    """Yields a rank's optimizer steps from any position; the built-in `StepLoader` and the user's `BatchLoader`."""

    @property
    def rows_per_epoch(self) -> int:
        """The rows by which `DataState.rows_consumed` advances in an epoch."""
        ...

    @property
    def num_samples(self) -> int:
        """The rows of an epoch as shown to the user; without those that only fill up the last batch."""
        ...

    def num_steps(self, epoch: int) -> int:
        """Optimizer steps of an epoch."""
        ...

    def steps(self, state: DataState) -> Iterator[Step[B_co]]:
        """Steps without end from `state` on."""
        ...

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse, on one rank, a step that cannot be divided among `num_ranks`.

        Raises:
            ConfigError: the sizes of the recipe do not divide.
        """
        ...

    def state_dict(self) -> Mapping[str, JsonValue] | None:
        """What a checkpoint stores beside the `DataState`; None where that suffices. All ranks call it."""
        ...

    def load_state_dict(self, saved: Mapping[str, JsonValue], state: DataState, *, allow_changed: bool) -> None:
        """Go to the position of a checkpoint, before the next call of `steps`. All ranks call it.

        Args:
            saved: what `state_dict` returned.
            state: the position at which it was saved.
            allow_changed: accept data other than that of the checkpoint.

        Raises:
            CheckpointError: the data is not that of the checkpoint.
        """
        ...
