"""How a step's rows are dealt and packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardtune.batch import Sample
from shardtune.data.loader.packing import NO_ROW, deal, deal_by_length, filled_size, fillers, pack, stack
from shardtune.errors import ConfigError, ModelError


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("max_rows", "max_tokens"), [(1, None), (3, None), (None, 120), (4, 100), (1000, 10**6)])
@pytest.mark.parametrize("rows", [1, 2, 5, 31, 64])
def test_every_row_is_dealt_once_within_both_limits(ranks: int, max_rows: int, max_tokens: int, rows: int) -> None:
    lengths = np.random.default_rng(rows).integers(1, 100, rows).astype(np.int32)
    hands = deal(lengths, ranks, max_rows=max_rows, max_tokens=max_tokens)
    assert len(hands) == ranks
    assert len({len(hand) for hand in hands}) == 1, "all ranks have as many micro-batches"
    batches = [batch for hand in hands for batch in hand]
    assert sorted(row for batch in batches for row in batch) == list(range(rows))
    for batch in batches:
        assert batch == sorted(batch)
        assert max_rows is None or len(batch) <= max_rows
        assert max_tokens is None or lengths[batch].sum() <= max_tokens


def test_no_more_micro_batches_than_needed() -> None:
    assert len(deal(np.full(32, 10), 2, max_rows=4, max_tokens=None)[0]) == 4
    assert len(deal(np.full(32, 10), 2, max_rows=None, max_tokens=80)[0]) == 2
    assert len(deal(np.full(3, 10), 4, max_rows=8, max_tokens=None)[0]) == 1


def test_ranks_that_wait_for_each_other_hold_about_as_many_tokens() -> None:
    lengths = np.random.default_rng(0).integers(10, 1000, 64)
    hands = deal(lengths, 4, max_rows=4, max_tokens=None)
    for together in zip(*hands, strict=True):
        tokens = [int(lengths[batch].sum()) for batch in together]
        assert max(tokens) < 1.15 * min(tokens)


def test_dealing_depends_on_the_lengths_alone() -> None:
    lengths = np.array([5, 5, 5, 9, 1])
    assert deal(lengths, 2, max_rows=2, max_tokens=None) == deal(lengths, 2, max_rows=2, max_tokens=None)
    assert deal(lengths, 1, max_rows=8, max_tokens=None) == [[[0, 1, 2, 3, 4]]]


def test_a_row_that_fits_no_forward_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"a row of 99 tokens does not fit max_tokens_per_micro_batch = 50"):
        deal(np.array([3, 99]), 2, max_rows=None, max_tokens=50)


def sample(ids: list[int], weights: list[float]) -> Sample:
    return Sample(np.array(ids, np.int32), np.array(weights, np.float32))


def test_the_worked_example() -> None:
    batch = pack([sample([5, 6, 7], [0, 1, 1]), sample([8, 9], [0, 1])], [3, 9], {"ce": 3.0})
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.target_positions.tolist() == [0, 1, 3]
    assert batch.targets.tolist() == [6, 7, 9]
    assert batch.target_weights.tolist() == [1.0, 1.0, 1.0]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert (batch.max_length, batch.rows, batch.target_weight, batch.num_rows) == (3, (3, 9), 3.0, 2)
    assert (batch.input_ids.dtype, batch.cu_seqlens.dtype) == (torch.int64, torch.int32)


def test_a_first_token_is_never_a_target_and_weights_are_kept() -> None:
    batch = pack([sample([1, 2], [1, 0.5]), sample([3, 4, 5], [1, 0, 2])], [0, 1], {})
    assert batch.targets.tolist() == [2, 5]
    assert batch.target_weights.tolist() == [0.5, 2.0]
    assert batch.target_weight == 2.5
    assert batch.target_positions.tolist() == [0, 3]


def test_packing_leaves_the_samples_as_they_are() -> None:
    """Weights come straight from a mapped file; a first token's must not be written back."""
    one = sample([1, 2], [1, 1])
    one.loss_weights.flags.writeable = False
    pack([one], [0], {})
    assert one.loss_weights.tolist() == [1, 1]


def test_a_filler_weighs_nothing() -> None:
    batch = pack([NO_ROW], (-1,), {"ce": 0.0, "router_balance": 0.0})
    assert batch.num_rows == 0
    assert batch.target_weight == 0.0
    assert batch.weights == {"ce": 0.0, "router_balance": 0.0}
    assert batch.targets.numel() == batch.target_positions.numel() == 0
    assert batch.document_weights.tolist() == [0.0]


def test_rows_of_one_length_are_dealt_together() -> None:
    """Worked example: lengths 5 3 5 3 5 3 3, two rows a forward, two ranks; the last row shares with nobody."""
    lengths = np.array([5, 3, 5, 3, 5, 3, 3])
    alone = np.array([False] * 6 + [True])
    hands = deal_by_length(lengths, 2, max_rows=2, max_tokens=None, alone=alone)
    assert hands == [[[0, 2], [4], [6]], [[1, 3], [5], []]]
    assert deal_by_length(lengths, 1, max_rows=None, max_tokens=10, alone=alone) == [[[0, 2], [1, 3, 5], [4], [6]]]


def test_every_row_is_dealt_once_by_length() -> None:
    random = np.random.default_rng(0)
    for ranks in (1, 2, 3):
        lengths, alone = random.integers(1, 6, 40), random.random(40) < 0.2
        hands = deal_by_length(lengths, ranks, max_rows=4, max_tokens=12, alone=alone)
        bins = [rows for hand in hands for rows in hand]
        assert sorted(row for rows in bins for row in rows) == list(range(40))
        assert len({len(hand) for hand in hands}) == 1
        for rows in filter(None, bins):
            assert len({int(lengths[row]) for row in rows}) == 1
            assert len(rows) <= 4
            assert len(rows) == 1 or (lengths[rows].sum() <= 12 and not alone[rows].any())


def test_a_field_is_padded_in_every_dimension() -> None:
    pictures = [np.ones((2, 3), np.float32), np.full((1, 4), 2, np.float32)]
    samples = [Sample(fields={"picture": picture}) for picture in pictures]
    batch = stack(samples, (0, 1), {"loss": 2.0}, {"picture": -1})
    assert batch["picture"].tolist() == [[[1, 1, 1, -1], [1, 1, 1, -1]], [[2, 2, 2, 2], [-1, -1, -1, -1]]]
    assert batch.mask("picture").tolist() == [[True, True], [True, False]]
    assert batch.mask("picture", 2).tolist() == [[True, True, True, False], [True] * 4]
    with pytest.raises(ModelError, match="'picture' is not padded in dimension 3"):
        batch.mask("picture", 3)
    flat = Sample(fields={"picture": np.ones(3, np.float32)})
    with pytest.raises(ModelError, match=r"different numbers of dimensions, \[2, 3\] and \[3\]"):
        stack([samples[0], flat], (0, 1), {"loss": 2.0}, {"picture": -1})


@pytest.mark.parametrize(
    ("tokens", "most", "size"),
    [
        (1, None, 32),
        (96, None, 96),
        (97, None, 128),
        (1610, None, 1664),
        (2049, None, 2304),
        (1610, 1620, 1620),
        (9, 9, 9),
    ],
)
def test_sizes_are_eight_from_each_power_of_two_to_the_next(tokens: int, most: int | None, size: int) -> None:
    assert filled_size(tokens, most) == size


def test_no_document_that_fills_is_longer_than_the_longest_row() -> None:
    rows = [Sample(np.arange(1, 6, dtype=np.int32), np.ones(5, np.float32)) for _ in range(10)]
    found = fillers(rows, None)
    assert [sample.input_ids.tolist() for sample in found] == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4]]
    assert not any(sample.loss_weights.any() for sample in found)
