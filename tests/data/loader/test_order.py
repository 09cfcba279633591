"""The order of the data: a bijection, computed where it is asked for, the same whoever asks."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from shardtune.batch.seeds import derive_seed
from shardtune.data.loader.order import DataOrder, OrderSource, permute, require_rows_of_each
from shardtune.errors import ConfigError
from tests.support.dist.training import flat_script


def order(*sizes_and_weights: tuple[int, float], seed: int = 5, **options) -> DataOrder:
    """Sources end to end."""
    sources, start = [], 0
    for number, (size, weight) in enumerate(sizes_and_weights):
        sources.append(OrderSource(f"source {number}", start, start + size, weight))
        start += size
    return DataOrder(sources, seed=seed, **(options or {"global_batch_size": 8}))


def epoch_of(data: DataOrder, epoch: int) -> list[np.ndarray]:
    """The steps of an epoch, walked from its start."""
    steps, start = [], 0
    while len(rows := data.step(epoch, start)):
        steps.append(rows)
        start += len(rows)
    return steps


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4097, 65_537])
def test_permute_is_a_bijection(size: int) -> None:
    for key in (0, 1, derive_seed("x")):
        assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


def test_permute_gives_an_index_its_place_whatever_else_is_asked() -> None:
    whole = permute(np.arange(1000), 1000, 7)
    assert np.array_equal(permute(np.array([[999, 0], [500, 3]]), 1000, 7), whole[[[999, 0], [500, 3]]])


@pytest.mark.lengthy
def test_permutations_look_drawn_at_random() -> None:
    """Over 2,000 keys each place gets each value about equally often, and neighbours do not stay together."""
    size, keys = 13, 2000
    drawn = np.stack([permute(np.arange(size), size, derive_seed(key)) for key in range(keys)])
    counts = np.stack([(drawn == value).sum(0) for value in range(size)])
    expected = keys / size
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 144 + 5 * (2 * 144) ** 0.5  # (13 - 1)^2 degrees of freedom, five standard deviations
    follows = (np.diff(drawn, axis=1) == 1).mean()
    assert abs(follows - 1 / size) < 5 * (1 / size / (keys * (size - 1))) ** 0.5
    assert len({tuple(row) for row in drawn}) == keys


def test_the_flat_script_has_the_same_permutation() -> None:
    flat = flat_script()
    for size in (1, 2, 33, 1000):
        assert [flat.shuffled(index, size, 77) for index in range(size)] == permute(np.arange(size), size, 77).tolist()
    steps = flat.steps_of(33, 8, seed=42)
    data = order((33, 1.0), seed=42)
    for epoch in range(3):
        for rows in epoch_of(data, epoch):
            assert next(steps) == rows.tolist()


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 100])
def test_every_row_comes_once_per_epoch_in_another_order_each_time(rows: int) -> None:
    data = order((rows, 1.0))
    epochs = [np.concatenate(epoch_of(data, epoch)) for epoch in range(3)]
    for seen in epochs:
        assert sorted(seen) == list(range(rows))
    if rows == 100:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(epochs[0], np.concatenate(epoch_of(order((rows, 1.0), seed=6), 0)))


def test_steps_have_the_size_asked_for_and_the_last_what_is_left() -> None:
    assert [len(step) for step in epoch_of(order((29, 1.0)), 0)] == [8, 8, 8, 5]
    assert order((29, 1.0)).num_steps(0) == 4


@pytest.mark.parametrize("options", [{"global_batch_size": 8}, {"global_batch_tokens": 100}])
@pytest.mark.parametrize("left_out", [[], [0, 7, 8, 40, 99]])
def test_the_steps_that_are_left_are_those_to_come(options: dict[str, int], left_out: list[int]) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 100).astype(np.int32)
    data = order((100, 1.0), lengths=lengths, left_out=np.array(left_out, np.int64), **options)
    for epoch in range(2):
        place, left = 0, data.num_steps(epoch)
        while place < 100:
            assert data.steps_from(epoch, place) == left
            place, left = data.cut(epoch, place)[1], left - 1
        assert left == data.steps_from(epoch, 100) == 0


def test_without_shuffling_rows_come_as_they_are_stored() -> None:
    data = order((5, 1.0), (4, 2.0), shuffle=False, global_batch_size=100)
    assert data.step(3, 0).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8]


@pytest.mark.parametrize(("weight", "times"), [(2.5, {2, 3}), (0.4, {0, 1}), (1.0, {1}), (3.0, {3})])
def test_weights_say_how_often_a_source_comes(weight: float, times: set[int]) -> None:
    data = order((20, 1.0), (30, weight))
    chosen = []
    for epoch in range(3):
        counts = np.bincount(np.concatenate(epoch_of(data, epoch)), minlength=50)
        assert set(counts[:20]) == {1}
        assert set(counts[20:]) == times
        assert counts[20:].sum() == round(weight * 30)
        chosen.append(tuple(counts[20:]))
    assert (len(set(chosen)) > 1) == (len(times) > 1), "which rows come more often is drawn anew each epoch"


def test_sources_without_a_row_are_refused() -> None:
    with pytest.raises(ConfigError, match="an epoch would hold no row"):
        order((3, 0.1))


@pytest.mark.lengthy
def test_a_source_whose_weight_leaves_no_row_is_refused_beside_others() -> None:
    """An epoch has none of its rows, and neither has any other."""
    others = [OrderSource("b", 21, 30, 2.0), OrderSource("empty", 30, 30)]
    require_rows_of_each([OrderSource("a", 0, 21, 0.03), *others])
    require_rows_of_each([OrderSource("a", 0, 21, 0.02)])  # alone, it leaves an epoch without a row: see above
    with pytest.raises(ConfigError, match=r"the weight 0.02 of a rounds to none of its rows.*\n.*0.02 of 21 rows"):
        require_rows_of_each([OrderSource("a", 0, 21, 0.02), *others])


def test_steps_by_tokens_hold_as_many_rows_as_fit() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 500).astype(np.int32)
    data = order((500, 1.0), global_batch_tokens=100, lengths=lengths)
    for epoch in range(2):
        steps = epoch_of(data, epoch)
        assert sorted(np.concatenate(steps)) == list(range(500))
        assert len(steps) == data.num_steps(epoch)
        for step, following in itertools.pairwise(steps):
            assert lengths[step].sum() <= 100 < lengths[step].sum() + lengths[following[0]]


def test_a_row_longer_than_a_steps_tokens_is_a_step() -> None:
    lengths = np.array([5, 50, 5, 5], np.int32)
    data = order((4, 1.0), global_batch_tokens=12, lengths=lengths, shuffle=False)
    assert [step.tolist() for step in epoch_of(data, 0)] == [[0], [1], [2, 3]]
    assert data.num_steps(0) == 3


def test_any_step_is_found_without_those_before_it() -> None:
    lengths = np.full(10**7, 7, np.int32)
    for options in ({"global_batch_size": 64}, {"global_batch_tokens": 450, "lengths": lengths}):
        data = order((10**7, 1.0), **options)
        data.step(0, 0)
        began = time.perf_counter()
        last = data.step(5, 10**7 - 64)
        assert time.perf_counter() - began < 0.05
        assert len(last) == 64


def test_a_step_is_a_slice_of_its_epoch() -> None:
    data = order((100, 1.0), (50, 1.7))
    whole = data.rows(2, 0, data.rows_per_epoch)
    assert np.array_equal(data.step(2, 40), whole[40:48])
    assert np.array_equal(data.rows(2, 130, 10**6), whole[130:])


def test_seeds_differ_by_every_part() -> None:
    seeds = [derive_seed(*parts) for parts in ((1, 2), (2, 1), (12,), (1, 2, "a"), ("1", "2", "b"), (1, "2a"))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
