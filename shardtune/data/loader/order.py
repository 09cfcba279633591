"""Which rows an optimizer step holds, as a pure function of (seed, epoch, rows consumed).

Nothing here depends on the number of ranks, and no array as long as the data set is kept in memory: the permutation is
a keyed bijection that is computed only for the indices of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardtune.batch.seeds import derive_seed
from shardtune.errors import ConfigError

ROUNDS = 6
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele et al., 2014) over `values + key`."""
    with np.errstate(over="ignore"):
        values = values + key
        values = (values ^ (values >> np.uint64(30))) * _MIX[0]
        values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Map each index in [0, size) to its place under a keyed bijection of [0, size).

    A balanced Feistel network over the next power of four, walked along its cycle until it is back inside [0, size)
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): fewer than four rounds of walking on average.

    Worked example: for size 10, `(size - 1).bit_length()` is 4, so `half_bits` is 2 and the network permutes [0, 16).
    Index 6 = 0b0110 has the halves left = 0b01 and right = 0b10. A round makes of them (right, left ^ f(right)), which
    can be undone whatever f is, so six rounds are a bijection of [0, 16). If 6 goes to 13, which is outside, and 13 to
    4, then 6 goes to 4. No other index does: its walk would have to pass through 13, which only the walk from 6 does.

    Args:
        index: integer array of any shape.
        size: length of the domain.
        key: selects the bijection.
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    keys = [np.uint64(derive_seed(key, round_)) for round_ in range(ROUNDS)]
    values = index.astype(np.uint64).reshape(-1)
    outside = np.arange(values.size)
    while outside.size:
        left, right = values[outside] >> half_bits, values[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right, round_key) & mask)
        values[outside] = (left << half_bits) | right
        outside = outside[values[outside] >= size]
    return values.astype(np.int64).reshape(index.shape)


@dataclass(frozen=True, slots=True)
class OrderSource:
    """Rows [start, stop) of the data set, of which an epoch holds round(weight x rows).

    Attributes:
        name: for messages.
        drawn_by: identifies it where some of its rows are drawn; None: its name does.
    """

    name: str
    start: int
    stop: int
    weight: float = 1.0
    drawn_by: str | None = None

    @property
    def rows_per_epoch(self) -> int:
        return round(self.weight * (self.stop - self.start))


def require_rows_of_each(sources: Sequence[OrderSource]) -> None:
    """Refuse a source whose weight rounds to none of its rows while others are trained.

    Raises:
        ConfigError: names it.
    """
    without = [source for source in sources if source.stop > source.start and not source.rows_per_epoch]
    if without and len(without) < len(sources):
        raise ConfigError(
            f"the weight {without[0].weight:g} of {without[0].name} rounds to none of its rows, so none would ever be "
            "trained",
            where=", ".join(f"{one.name}: weight {one.weight:g} of {one.stop - one.start} rows" for one in without),
            remedy="raise the weight in data.train_data_paths, or leave the source out",
        )


class DataOrder:
    """The rows of every epoch in training order, and how an epoch is cut into steps.

    Args:
        sources: the spans of the data set, in order.
        seed: of the whole run.
        shuffle: False keeps the order of the files.
        global_batch_size: rows of a step; the last step of an epoch has the remaining ones.
        global_batch_tokens: instead of rows, the input tokens a step may hold (at least one row).
        lengths: int32 [rows], needed to cut by tokens.
        left_out: int64, ascending; rows that have their places in the order and are in no step. So a row that is left
            out later moves no other one across an epoch's parts, and steps before its place stay what they were.

    Attributes:
        rows_per_epoch: places of an epoch, those of rows that are left out among them.
    """

    def __init__(
        self,
        sources: Sequence[OrderSource],
        *,
        seed: int,
        shuffle: bool = True,
        global_batch_size: int | None = None,
        global_batch_tokens: int | None = None,
        lengths: np.ndarray | None = None,
        left_out: np.ndarray | None = None,
    ) -> None:
        if (global_batch_size is None) == (global_batch_tokens is None):
            raise ValueError("give either global_batch_size or global_batch_tokens")
        if global_batch_tokens is not None and lengths is None:
            raise ValueError("cutting steps by tokens needs the rows' lengths")
        self._sources = tuple(sources)
        self._seed = seed
        self._shuffle = shuffle
        # Exactly one of the two: the rows of a step, or its tokens with the length of each row.
        self._batch_rows = global_batch_size or 0
        self._batch_tokens = global_batch_tokens or 0
        self._lengths = np.empty(0, np.int32) if lengths is None else lengths
        self._left_out = np.empty(0, np.int64) if left_out is None else left_out
        self._ends = np.cumsum([source.rows_per_epoch for source in self._sources], dtype=np.int64)
        self.rows_per_epoch = int(self._ends[-1]) if len(self._ends) else 0
        self._steps: dict[int, int] = {}
        self._rows: dict[int, int] = {}
        if not self.rows_per_epoch or not self.num_rows(0):
            raise ConfigError(
                "an epoch would hold no row: the weights of the data sources round to none of their rows"
                + (" that data.quarantine keeps" if len(self._left_out) else ""),
                where=", ".join(f"{s.name}: weight {s.weight:g} of {s.stop - s.start} rows" for s in self._sources),
                remedy="raise a weight in data.train_data_paths",
            )

    def is_end(self, epoch: int, place: int) -> bool:
        """Whether no place follows in an epoch."""
        return place >= self.rows_per_epoch

    def num_rows(self, epoch: int) -> int:
        """Rows of an epoch's steps: arithmetic, but where rows are left out of a source with a fractional weight."""
        size = self.rows_per_epoch
        if not len(self._left_out):
            return size
        if epoch not in self._rows:
            times = [divmod(source.rows_per_epoch, max(source.stop - source.start, 1)) for source in self._sources]
            if any(rest for _, rest in times):
                self._rows[epoch] = len(self._kept(self.rows(epoch, 0, size)))
            else:
                edges = np.searchsorted(self._left_out, [(source.start, source.stop) for source in self._sources])
                gone = (int(stop - start) * each for (start, stop), (each, _) in zip(edges, times, strict=True))
                self._rows[epoch] = size - sum(gone)
        return self._rows[epoch]

    def _kept(self, rows: np.ndarray) -> np.ndarray:
        """Rows without those that are left out."""
        return rows[~np.isin(rows, self._left_out)] if len(self._left_out) else rows

    def rows(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The data set's rows at places [start, stop) of an epoch, int64; in O(stop - start).

        Worked example: sources of 3 rows with weight 1 and of 4 rows (numbers 3 to 6) with weight 0.5 give an epoch of
        3 + 2 = 5 rows, `_ends` = [3, 5]. Place 4 (after the permutation of [0, 5)) is in the second source, as 4 >= 3,
        and is its row number 4 - 3 = 1 of this epoch; `_choose` makes of 1 one of its four rows, e.g. 2: row 3 + 2 = 5.
        """
        size = self.rows_per_epoch
        place = np.arange(start, min(stop, size), dtype=np.int64)
        if self._shuffle and place.size:
            place = permute(place, size, derive_seed(self._seed, epoch, "epoch"))
        which = np.searchsorted(self._ends, place, side="right")
        rows = np.empty_like(place)
        for number, source in enumerate(self._sources):
            here = which == number
            first = int(self._ends[number]) - source.rows_per_epoch
            rows[here] = source.start + self._choose(source, epoch, place[here] - first)
        return rows

    def _choose(self, source: OrderSource, epoch: int, place: np.ndarray) -> np.ndarray:
        """The rows of one source that an epoch holds; with weight 2.5 each row twice, and half of them once more.

        Which half is drawn anew each epoch. Worked example: 4 rows with weight 2.5 are places 0 to 9, which modulo 4
        are 0 1 2 3, 0 1 2 3, 0 1; the permutation of [0, 4) then sends 0 and 1 to the two rows that come a third time.
        """
        size = source.stop - source.start
        if source.rows_per_epoch == size or not self._shuffle or not place.size:
            return place % max(size, 1)
        key = derive_seed(self._seed, epoch, source.name if source.drawn_by is None else source.drawn_by, "source")
        return permute(place % size, size, key)

    def step(self, epoch: int, start: int) -> np.ndarray:
        """The rows of the step that begins at place `start` of an epoch; empty at its end."""
        return self.cut(epoch, start)[0]

    def cut(self, epoch: int, start: int) -> tuple[np.ndarray, int]:
        """The rows of the step that begins at place `start` of an epoch, and the place at which the next one begins.

        Places of rows that are left out belong to the step before them, so that after an epoch's last step none remain.
        """
        if self._batch_rows and not len(self._left_out):
            rows = self.rows(epoch, start, start + self._batch_rows)
            return rows, start + len(rows)
        taken = np.empty(0, dtype=np.int64)
        block = max(64, self._batch_rows + 1)
        while True:
            taken = np.concatenate([taken, self.rows(epoch, start + taken.size, start + taken.size + block)])
            kept = np.flatnonzero(~np.isin(taken, self._left_out))
            fits = self._fitting(taken[kept])
            if fits < kept.size or start + taken.size >= self.rows_per_epoch:
                fits = max(fits, min(1, kept.size))
                end = start + int(kept[fits]) if fits < kept.size else self.rows_per_epoch
                return taken[kept[:fits]], end
            block *= 2

    def _fitting(self, rows: np.ndarray) -> int:
        """How many rows, from the first, fit into a step."""
        if self._batch_rows:
            return min(self._batch_rows, rows.size)
        # Lengths 5 3 4 6 sum up to 5 8 12 18: of 12 tokens 3 rows fit, the first sum above 12 being at place 3.
        return int(np.searchsorted(np.cumsum(self._lengths[rows], dtype=np.int64), self._batch_tokens, side="right"))

    def first_rows(self, epoch: int, steps: int) -> np.ndarray:
        """The rows of the first steps of an epoch, int64."""
        if steps >= self.num_steps(epoch):
            return self._kept(self.rows(epoch, 0, self.rows_per_epoch))
        if self._batch_rows and not len(self._left_out):
            return self.rows(epoch, 0, steps * self._batch_rows)
        taken, start = [np.empty(0, np.int64)], 0
        for _ in range(steps):
            rows, start = self.cut(epoch, start)
            taken.append(rows)
        return np.concatenate(taken)

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch: arithmetic for a batch of rows, one pass over the lengths for a batch of tokens."""
        if self._batch_rows:
            return -(-self.num_rows(epoch) // self._batch_rows)
        if epoch not in self._steps:
            self._steps[epoch] = self.steps_from(epoch, 0)
        return self._steps[epoch]

    def steps_from(self, epoch: int, place: int) -> int:
        """Steps from a place of an epoch to its end."""
        if self._batch_rows and not len(self._left_out):
            return -(-max(0, self.rows_per_epoch - place) // self._batch_rows)
        rows = self._kept(self.rows(epoch, place, self.rows_per_epoch))
        if self._batch_rows:
            return -(-len(rows) // self._batch_rows)
        tokens = np.cumsum(self._lengths[rows], dtype=np.int64)
        start = steps = 0
        while start < len(rows):
            # As `step`, from sums over the epoch: behind `start` rows that sum to `before`, a step ends before the
            # first row at which the sum exceeds before + _batch_tokens; one row at least, however long.
            before = int(tokens[start - 1]) if start else 0
            start = max(start + 1, int(np.searchsorted(tokens, before + self._batch_tokens, side="right")))
            steps += 1
        return steps
