"""The order of rows that are tokenised file by file, as a pure function of (seed, epoch, rows consumed).

Files come in a keyed permutation, in windows of a few files; rows are permuted within a window. So a step needs the
files of its window alone. As in `DataOrder`, nothing depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from shardtune.data.loader.order import DataOrder, OrderSource, derive_seed, permute
from shardtune.data.loader.protocol import Column
from shardtune.errors import ConfigError, DataError


class FileRows(Protocol):
    """What the order reads of rows; a file is tokenised when one of its rows is asked for."""

    @property
    def lengths(self) -> Column: ...
    def are_kept(self, rows: np.ndarray) -> np.ndarray: ...


def order_of_files(number: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """int64 [number]: the files in the order of an epoch."""
    files = np.arange(number, dtype=np.int64)
    return permute(files, number, derive_seed(seed, epoch, "files")) if shuffle else files


@dataclass(frozen=True, slots=True)
class Epoch:
    """The windows of an epoch.

    Attributes:
        windows: the files of each.
        ends: int64 [windows]; the place behind each.
    """

    windows: Sequence[np.ndarray]
    ends: np.ndarray

    def window_at(self, place: int) -> int:
        """The window that a place is in; the last one for the end of the epoch."""
        return min(int(np.searchsorted(self.ends, place, side="right")), len(self.windows) - 1)


class FileOrder:
    """The rows of every epoch in training order, window after window, and how an epoch is cut into steps.

    A place of an epoch stands for a row of a file, known by its number; rows that were dropped when the file was
    tokenised are passed over, as those of `data.quarantine` are.

    Args:
        rows: of the files.
        files: the places of each file in the data set, with the weight of its source: an epoch holds
            round(weight x places) of each.
        seed: of the whole run.
        shuffle: False keeps the order of the files, and of the rows in them.
        mixed_files: files of a window. The first one of the first epoch is a single file, so that training begins when
            that is tokenised.
        global_batch_size: rows of a step; the last step of an epoch has the remaining ones.
        global_batch_tokens: instead of rows, the input tokens a step may hold (at least one row).

    Attributes:
        rows_per_epoch: places of an epoch, those of rows that are dropped among them.
    """

    def __init__(
        self,
        rows: FileRows,
        files: Sequence[OrderSource],
        *,
        seed: int,
        shuffle: bool = True,
        mixed_files: int,
        global_batch_size: int | None = None,
        global_batch_tokens: int | None = None,
    ) -> None:
        if (global_batch_size is None) == (global_batch_tokens is None):
            raise ValueError("give either global_batch_size or global_batch_tokens")
        self._data = rows
        self._files = tuple(files)
        self._seed = seed
        self._shuffle = shuffle
        self._mixed = mixed_files
        self._batch_rows = global_batch_size or 0
        self._batch_tokens = global_batch_tokens or 0
        self._places = np.array([file.rows_per_epoch for file in files], np.int64)
        self.rows_per_epoch = int(self._places.sum())
        self.epoch = lru_cache(maxsize=4)(self._epoch)
        self._window = lru_cache(maxsize=4)(self._window_order)
        if not self.rows_per_epoch:
            raise ConfigError(
                "an epoch would hold no row: the weights of the data sources round to none of their rows",
                where=", ".join(f"{s.name}: weight {s.weight:g} of {s.stop - s.start} rows" for s in files[:4]),
                remedy="raise a weight in data.train_data_paths",
            )

    def num_rows(self, epoch: int) -> int:
        """The most rows of an epoch; those that are dropped are not known before."""
        return self.rows_per_epoch

    def num_steps(self, epoch: int) -> int:
        """The most steps of an epoch: of all rows, or, cut by tokens, as many as rows."""
        return -(-self.rows_per_epoch // max(1, self._batch_rows))

    def first_rows(self, epoch: int, steps: int) -> None:
        """Unknown before the files are tokenised."""

    def _epoch(self, epoch: int) -> Epoch:
        order = order_of_files(len(self._files), self._seed, epoch, self._shuffle)
        order = order[self._places[order] > 0]
        alone = 1 if epoch == 0 else 0
        cuts = np.arange(alone, len(order), self._mixed)
        windows = [window for window in np.split(order, cuts) if len(window)]
        return Epoch(windows, np.cumsum([self._places[window].sum() for window in windows], dtype=np.int64))

    def _window_order(self, epoch: int, window: int) -> DataOrder:
        """The order of a window's rows: that of a data set with a source per file."""
        files = [self._files[number] for number in self.epoch(epoch).windows[window]]
        return DataOrder(
            files, seed=derive_seed(self._seed, epoch, window, "window"), shuffle=self._shuffle, global_batch_size=1
        )

    def rows(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The data set's rows at places [start, stop) of an epoch, dropped ones among them, int64.

        Worked example: files of 3, 4 and 2 rows (numbers 0 to 2, 3 to 6, 7 and 8), two of them mixed. If the permuted
        files are 1 0 2, the first epoch has the windows [1] and [0, 2], which end at the places 4 and 9. Place 5 is
        place 1 of the second window, whose permutation of [0, 5) may send it to 4: row 1 of file 2, which is row 8.
        """
        whole, pieces, stop = self.epoch(epoch), [np.empty(0, np.int64)], min(stop, self.rows_per_epoch)
        while start < stop:
            window = whole.window_at(start)
            end = int(whole.ends[window])
            order = self._window(epoch, window)
            first = end - order.rows_per_epoch
            pieces.append(order.rows(0, start - first, min(stop, end) - first))
            start = end
        return np.concatenate(pieces)

    def cut(self, epoch: int, start: int) -> tuple[np.ndarray, int]:
        """The rows of the step that begins at place `start` of an epoch, and the place at which the next one begins.

        Dropped rows belong to the step before them. So the last step of a window looks into the next one for the first
        row that is there, and after an epoch's last step none remain.

        Raises:
            DataError: all rows of the epoch were dropped.
        """
        whole, size = self.epoch(epoch), self.rows_per_epoch
        taken, places, end = np.empty(0, np.int64), np.empty(0, np.int64), start
        while end < size:
            stop = min(end + max(64, self._batch_rows + 1), int(whole.ends[whole.window_at(end)]))
            rows = self.rows(epoch, end, stop)
            kept = np.flatnonzero(self._data.are_kept(rows))
            taken, places = np.concatenate([taken, rows[kept]]), np.concatenate([places, end + kept])
            end = stop
            fits = self._fitting(taken)
            if fits < taken.size:
                fits = max(fits, 1)
                if fits < taken.size:
                    return taken[:fits], int(places[fits])
        if not start and not taken.size:
            raise DataError(
                "no row with a target is left",
                where="data.train_data_paths",
                remedy="shardtune data preview with data.cache: whole shows what becomes of the rows",
            )
        return taken[: max(self._fitting(taken), min(1, taken.size))], size

    def _fitting(self, rows: np.ndarray) -> int:
        """How many rows, from the first, fit into a step."""
        if self._batch_rows:
            return min(self._batch_rows, rows.size)
        sums = np.cumsum(self._data.lengths[rows], dtype=np.int64)
        return int(np.searchsorted(sums, self._batch_tokens, side="right"))
