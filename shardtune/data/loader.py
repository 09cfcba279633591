"""From the data order to micro-batches: one object that any rank may enter at any step, in O(1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shardtune.batch import Batch, Sample
from shardtune.data.order import DataOrder
from shardtune.data.packing import NO_ROW, deal, pack


class Rows(Protocol):
    """What the loader asks of a data set."""

    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def term_weights(self) -> Mapping[str, np.ndarray]: ...
    def row(self, index: int) -> Sample: ...


@dataclass(frozen=True, slots=True)
class DataState:
    """Where the data stands: everything a resumed run needs, on any number of ranks."""

    epoch: int = 0
    rows_consumed: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step as one rank sees it.

    Attributes:
        state: where the data stands before it.
        after: where the data stands after it.
        rows: int64 [rows], the data set's rows of the whole step on all ranks, in order.
        micro_batches: this rank's share, `Batch`es or what else the worker takes; as many on every rank.
        denominators: per loss term, the weight of all rows of the step.
        num_tokens: input tokens of the step on all ranks.
        num_targets: the supervised weight of the step on all ranks, or 0 where no term counts tokens.
    """

    state: DataState
    after: DataState
    rows: np.ndarray
    micro_batches: tuple[Any, ...]
    denominators: Mapping[str, float]
    num_tokens: int
    num_targets: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What one forward may hold."""

    max_rows: int | None
    max_tokens: int | None = None


class Collator(Protocol):
    """What makes one micro-batch of samples."""

    def collate(self, samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float]) -> Batch: ...
    def filler(self, sample: Sample) -> Sample: ...


class Packing:
    """Lays rows of tokens end to end."""

    def collate(self, samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float]) -> Batch:
        return pack(samples, rows, weights)

    def filler(self, sample: Sample) -> Sample:
        return NO_ROW


PACKING = Packing()


class BatchMaker:
    """Cuts a list of rows into one rank's micro-batches.

    Args:
        data: the encoded rows.
        limits: of one forward.
        collator: makes a micro-batch of rows; by default they are laid end to end.
        rank: this data-parallel rank.
        num_ranks: data-parallel ranks.
    """

    def __init__(
        self, data: Rows, limits: Limits, collator: Collator = PACKING, *, rank: int = 0, num_ranks: int = 1
    ) -> None:
        self._data = data
        self._limits = limits
        self._collator = collator
        self._rank = rank
        self._num_ranks = num_ranks

    def micro_batches(self, rows: np.ndarray) -> tuple[Batch, ...]:
        """This rank's micro-batches of a step of `rows`, fillers included."""
        lengths = np.asarray(self._data.lengths[rows])
        hands = deal(lengths, self._num_ranks, max_rows=self._limits.max_rows, max_tokens=self._limits.max_tokens)[
            self._rank
        ]
        return tuple(self._collate(rows[hand], rows[0]) for hand in hands)

    def _collate(self, rows: np.ndarray, any_row: np.int64) -> Batch:
        """The micro-batch of these rows; of none, one that weighs nothing."""
        terms = self._data.term_weights
        if not len(rows):
            sample = self._collator.filler(self._data.row(int(any_row)))
            return self._collator.collate([sample], (-1,), dict.fromkeys(terms, 0.0))
        weights = {term: float(values[rows].sum()) for term, values in terms.items()}
        return self._collator.collate([self._data.row(int(row)) for row in rows], rows.tolist(), weights)

    def denominators(self, rows: np.ndarray) -> dict[str, float]:
        """The weight of each loss term over `rows`."""
        return {term: float(values[rows].sum()) for term, values in self._data.term_weights.items()}


class StepLoader:
    """Yields this rank's steps of training from any `DataState`, the next one made ready in the background.

    Args:
        data: the encoded rows.
        order: cuts epochs into steps.
        maker: cuts steps into micro-batches.
        token_term: the loss term whose weight counts supervised tokens.
    """

    def __init__(self, data: Rows, order: DataOrder, maker: BatchMaker, *, token_term: str | None = None) -> None:
        self._data = data
        self._order = order
        self._maker = maker
        self._token_term = token_term

    def num_steps(self, epoch: int) -> int:
        return self._order.num_steps(epoch)

    @property
    def rows_per_epoch(self) -> int:
        return self._order.rows_per_epoch

    def step(self, state: DataState) -> Step:
        """The step that begins at `state`; at an epoch's end, the next epoch's first."""
        rows = self._order.step(state.epoch, state.rows_consumed)
        if not len(rows):
            state = DataState(state.epoch + 1, 0)
            rows = self._order.step(state.epoch, 0)
        consumed = state.rows_consumed + len(rows)
        done = consumed >= self._order.rows_per_epoch
        denominators = self._maker.denominators(rows)
        return Step(
            state=state,
            after=DataState(state.epoch + 1, 0) if done else DataState(state.epoch, consumed),
            rows=rows,
            micro_batches=self._maker.micro_batches(rows),
            denominators=denominators,
            num_tokens=int(np.asarray(self._data.lengths[rows]).sum()),
            num_targets=denominators.get(self._token_term, 0.0) if self._token_term else 0.0,
        )

    def steps(self, state: DataState) -> Iterator[Step]:
        """Steps without end from `state` on."""
        with ThreadPoolExecutor(1, thread_name_prefix="shardtune-loader") as pool:
            upcoming = pool.submit(self.step, state)
            while True:
                step = upcoming.result()
                upcoming = pool.submit(self.step, step.after)
                yield step
