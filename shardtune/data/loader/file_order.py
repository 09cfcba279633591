"""The order of rows that are tokenised file by file, as a pure function of (seed, epoch, rows consumed).

Files come in a keyed permutation, in windows of a few files; rows are permuted within a window. So a step needs the
files of its window alone. As in `DataOrder`, nothing depends on the number of ranks.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from shardtune.batch.seeds import derive_seed
from shardtune.data.loader.order import DataOrder, OrderSource, permute
from shardtune.data.loader.protocol import Column
from shardtune.errors import ConfigError, DataError


class Files(Protocol):
    """The places of each file in the data set; a file is counted when its own are read."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> OrderSource: ...


class FileRows(Protocol):
    """What the order reads of rows; a file is tokenised when one of its rows is asked for."""

    @property
    def lengths(self) -> Column: ...
    def are_kept(self, rows: np.ndarray) -> np.ndarray: ...


def order_of_files(number: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """int64 [number]: the files in the order of an epoch."""
    files = np.arange(number, dtype=np.int64)
    return permute(files, number, derive_seed(seed, epoch, "files")) if shuffle else files


class Epoch:
    """The windows of an epoch, which are cut as far as they are needed: the files of a window are counted then.

    Args:
        order: int64; the files in the order of the epoch.
        places: of a file, by its number.
        sizes: float64; of the files of `order`, by which progress is measured.
        first: files of the first window.
        mixed: files of each other one.
    """

    def __init__(
        self, order: np.ndarray, places: Callable[[int], int], sizes: np.ndarray, *, first: int, mixed: int
    ) -> None:
        self._order = order
        self._places = places
        self._passed = np.concatenate([[0.0], np.cumsum(sizes)])
        self._most = (first, mixed)
        self._windows: list[np.ndarray] = []
        self._ends: list[int] = []
        self._cuts = [0]  # in `order`
        self._lock = threading.RLock()

    def window(self, number: int) -> np.ndarray | None:
        """The files of a window; None behind the last one."""
        with self._lock:
            while len(self._windows) <= number:
                if not self._cut():
                    return None
            return self._windows[number]

    def last(self) -> np.ndarray:
        """The files of the last window; all are counted."""
        with self._lock:
            while self._cut():
                pass
            return self._windows[-1]

    def at(self, place: int) -> int | None:
        """The window that a place is in; None behind the last one."""
        with self._lock:
            while not self._ends or self._ends[-1] <= place:
                if not self._cut():
                    return None
            return bisect_right(self._ends, place)

    def _cut(self) -> bool:
        """Cut the next window, of files that have places; False if none is left."""
        files, total, stop, most = list[int](), 0, self._cuts[-1], self._most[bool(self._windows)]
        while len(files) < most and stop < len(self._order):
            number = int(self._order[stop])
            places = self._places(number)
            stop += 1
            if places:
                files.append(number)
                total += places
        if not files:
            return False
        self._windows.append(np.array(files, np.int64))
        self._ends.append((self._ends[-1] if self._ends else 0) + total)
        self._cuts.append(stop)
        return True

    # Of windows that have been cut.

    def places_of(self, number: int) -> tuple[int, int]:
        """The first place of a window, and the place behind it."""
        return self._ends[number - 1] if number else 0, self._ends[number]

    def progress_at(self, number: int) -> tuple[float, float]:
        """The share of the epoch, by sizes, before a window, and that of the window."""
        before, behind = self._passed[self._cuts[number]], self._passed[self._cuts[number + 1]]
        return float(before / self._passed[-1]), float((behind - before) / self._passed[-1])

    def rest(self, number: int) -> np.ndarray:
        """The files from a window on, to the end of the epoch."""
        return self._order[self._cuts[number] :]


class FileOrder:
    """The rows of every epoch in training order, window after window, and how an epoch is cut into steps.

    A place of an epoch stands for a row of a file, known by its number; rows that were dropped when the file was
    tokenised are passed over, as those of `data.quarantine` are. Files are counted up to the window that is read.

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
        sizes: of the files, by which progress in an epoch is measured; None: they are of one size.
    """

    def __init__(
        self,
        rows: FileRows,
        files: Files,
        *,
        seed: int,
        shuffle: bool = True,
        mixed_files: int,
        global_batch_size: int | None = None,
        global_batch_tokens: int | None = None,
        sizes: Sequence[float] | None = None,
    ) -> None:
        if (global_batch_size is None) == (global_batch_tokens is None):
            raise ValueError("give either global_batch_size or global_batch_tokens")
        self._data = rows
        self._files = files
        self._seed = seed
        self._shuffle = shuffle
        self._mixed = mixed_files
        self._batch_rows = global_batch_size or 0
        self._batch_tokens = global_batch_tokens or 0
        self._sizes = np.ones(len(files)) if sizes is None else np.asarray(sizes, np.float64)
        self.epoch = lru_cache(maxsize=4)(self._epoch)
        self._window = lru_cache(maxsize=4)(self._window_order)
        if self.epoch(0).window(0) is None:
            some = [files[number] for number in range(min(len(files), 4))]
            raise ConfigError(
                "an epoch would hold no row: the weights of the data sources round to none of their rows",
                where=", ".join(f"{s.name}: weight {s.weight:g} of {s.stop - s.start} rows" for s in some),
                remedy="raise a weight in data.train_data_paths",
            )

    @property
    def rows_per_epoch(self) -> int:
        """Places of an epoch, those of rows that are dropped among them; all files are counted."""
        return sum(self._places(number) for number in range(len(self._files)))

    def _places(self, number: int) -> int:
        """The places of a file in an epoch; it is counted."""
        return self._files[number].rows_per_epoch

    def num_rows(self, epoch: int) -> int:
        """The most rows of an epoch, `rows_per_epoch`; those that are dropped are not known before."""
        return self.rows_per_epoch

    def num_steps(self, epoch: int) -> int:
        """The most steps of an epoch: of all rows, or, cut by tokens, as many as rows; all files are counted."""
        return self._steps_of(self.rows_per_epoch)

    def steps_from(self, epoch: int, place: int) -> int:
        """The most steps from a place of an epoch to its end; all files are counted."""
        return self._steps_of(max(0, self.rows_per_epoch - place))

    def _steps_of(self, places: int) -> int:
        return -(-places // max(1, self._batch_rows))

    def has_steps(self, steps: int, count: Callable[[Sequence[int]], object] = list, together: int = 1) -> bool:
        """Whether an epoch has so many steps, as `num_steps` counts them; files are counted until that is known.

        Args:
            steps: looked for.
            count: counts several files.
            together: how many at most.
        """
        order = order_of_files(len(self._files), self._seed, 0, self._shuffle).tolist()
        places, size = 0, 1
        while order and self._steps_of(places) < steps:
            some, order = order[:size], order[size:]
            count(some)
            places += sum(map(self._places, some))
            size = min(2 * size, together)
        return self._steps_of(places) >= steps

    def first_rows(self, epoch: int, steps: int) -> None:
        """Unknown before the files are tokenised."""

    def is_end(self, epoch: int, place: int) -> bool:
        """Whether no place follows in an epoch."""
        return self.epoch(epoch).at(place) is None

    def _epoch(self, epoch: int) -> Epoch:
        order = order_of_files(len(self._files), self._seed, epoch, self._shuffle)
        first = 1 if epoch == 0 else self._mixed
        return Epoch(order, self._places, self._sizes[order], first=first, mixed=self._mixed)

    # Progress.

    def progress(self, epoch: int, place: int) -> float:
        """How much of an epoch lies before a place, in [0, 1]: measured by the sizes of files, which are known.

        Worked example: files of 100, 300 and 200 bytes, a window each in that order. The middle of the second one's
        places is at (100 + 150) / 600 of the epoch.
        """
        whole = self.epoch(epoch)
        window = whole.at(place)
        if window is None:
            return 1.0
        first, end = whole.places_of(window)
        before, share = whole.progress_at(window)
        return before + share * (place - first) / (end - first)

    def place_at(self, epoch: int, progress: float) -> int:
        """The place at which an epoch has come to that progress."""
        whole, window = self.epoch(epoch), 0
        while whole.window(window + 1) is not None and sum(whole.progress_at(window)) <= progress:
            window += 1
        first, end = whole.places_of(window)
        before, share = whole.progress_at(window)
        return first + round((end - first) * (progress - before) / share)

    def _window_order(self, epoch: int, window: int) -> DataOrder:
        """The order of a window's rows: that of a data set with a source per file."""
        numbers = self.epoch(epoch).window(window)
        assert numbers is not None, f"epoch {epoch} has no window {window}"
        files = [self._files[number] for number in numbers.tolist()]
        return DataOrder(
            files, seed=derive_seed(self._seed, epoch, window, "window"), shuffle=self._shuffle, global_batch_size=1
        )

    def rows(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The data set's rows at places [start, stop) of an epoch, dropped ones among them, int64.

        Worked example: files of 3, 4 and 2 rows (numbers 0 to 2, 3 to 6, 7 and 8), two of them mixed. If the permuted
        files are 1 0 2, the first epoch has the windows [1] and [0, 2], which end at the places 4 and 9. Place 5 is
        place 1 of the second window, whose permutation of [0, 5) may send it to 4: row 1 of file 2, which is row 8.
        """
        whole, pieces = self.epoch(epoch), [np.empty(0, np.int64)]
        while start < stop and (window := whole.at(start)) is not None:
            first, end = whole.places_of(window)
            pieces.append(self._window(epoch, window).rows(0, start - first, min(stop, end) - first))
            start = end
        return np.concatenate(pieces)

    def cut(self, epoch: int, start: int) -> tuple[np.ndarray, int]:
        """The rows of the step that begins at place `start` of an epoch, and the place at which the next one begins.

        Dropped rows belong to the step before them. So the last step of a window looks into the next one for the first
        row that is there, and after an epoch's last step none remain.

        Raises:
            DataError: all rows of the epoch were dropped.
        """
        whole = self.epoch(epoch)
        taken, places, end = np.empty(0, np.int64), np.empty(0, np.int64), start
        while (window := whole.at(end)) is not None:
            stop = min(end + max(64, self._batch_rows + 1), whole.places_of(window)[1])
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
        return taken[: max(self._fitting(taken), min(1, taken.size))], end

    def _fitting(self, rows: np.ndarray) -> int:
        """How many rows, from the first, fit into a step."""
        if self._batch_rows:
            return min(self._batch_rows, rows.size)
        sums = np.cumsum(self._data.lengths[rows], dtype=np.int64)
        return int(np.searchsorted(sums, self._batch_tokens, side="right"))
