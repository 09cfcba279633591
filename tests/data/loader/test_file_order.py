"""The order of rows that are tokenised file by file: a plain loop gives the same, and a step needs only its files."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import pytest

from shardtune.batch.seeds import derive_seed
from shardtune.data.loader.file_order import FileOrder
from shardtune.data.loader.order import DataOrder, OrderSource, permute
from shardtune.errors import ConfigError, DataError

SIZES = (7, 3, 12, 5, 9)
STARTS = np.cumsum([0, *SIZES]).tolist()
DROPPED = {1, 2, 9, 20, 21, 22, 35}


class Rows:
    """Rows of which some are dropped; notes which files are read."""

    lengths = np.random.default_rng(0).integers(1, 30, STARTS[-1])

    def __init__(self, dropped: Collection[int] = DROPPED) -> None:
        self.dropped = np.array(sorted(dropped), np.int64)
        self.read: set[int] = set()

    def are_kept(self, rows: np.ndarray) -> np.ndarray:
        self.read |= set((np.searchsorted(STARTS, rows, side="right") - 1).tolist())
        return ~np.isin(rows, self.dropped)


class Counted:
    """The spans of the files; notes which are counted."""

    def __init__(self, files: list[OrderSource]) -> None:
        self.files = files
        self.counted: set[int] = set()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int, /) -> OrderSource:
        self.counted.add(number)
        return self.files[number]


def order(rows: Rows | None = None, weights=(1.0,) * 5, mixed_files=2, **options) -> FileOrder:
    spans = zip(STARTS, STARTS[1:], weights, strict=False)
    files = [OrderSource(f"file {number}", *span) for number, span in enumerate(spans)]
    given = options if "global_batch_tokens" in options else {"global_batch_size": 4, **options}
    return FileOrder(rows or Rows(), Counted(files), **{"seed": 3, "mixed_files": mixed_files, **given})


def steps(data: FileOrder | DataOrder, epoch: int) -> Iterator[list[int]]:
    place = 0
    while place < data.rows_per_epoch:
        rows, place = data.cut(epoch, place)
        yield rows.tolist()


def plain(epoch: int, seed: int = 3, mixed: int = 2) -> list[int]:
    """The documented order, place by place."""
    files = permute(np.arange(5), 5, derive_seed(seed, epoch, "files")).tolist()
    found, window = [], 0
    while files:
        size = 1 if epoch == window == 0 else mixed
        here, files = files[:size], files[size:]
        places = [row for file in here for row in range(STARTS[file], STARTS[file + 1])]
        key = derive_seed(derive_seed(seed, epoch, window, "window"), 0, "epoch")
        found += [places[place] for place in permute(np.arange(len(places)), len(places), key).tolist()]
        window += 1
    return found


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_plain_loop_gives_the_same(epoch: int) -> None:
    data = order()
    assert data.rows(epoch, 0, 100).tolist() == plain(epoch)
    assert data.rows(epoch, 5, 11).tolist() == plain(epoch)[5:11]
    kept = [row for row in plain(epoch) if row not in DROPPED]
    assert [*steps(data, epoch)] == [kept[start : start + 4] for start in range(0, len(kept), 4)]
    assert plain(0) != plain(1)


def test_a_step_begins_at_any_place_alike() -> None:
    data, place = order(), 0
    while place < data.rows_per_epoch:
        rows, after = data.cut(0, place)
        again, end = order().cut(0, place)
        assert (again.tolist(), end) == (rows.tolist(), after)
        place = after


def test_a_step_reads_the_files_of_its_window() -> None:
    rows = Rows()
    data = order(rows, global_batch_size=2)
    first = permute(np.arange(5), 5, derive_seed(3, 0, "files")).tolist()
    data.cut(0, 0)
    assert rows.read == {first[0]}
    rows.read.clear()
    data.cut(0, 36 - 2)
    assert rows.read <= set(first[3:])


def test_files_are_counted_up_to_the_window_of_a_step() -> None:
    first = permute(np.arange(5), 5, derive_seed(3, 0, "files")).tolist()
    data = order()
    counted = data._files.counted
    assert SIZES[first[0]] > 4
    data.cut(0, 0)
    assert not data.is_end(0, 4)
    assert counted == {first[0]}
    data.cut(0, SIZES[first[0]])
    assert counted == set(first[:3])
    assert data.has_steps(SIZES[first[0]] // 4)
    assert counted == set(first[:3])
    assert data.has_steps(9)
    assert not data.has_steps(10)  # of 36 rows
    assert data.num_steps(0) == 9
    assert counted == {*first}


@pytest.mark.parametrize("weights", [(1.0,) * 5, (1.0, 0.01, 0.5, 2.0, 1.0)])
@pytest.mark.parametrize("epoch", [0, 1])
def test_progress_is_that_of_the_bytes_and_leads_back_to_the_place(weights: tuple[float, ...], epoch: int) -> None:
    data = order(weights=weights, sizes=[70.0, 300.0, 120.0, 5.0, 90.0])
    size = data.rows_per_epoch
    found = [data.progress(epoch, place) for place in range(size)]
    assert found[0] == 0.0
    assert found == sorted(set(found))
    assert [data.place_at(epoch, progress) for progress in found] == [*range(size)]
    assert (data.progress(epoch, size), data.is_end(epoch, size)) == (1.0, True)
    files = data.epoch(0).window(0)
    assert files is not None
    behind = [70.0, 300.0, 120.0, 5.0, 90.0][files[0]] / 585.0
    first = data.epoch(0).places_of(0)[1]
    assert order(sizes=[70.0, 300.0, 120.0, 5.0, 90.0]).progress(0, SIZES[files[0]]) == pytest.approx(behind)
    assert data.progress(0, first) == pytest.approx(behind)


def test_steps_by_tokens() -> None:
    data, limit = order(global_batch_tokens=60), 60
    lengths = Rows.lengths
    kept, wanted = [row for row in plain(0) if row not in DROPPED], list[list[int]]()
    for row in kept:
        if not wanted or lengths[[*wanted[-1], row]].sum() > limit:
            wanted.append([])
        wanted[-1].append(row)
    assert [*steps(data, 0)] == wanted
    assert [len(step) for step in steps(order(global_batch_tokens=1), 0)] == [1] * len(kept)


def test_without_shuffling_it_is_the_order_of_the_whole_cache() -> None:
    left_out = np.array(sorted(DROPPED), np.int64)
    whole = DataOrder([OrderSource("all", 0, 36)], seed=3, shuffle=False, global_batch_size=4, left_out=left_out)
    for epoch in (0, 1):
        assert [*steps(order(shuffle=False), epoch)] == [*steps(whole, epoch)]


def test_weights_hold_per_file() -> None:
    data = order(Rows(()), weights=(1.0, 1.0, 0.5, 2.0, 0.01))
    for epoch in (0, 1):
        rows = np.concatenate([*steps(data, epoch)])
        counts = np.bincount(np.searchsorted(STARTS, rows, side="right") - 1, minlength=5)
        assert counts.tolist() == [7, 3, 6, 10, 0]
    with pytest.raises(ConfigError, match="an epoch would hold no row"):
        order(weights=(0.01,) * 5)


def test_rows_that_are_all_dropped_are_an_error() -> None:
    with pytest.raises(DataError, match="no row with a target is left"):
        order(Rows(range(36))).cut(0, 0)
