"""Steps of training: the same rows whoever asks, from wherever a run goes on."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from shardtune.batch import PackedBatch, Sample
from shardtune.data.loader.order import DataOrder, OrderSource
from shardtune.data.loader.protocol import supervised
from shardtune.data.loader.step_loader import BatchMaker, DataState, Limits, Packing, Step, StepLoader


class Rows:
    """Rows of 1 to 20 tokens; token values say which row they belong to."""

    def __init__(self, count: int) -> None:
        self.lengths = np.random.default_rng(1).integers(1, 21, count).astype(np.int32)
        self.term_weights: Mapping[str, np.ndarray] = {
            "ce": np.maximum(self.lengths - 1, 0).astype(np.float64),
            "balance": np.ones(count),
        }

    def row(self, index: int) -> Sample:
        length = int(self.lengths[index])
        return Sample(np.full(length, index, np.int32), np.ones(length, np.float32))


def loader(rank: int = 0, ranks: int = 1, *, count: int = 45, limits: Limits | None = None, **options) -> StepLoader:
    rows = Rows(count)
    if "global_batch_tokens" in options:
        options["lengths"] = rows.lengths
    order = DataOrder([OrderSource("all", 0, count)], seed=3, **(options or {"global_batch_size": 8}))
    maker = BatchMaker(rows, limits or Limits(3), rank=rank, num_ranks=ranks)
    return StepLoader(rows, order, maker, token_term="ce")


def rows_of(step: Step) -> list[int]:
    """The rows that this rank computes."""
    return [row for batch in step.micro_batches for row in batch.rows if row >= 0]


@pytest.mark.parametrize("options", [{"global_batch_size": 8}, {"global_batch_tokens": 90}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_share_the_same_steps_exactly(ranks: int, options: dict) -> None:
    alone = list(islice(loader(**options).steps(DataState()), 15))
    together = [list(islice(loader(rank, ranks, **options).steps(DataState()), 15)) for rank in range(ranks)]
    for number, step in enumerate(alone):
        shares = [steps[number] for steps in together]
        assert all(np.array_equal(share.rows, step.rows) for share in shares)
        assert sorted(row for share in shares for row in rows_of(share)) == sorted(step.rows)
        assert len({len(share.micro_batches) for share in shares}) == 1
        assert all(share.denominators == step.denominators for share in shares)
        for term in ("ce", "balance"):
            weight = sum(batch.weights[term] for share in shares for batch in share.micro_batches)
            assert weight == pytest.approx(step.denominators[term])


@pytest.mark.parametrize("options", [{"global_batch_size": 8}, {"global_batch_tokens": 90}], ids=str)
def test_a_run_that_goes_on_from_any_state_sees_the_rest(options: dict) -> None:
    whole = list(islice(loader(**options).steps(DataState()), 16))
    for number, step in enumerate(whole):
        rest = list(islice(loader(**options).steps(step.state), 3))
        for one, other in zip(rest, whole[number:], strict=False):
            assert (one.state, one.after) == (other.state, other.after)
            assert np.array_equal(one.rows, other.rows)
            assert rows_of(one) == rows_of(other)


def test_an_epochs_last_step_holds_what_is_left_and_the_next_begins_at_its_start() -> None:
    steps = list(islice(loader().steps(DataState()), 7))
    assert [len(step.rows) for step in steps] == [8, 8, 8, 8, 8, 5, 8]
    assert steps[5].after == DataState(1, 0)
    assert steps[6].state == DataState(1, 0)
    assert sorted(np.concatenate([step.rows for step in steps[:6]])) == list(range(45))


def test_a_state_at_an_epochs_end_means_the_next_epochs_start() -> None:
    assert np.array_equal(loader().step(DataState(0, 45)).rows, loader().step(DataState(1, 0)).rows)


def test_steps_tell_their_tokens_and_targets() -> None:
    step = loader().step(DataState())
    rows = Rows(45)
    assert step.num_tokens == rows.lengths[step.rows].sum()
    assert step.num_targets == step.denominators["ce"] == (rows.lengths[step.rows] - 1).sum()
    assert step.denominators["balance"] == 8
    assert supervised({"sign": 8.0, "value": 30.0}, "ce") == 30.0


def test_a_rank_without_rows_gets_fillers() -> None:
    last = loader(3, 4).step(DataState(0, 44))
    assert [batch.num_rows for batch in last.micro_batches] == [0]
    assert last.denominators["balance"] == 1


def test_a_fault_in_the_background_reaches_the_caller() -> None:
    broken = loader(limits=Limits(None, 5))
    with pytest.raises(Exception, match="max_tokens_per_micro_batch"):
        next(broken.steps(DataState()))


def test_documents_without_a_target_fill_micro_batches_up_to_few_sizes() -> None:
    plain, filled = (loader(limits=Limits(8, 90, filled=filled)) for filled in (False, True))
    pairs = list(islice(zip(plain.steps(DataState()), filled.steps(DataState()), strict=False), 20))
    sizes = set()
    for one, other in pairs:
        assert (one.num_tokens, one.denominators) == (other.num_tokens, other.denominators)
        for batch, more in zip(one.micro_batches, other.micro_batches, strict=True):
            assert isinstance(batch, PackedBatch)
            assert isinstance(more, PackedBatch)
            here, rows = len(batch.input_ids), len(batch.rows)
            assert more.rows == (*batch.rows, *(-1 for _ in range(len(more.rows) - rows)))
            for name in ("input_ids", "position_ids", "target_positions", "targets", "cu_seqlens"):
                whole = getattr(batch, name)
                assert getattr(more, name)[: len(whole)].equal(whole)
            assert len(more.targets) == len(batch.targets)
            assert more.document_weights.tolist() == [1.0] * rows + [0.0] * (len(more.rows) - rows)
            assert more.position_ids[here:].tolist() == batch.input_ids.new_tensor(_places(more, rows)).tolist()
            assert (more.max_length, more.weights) == (batch.max_length, batch.weights)
            sizes.add(len(more.input_ids))
    assert sizes <= {32, 64, 90}
    assert len(sizes) > 1


def _places(batch: PackedBatch, rows: int) -> list[int]:
    lengths = batch.cu_seqlens.diff()[rows:].tolist()
    return [place for length in lengths for place in range(length)]


class Drawing(Packing):
    """Draws a number for a micro-batch, which stands in place of its row."""

    def collate(self, samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float]) -> PackedBatch:
        return replace(super().collate(samples, rows, weights), key=random.getrandbits(40))


def test_what_a_collator_draws_follows_from_epoch_place_and_first_row() -> None:
    def drawn(state: DataState | None, row: int = 3, seed: int = 1) -> int:
        return BatchMaker(Rows(9), Limits(3), Drawing(), seed=seed).alone(row, state).key

    states = [None, DataState(), DataState(0, 8), DataState(1, 0)]
    found = [drawn(state) for state in states]
    assert found == [drawn(state) for state in states]
    assert len({*found, drawn(None, 4), drawn(None, 3, 2)}) == 6
