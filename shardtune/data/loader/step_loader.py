"""From the data order to micro-batches: one object that any rank may enter at any step, in O(1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from pydantic import JsonValue

from shardtune.batch import Batch, Sample
from shardtune.batch.seeds import derive_seed, seeded
from shardtune.data.loader.packing import NO_ROW, deal, deal_by_length, fillers, pack
from shardtune.data.loader.prefetch import computed_ahead
from shardtune.data.loader.protocol import Column, DataState, Step, supervised


class Rows(Protocol):
    """What the loader reads from a data set."""

    @property
    def lengths(self) -> Column: ...
    @property
    def term_weights(self) -> Mapping[str, Column]: ...
    def row(self, index: int) -> Sample: ...
    def field_counts(self, name: str) -> Column: ...


class Order(Protocol):
    """What the loader reads of an order of rows; see `DataOrder`."""

    @property
    def rows_per_epoch(self) -> int: ...
    def num_rows(self, epoch: int) -> int: ...
    def num_steps(self, epoch: int) -> int: ...
    def steps_from(self, epoch: int, place: int) -> int: ...
    def is_end(self, epoch: int, place: int) -> bool: ...
    def cut(self, epoch: int, start: int) -> tuple[np.ndarray, int]: ...
    def first_rows(self, epoch: int, steps: int) -> np.ndarray | None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What one forward may hold.

    Attributes:
        max_rows: rows at most; None: any number.
        max_tokens: tokens at most; None: any number.
        of_one_length: whether all its rows have one length.
        filled: whether documents without a target fill it up to one of a few sizes.
    """

    max_rows: int | None
    max_tokens: int | None = None
    of_one_length: bool = False
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Companion:
    """What joins a micro-batch whose rows call fewer parts of the model than others of the same step.

    All ranks have to call the same parts of a sharded model, and whether a parameter has a gradient must not depend on
    how rows are dealt.

    Attributes:
        sample: one without a target, that calls all parts. None: nothing may join such rows, so they are dealt apart
            from the others, to micro-batches that have the same places on all ranks.
        field: of rows that call all parts this field is not empty.
    """

    sample: Sample | None
    field: str

    def joined(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples of a micro-batch, with this one at the end if none of them calls all parts."""
        if self.sample is None or any(len(sample.fields.get(self.field, ())) for sample in samples):
            return list(samples)
        return [*samples, self.sample]


class Collator(Protocol):
    """What makes one micro-batch of samples."""

    def collate(self, samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float]) -> Batch: ...
    def filler(self, sample: Sample) -> Sample: ...
    def companion(self) -> Companion | None: ...


class Packing:
    """Lays rows of tokens end to end."""

    def collate(self, samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float]) -> Batch:
        return pack(samples, rows, weights)

    def filler(self, sample: Sample) -> Sample:
        return NO_ROW

    def companion(self) -> Companion | None:
        return None


PACKING = Packing()


class Changes(Protocol):
    """What changes the rows of training at random."""

    def __call__(self, sample: Sample, state: DataState, row: int) -> Sample:
        """A row as it is trained on in the step that begins at `state`."""
        ...


class BatchMaker:
    """Cuts a list of rows into one rank's micro-batches.

    Args:
        data: the encoded rows.
        limits: of one forward.
        collator: makes a micro-batch of rows; by default they are laid end to end.
        rank: this data-parallel rank.
        num_ranks: data-parallel ranks.
        changes: of rows whose place in training is given; None: rows stay as they are.
        seed: of what a user's code draws while it makes a micro-batch; None: none of it does.
    """

    def __init__(
        self,
        data: Rows,
        limits: Limits,
        collator: Collator = PACKING,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        changes: Changes | None = None,
        seed: int | None = None,
    ) -> None:
        self._seed = seed
        self._data = data
        self._limits = limits
        self._collator = collator
        self._rank = rank
        self._num_ranks = num_ranks
        self._changes = changes
        self._field_counts: Column | None = None

    def micro_batches(self, rows: np.ndarray, state: DataState | None = None) -> tuple[Batch, ...]:
        """This rank's micro-batches of a step of `rows`, fillers included.

        Args:
            rows: of the step.
            state: the position before it; None: of evaluation, where rows are as they are.
        """
        companion = self._collator.companion()
        if companion is not None and not self._counts(companion.field)[rows].any():
            companion = None
        if companion is None or companion.sample is not None:
            return self._cut(rows, companion, state)
        calls_all = self._counts(companion.field)[rows] > 0
        parts = [part for part in (rows[~calls_all], rows[calls_all]) if len(part)]
        return tuple(batch for part in parts for batch in self._cut(part, None, state))

    @property
    def is_seeded(self) -> bool:
        """Whether making a micro-batch seeds the generators of the process."""
        return self._seed is not None

    @property
    def takes_apart(self) -> bool:
        """Whether any rank may have any single row: all rows can call the same parts of the model."""
        companion = self._collator.companion()
        return companion is None or companion.sample is not None

    def alone(self, row: int | None, state: DataState | None = None) -> Batch:
        """A micro-batch of one row; None: a filler, which calls the same parts of the model."""
        rows = np.array([] if row is None else [row], dtype=np.int64)
        return self._collate(rows, np.int64(0 if row is None else row), self._collator.companion(), state)

    def _cut(self, rows: np.ndarray, companion: Companion | None, state: DataState | None) -> tuple[Batch, ...]:
        lengths = np.asarray(self._data.lengths[rows])
        # Rows 40 17 95 of the data set have the places 0 1 2 in this step; a rank that is dealt the places [0, 2] has
        # the rows 40 and 95. One that is dealt none needs some row of the step to make a filler of.
        dealt = self._deal(lengths, rows, companion)[self._rank]
        return tuple(self._collate(rows[places], rows[0], companion, state) for places in dealt)

    def _deal(self, lengths: np.ndarray, rows: np.ndarray, companion: Companion | None) -> list[list[list[int]]]:
        limits = self._limits
        if not limits.of_one_length:
            return deal(lengths, self._num_ranks, max_rows=limits.max_rows, max_tokens=limits.max_tokens)
        # What a companion joins becomes one sequence with it.
        alone = np.zeros(len(rows), bool) if companion is None else self._counts(companion.field)[rows] == 0
        return deal_by_length(
            lengths, self._num_ranks, max_rows=limits.max_rows, max_tokens=limits.max_tokens, alone=alone
        )

    def _counts(self, field: str) -> Column:
        if self._field_counts is None:
            self._field_counts = self._data.field_counts(field)
        return self._field_counts

    def _collate(
        self, rows: np.ndarray, any_row: np.int64, companion: Companion | None, state: DataState | None
    ) -> Batch:
        """The micro-batch of these rows; of none, one that weighs nothing.

        Draws of a user's code follow from the position of the step and from the micro-batch's first row.
        """
        if self._seed is None:
            return self._collated(rows, any_row, companion, state)
        place = () if state is None else (state.epoch, state.rows_consumed)
        with seeded(derive_seed(self._seed, *place, int(rows[0] if len(rows) else any_row), "collate")):
            return self._collated(rows, any_row, companion, state)

    def _collated(
        self, rows: np.ndarray, any_row: np.int64, companion: Companion | None, state: DataState | None
    ) -> Batch:
        terms = self._data.term_weights
        if len(rows):
            samples, numbers = [self._data.row(int(row)) for row in rows], rows.tolist()
            if self._changes is not None and state is not None:
                changed = zip(samples, numbers, strict=True)
                samples = [self._changes(sample, state, row) for sample, row in changed]
        else:
            samples, numbers = [self._collator.filler(self._data.row(int(any_row)))], [-1]
        samples = samples if companion is None else companion.joined(samples)
        if self._limits.filled and len(rows):
            samples = [*samples, *fillers(samples, self._limits.max_tokens)]
        numbers += [-1] * (len(samples) - len(numbers))
        weights = {term: float(values[rows].sum()) for term, values in terms.items()}
        return self._collator.collate(samples, numbers, weights)

    def denominators(self, rows: np.ndarray) -> dict[str, float]:
        """The weight of each loss term over `rows`."""
        return {term: float(values[rows].sum()) for term, values in self._data.term_weights.items()}


class Maker(Protocol):
    """What cuts the rows of a step into micro-batches; see `BatchMaker`."""

    def micro_batches(self, rows: np.ndarray, state: DataState | None = None) -> tuple[Batch, ...]: ...
    @property
    def is_seeded(self) -> bool: ...
    @property
    def takes_apart(self) -> bool: ...
    def alone(self, row: int | None, state: DataState | None = None) -> Batch: ...
    def denominators(self, rows: np.ndarray) -> dict[str, float]: ...


class StepLoader:
    """Yields this rank's steps of training from any `DataState`, and prepares the next one in the background.

    Args:
        data: the encoded rows.
        order: cuts epochs into steps.
        maker: cuts steps into micro-batches.
        token_term: the loss term whose weight counts supervised tokens, where there is one.
        num_processes: that prepare steps; 0: a thread of this one does, or, where a user's code may draw, nothing does.

    Attributes:
        is_counted: whether the rows of an epoch are known without reading files.
    """

    is_counted = True

    def __init__(
        self, data: Rows, order: Order, maker: Maker, *, token_term: str | None = None, num_processes: int = 0
    ) -> None:
        self._num_processes = num_processes
        self._data = data
        self._order = order
        self._maker = maker
        self._token_term = token_term

    def num_steps(self, epoch: int) -> int:
        return self._order.num_steps(epoch)

    def steps_left(self, state: DataState) -> int:
        """Optimizer steps from a position to the end of its epoch."""
        return self._order.steps_from(state.epoch, state.rows_consumed)

    def has_steps(self, steps: int, epochs: int) -> bool:
        """Whether so many epochs have so many steps."""
        for epoch in range(epochs):
            steps -= self.num_steps(epoch)
            if steps <= 0:
                return True
        return False

    def num_tokens(self, steps: int) -> int | None:
        """The input tokens of the first steps, over as many epochs as they take; None where rows are not known yet."""
        total = epoch = 0
        while steps > 0:
            here = min(steps, self.num_steps(epoch))
            rows = self._order.first_rows(epoch, here)
            if rows is None:
                return None
            total += int(self._data.lengths[rows].sum(dtype=np.int64))
            steps, epoch = steps - here, epoch + 1
        return total

    @property
    def rows_per_epoch(self) -> int:
        return self._order.rows_per_epoch

    @property
    def num_samples(self) -> int:
        return self._order.num_rows(0)

    def progress(self, state: DataState) -> float:
        """A position as a number of epochs, with a fraction."""
        return state.epoch + state.rows_consumed / max(1, self._order.rows_per_epoch)

    def state_at(self, progress: float) -> DataState:
        """The position of which `progress` is that number."""
        return DataState(*divmod(round(progress * self.rows_per_epoch), self.rows_per_epoch))

    def check_ranks(self, num_ranks: int) -> None:
        """Nothing to refuse: a step of any size is dealt to any number of ranks."""

    def state_dict(self) -> None:
        """Nothing: the order is a function of the seed, so a `DataState` is the whole position."""

    def load_state_dict(self, saved: Mapping[str, JsonValue], state: DataState, *, allow_changed: bool) -> None:
        """Nothing to restore: `steps` starts at any `DataState`."""

    def rows_at(self, state: DataState) -> tuple[DataState, DataState, np.ndarray]:
        """The positions before and after the step that begins at `state`, and its rows.

        At the end of an epoch of 10 rows, `DataState(0, 10)` and `DataState(1, 0)` both begin with the first step of
        epoch 1; a step that ends an epoch always leads to the second form.
        """
        rows, end = self._order.cut(state.epoch, state.rows_consumed)
        while not len(rows):
            state = DataState(state.epoch + 1, 0)
            rows, end = self._order.cut(state.epoch, 0)
        done = self._order.is_end(state.epoch, end)
        return state, DataState(state.epoch + 1, 0) if done else DataState(state.epoch, end), rows

    def step(self, state: DataState) -> Step[Batch]:
        """The step that begins at `state`; at an epoch's end, the next epoch's first."""
        return self._prepared(state)

    def _prepared(self, state: DataState) -> Step[Batch]:
        """As `step`, in a thread or a process."""
        state, after, rows = self.rows_at(state)
        denominators = self._maker.denominators(rows)
        size = int(np.asarray(self._data.lengths[rows]).sum())
        return Step(
            state=state,
            after=after,
            rows=rows,
            micro_batches=self._maker.micro_batches(rows, state),
            denominators=denominators,
            num_tokens=size,
            num_targets=supervised(denominators, self._token_term),
            unit="samples" if size == len(rows) else "tokens",
        )

    @property
    def takes_apart(self) -> bool:
        """Whether `alone` can be called."""
        return self._maker.takes_apart

    def alone(self, row: int | None, state: DataState | None = None) -> Batch:
        """A micro-batch of one row, as in the step that begins at `state`, or, without that, as it is; None: a filler,
        which calls the same parts of the model."""
        return self._maker.alone(row, state)

    def steps(self, state: DataState) -> Iterator[Step[Batch]]:
        """Steps without end from `state` on."""
        if self._num_processes:
            yield from computed_ahead(self._prepared, self._states(state), self._num_processes)
            return
        if self._maker.is_seeded:  # a thread would draw from the generators that the step before draws from
            while True:
                step = self._prepared(state)
                yield step
                state = step.after
        with ThreadPoolExecutor(1, thread_name_prefix="shardtune-loader") as pool:
            upcoming = pool.submit(self._prepared, state)
            while True:
                step = upcoming.result()
                upcoming = pool.submit(self._prepared, step.after)
                yield step

    def _states(self, state: DataState) -> Iterator[DataState]:
        """The position before each step, from `state` on."""
        while True:
            state, after, _ = self.rows_at(state)
            yield state
            state = after
