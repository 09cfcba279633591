"""Evaluation by a user's own method: every sample counts once, on any number of ranks, and none is left out."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler

from shardtune.batch import Metric
from shardtune.data.user_loader.rng import LoaderRng
from shardtune.errors import DataError, ModelError
from shardtune.parallel.ranks import Ranks
from shardtune.training.worker.user_evaluation import metrics_of, sum_user_batches
from tests.parallel.test_fsdp2 import group
from tests.support.dist.ranks import run_ranks

ALONE = Ranks(0, 1, torch.device("cpu"))


def count_user_batches(num_batches: int, sharded: bool) -> tuple[dict[str, Metric], int]:
    """Each forward is one of all ranks: a rank that left one out would hang the others."""
    ranks = group()
    calls = 0

    def correct(batch: torch.Tensor) -> int:
        nonlocal calls
        calls += 1
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))
        return int((batch % 2).sum())

    batches: list[torch.Tensor] = list(torch.arange(3 * num_batches).split(3))
    mine = list(islice(batches, ranks.rank, None, ranks.world_size)) if sharded else batches
    found = sum_user_batches(
        lambda batch: correct(batch["rows"]),
        [{"rows": batch} for batch in mine],
        ranks,
        sharded=sharded,
        num_samples=3 * num_batches,
        name="eval",
        poll=lambda: None,
    )
    return found, calls


@pytest.mark.parametrize("sharded", [False, True], ids=["same batches everywhere", "sharded"])
def test_a_users_batches_are_counted_once_and_no_rank_is_left_alone(sharded: bool) -> None:
    for num_batches in (5, 7):
        wanted = {"eval_accuracy": Metric(float(3 * num_batches // 2), 3.0 * num_batches)}
        assert count_user_batches(num_batches, sharded) == (wanted, num_batches)
        turns = -(-num_batches // 2)
        assert run_ranks(count_user_batches, 2, num_batches, sharded) == [(wanted, turns)] * 2


def evaluate(
    batches: Any, method: Callable[[Any], Any] = lambda batch: 1, num_samples: int | None = None
) -> dict[str, Metric]:
    return sum_user_batches(
        method, batches, group(), sharded=False, num_samples=num_samples, name="math", poll=lambda: None
    )


def test_a_loader_that_drops_samples_is_an_error() -> None:
    with pytest.raises(DataError, match="evaluation saw 3 samples of the 4 that build_dataloader announced") as error:
        evaluate([{"rows": torch.zeros(3)}], num_samples=4)
    assert "evaluation set math" in str(error.value)
    assert "drop_last=False" in str(error.value)
    rows: Any = [{"x": torch.zeros(1)}] * 7
    with pytest.raises(DataError, match="saw 6 samples of the 7 that there are: the loader has drop_last=True"):
        evaluate(DataLoader(rows, batch_size=3, drop_last=True))
    assert evaluate(DataLoader(rows[:6], batch_size=3, drop_last=True))["eval_accuracy"] == Metric(2.0, 6.0)


def test_samples_that_count_more_than_once_are_mentioned() -> None:
    said: list[str] = []
    batches = [{"rows": torch.arange(3)}] * 3
    told = sum_user_batches(
        lambda batch: 1, batches, ALONE, sharded=True, num_samples=7, name="x", poll=lambda: None, report=said.append
    )
    assert told == {"eval_accuracy": Metric(3.0, 9.0)}
    assert len(said) == 1
    assert said[0].startswith("evaluation set x: 9 samples were seen, 7 announced")


def test_every_evaluation_draws_the_same() -> None:
    rows: Any = list(range(20))
    own = torch.Generator().manual_seed(1)
    loader = DataLoader(rows, sampler=RandomSampler(rows, num_samples=4, generator=own), collate_fn=with_noise)
    draws, seen = LoaderRng(loader, 0), []
    for _ in range(2):
        batches: list[Any] = []
        sum_user_batches(
            lambda batch, to=batches: to.append(batch) or 1,
            loader,
            ALONE,
            sharded=False,
            num_samples=None,
            name="x",
            poll=lambda: None,
            draws=draws,
        )
        seen.append([(batch["rows"].tolist(), batch["noise"].item()) for batch in batches])
        torch.rand(3)  # what training draws in between
    assert seen[0] == seen[1]


def with_noise(rows: list[int]) -> dict[str, torch.Tensor]:
    return {"rows": torch.tensor(rows), "noise": torch.rand(())}


def test_samples_that_cannot_be_counted_are_not_compared() -> None:
    found = evaluate([{"x": torch.zeros(())}], lambda batch: {"error": (3.0, 2)}, num_samples=4)
    assert found == {"error": Metric(3.0, 2.0)}


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (5, "5, which is no number of correct samples in a batch of 4"),
        (-1, "-1, which is no number"),
        (torch.zeros(4), "a tensor of shape [4], neither a number"),
        (None, "None, neither a number of correct samples nor a dict of (sum, weight)"),
        ({"accuracy": 0.5}, "0.5, as 'accuracy', not a pair (sum, weight)"),
        ({"accuracy": (1, -2)}, "(1, -2), as 'accuracy', whose weight is negative"),
    ],
    ids=str,
)
def test_what_is_no_result_is_refused(output: Any, says: str) -> None:
    with pytest.raises(ModelError, match=re.escape(f"get_eval_model_output returned {says}")):
        metrics_of(output, 4)


def test_what_an_eval_method_may_return() -> None:
    assert metrics_of(torch.tensor(3), 4) == {"eval_accuracy": Metric(3.0, 4.0)}
    assert metrics_of({"a": (1, 2), "b": Metric(3.0, 4.0)}, None) == {"a": Metric(1.0, 2.0), "b": Metric(3.0, 4.0)}
    with pytest.raises(ModelError, match="the batch does not show how many samples it holds"):
        metrics_of(1, None)


def test_batches_with_other_fields_are_refused() -> None:
    batches = [{"input_ids": torch.zeros(2), "pixel_values": torch.zeros(2)}, {"input_ids": torch.zeros(2)}]
    with pytest.raises(DataError, match="batch 1 has no 'pixel_values', which those before it have"):
        evaluate(batches)
