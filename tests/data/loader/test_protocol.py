"""One protocol for the built-in loader and for one of the user's own."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from shardtune.batch import Batch
from shardtune.data.loader.order import DataOrder, OrderSource
from shardtune.data.loader.packing import NO_ROW
from shardtune.data.loader.padding import AnswerRows
from shardtune.data.loader.protocol import DataState, Loader
from shardtune.data.loader.step_loader import BatchMaker, Limits, StepLoader
from shardtune.data.user_loader.batch import UserBatch
from shardtune.data.user_loader.loader import BatchLoader
from shardtune.parallel.ranks import Ranks

ROWS, PER_STEP = 10, 4


def built_in() -> Loader[Batch]:
    rows = AnswerRows("ce", [NO_ROW.input_ids] * ROWS, [[number] for number in range(ROWS)])
    order = DataOrder([OrderSource("rows", 0, ROWS)], seed=1, global_batch_size=PER_STEP)
    return StepLoader(rows, order, BatchMaker(rows, Limits(2)), token_term="ce")


def of_the_user() -> Loader[UserBatch]:
    batches = [{"rows": torch.tensor([number, number + 1])} for number in range(0, ROWS, 2)]
    return BatchLoader.of(
        batches,
        {},
        ranks=Ranks(0, 1, torch.device("cpu")),
        global_batch_size=PER_STEP,
        micro_batch_size=2,
        weigh=lambda given: [{"loss": 2.0} for _ in given],
        seed=1,
    )


def content(batch: Batch | UserBatch) -> list[int]:
    return batch.fields["rows"].tolist() if isinstance(batch, UserBatch) else list(batch.rows)


@pytest.mark.parametrize("make", [built_in, of_the_user])
def test_a_loader_goes_on_from_its_state(make: Any) -> None:
    first: Loader[Any] = make()
    first.check_ranks(2)
    assert first.num_steps(0) == 3
    assert first.num_samples == first.rows_per_epoch == ROWS
    steps = first.steps(DataState())
    (begun,) = islice(steps, 1)
    assert begun.after == DataState(0, PER_STEP)
    saved = first.state_dict()
    wanted = list(islice(steps, 3))

    second: Loader[Any] = make()
    if saved is not None:
        second.load_state_dict(saved, begun.after, allow_changed=False)
    found = list(islice(second.steps(begun.after), 3))
    for one, other in zip(wanted, found, strict=True):
        assert (one.state, one.after, one.denominators) == (other.state, other.after, other.denominators)
        assert np.array_equal(one.rows, other.rows)
        assert [*map(content, one.micro_batches)] == [*map(content, other.micro_batches)]
