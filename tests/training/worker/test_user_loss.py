"""What a user's train method may return, and how much a batch of it weighs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BatchEncoding

from shardtune.batch import LossSum, Metric
from shardtune.data.user_loader.batch import UserBatch
from shardtune.errors import ModelError
from shardtune.parallel.ranks import Ranks
from shardtune.training.train_output import TERM, read_train_output
from shardtune.training.worker.user_loss import BatchWeights, measured
from tests.parallel.test_fsdp2 import group
from tests.support.dist.ranks import run_ranks

ALONE = Ranks(0, 1, torch.device("cpu"))


def batch_of(*, counts: bool = True, **weights: float) -> UserBatch:
    return UserBatch({"x": torch.zeros(3, 2)}, weights or {TERM: 4.0}, counts=counts)


def tensor(value: float) -> torch.Tensor:
    """With a graph."""
    return torch.tensor(value, requires_grad=True) * 1


@pytest.mark.parametrize(
    ("output", "total"),
    [
        (tensor(2.0), 8.0),
        (tensor(2.0).reshape(1), 8.0),
        ([tensor(2.0), tensor(4.0)], 12.0),
        ((tensor(2.0), tensor(4.0)), 12.0),
        (torch.stack([tensor(2.0), tensor(4.0)]), 12.0),
        (torch.stack([tensor(1.0), tensor(2.0), tensor(4.0), tensor(5.0)]).reshape(2, 2), 12.0),
        ([torch.stack([tensor(1.0), tensor(3.0)]), torch.stack([tensor(3.0), tensor(5.0)])], 12.0),
        ((tensor(2.0), {"accuracy": 0.5}), 8.0),
        (LossSum(tensor(2.0), 4.0), 2.0),
        ((LossSum(tensor(2.0), 4.0), {"accuracy": 0.5}), 2.0),
        ({"ce": LossSum(tensor(2.0), 4.0)}, 2.0),
        ({"loss": LossSum(tensor(2.0), 4.0)}, 2.0),
    ],
)
def test_what_a_worker_may_return(output: Any, total: float) -> None:
    losses, metrics = read_train_output(output, batch_of())
    assert {name: (loss.total.item(), loss.weight) for name, loss in losses.items()} == {TERM: (total, 4.0)}
    assert metrics == (
        {"accuracy": Metric(2.0, 4.0)} if isinstance(output, tuple) and isinstance(output[1], dict) else {}
    )


def test_metrics_are_means_over_the_batch_or_pairs() -> None:
    batch = batch_of(a=1.0)
    _, metrics = read_train_output(
        (tensor(1.0), {"mean": tensor(0.5), "pair": (3, 6), "metric": Metric(1.0, 2.0)}), batch
    )
    assert metrics == {"mean": Metric(1.5, 3.0), "pair": Metric(3.0, 6.0), "metric": Metric(1.0, 2.0)}
    with pytest.raises(ModelError, match="the metric 'name' as a str, not as a number"):
        read_train_output((tensor(1.0), {"name": "x"}), batch)


def test_several_terms() -> None:
    output = {"ce": LossSum(tensor(6.0), 3.0), "aux": LossSum(tensor(1.0), 2.0)}
    losses, _ = read_train_output(output, batch_of(ce=3.0, aux=2.0))
    assert {name: loss.weight for name, loss in losses.items()} == {"ce": 3.0, "aux": 2.0}
    with pytest.raises(ModelError, match=r"returned the terms \['aux', 'ce'\]") as error:
        read_train_output(output, batch_of())
    assert "write loss_weights(self, batch) -> {'ce': …, 'aux': …}" in str(error.value)
    with pytest.raises(ModelError, match=r"one loss, loss_weights gives the terms \['aux', 'ce'\]"):
        read_train_output(tensor(1.0), batch_of(ce=3.0, aux=2.0))


def test_a_sum_of_another_weight_is_refused() -> None:
    with pytest.raises(ModelError, match="a sum of weight 5, the batch weighs 4") as error:
        read_train_output(LossSum(tensor(1.0), 5.0), batch_of())
    assert "write loss_weights(self, batch)" in str(error.value)


@pytest.mark.parametrize("output", [tensor(2.0), LossSum(tensor(2.0), 7.0), (tensor(2.0), {"accuracy": 0.5})], ids=str)
def test_a_batch_that_stands_in_counts_for_nothing(output: Any) -> None:
    batch = batch_of(counts=False, loss=0.0)
    losses, metrics = read_train_output(output, batch)
    loss = losses[TERM]
    assert (loss.total.item(), loss.weight, metrics) == (0.0, 0.0, {})
    loss.total.backward()  # others wait in it


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (torch.ones(3), r"a tensor of shape \[3\] without a graph"),
        (torch.tensor(1.0), r"a tensor of shape \[\] without a graph"),
        (LossSum(torch.tensor(1.0), 4.0), r"a tensor of shape \[\] without a graph"),
        (2.0, "a float"),
        (None, "a NoneType"),
        ({"loss": tensor(1.0)}, "a dict"),
        ([], "a list"),
        ([tensor(1.0), 2.0], "a list"),
        (tensor(1.0).expand(0), r"a tensor of shape \[0\]"),
    ],
    ids=str,
)
def test_what_is_no_loss_is_refused(output: Any, says: str) -> None:
    with pytest.raises(ModelError, match=f"returned {says}.*not a loss with a graph") as error:
        read_train_output(output, batch_of())
    assert "return outputs.loss" in str(error.value)


def test_several_of_different_sizes_are_refused() -> None:
    with pytest.raises(ModelError, match="tensors of 1 and 2 elements, whose mean is ambiguous"):
        read_train_output([tensor(1.0), torch.stack([tensor(1.0), tensor(2.0)])], batch_of())


def test_each_element_of_a_metric_counts_once() -> None:
    _, metrics = read_train_output((tensor(1.0), {"rows": torch.tensor([1.0, 2.0, 6.0])}), batch_of())
    assert metrics == {"rows": Metric(9.0, 3.0)}


# -- Whether a model shifts its labels ---------------------------------------------------------------------------------


def scores(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(0)
    return nn.Embedding(9, 9)(batch["input_ids"])


def shifting(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """As causal language models of transformers do."""
    return nn.functional.cross_entropy(scores(batch)[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def aligned(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """As token classifiers do."""
    return nn.functional.cross_entropy(scores(batch).flatten(0, 1), batch["labels"].flatten())


def with_auxiliary(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A loss that is there without a target too."""
    labels = batch["labels"][:, 1:]
    counted = torch.nan_to_num(shifting(batch)) if (labels >= 0).any() else torch.zeros(())
    return counted + scores(batch).square().mean()


def squared(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Values for each place, none of them a class."""
    return (scores(batch)[..., 0] - batch["labels"]).square().mean()


def half_precision(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """So coarse that a mean over many targets hides two of them."""
    return aligned(batch).bfloat16()


def demanding(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Fails where targets are few."""
    if (batch["labels"] >= 0).sum() < 5:
        raise ValueError
    return aligned(batch)


def example(first: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.arange(12).reshape(2, 6) % 9
    labels = ids.clone()
    labels[:, 0] = first
    labels[0, 3] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("loss", "targets"),
    [(shifting, 9.0), (aligned, 11.0), (with_auxiliary, 9.0), (half_precision, 11.0), (demanding, 11.0)],
)
def test_whether_labels_are_shifted_is_measured(loss: Any, targets: float) -> None:
    calls: list[int] = []

    def measure(batch: Any) -> float | None:
        calls.append(1)
        try:
            return measured(loss(batch))
        except ValueError:
            return None

    weights = BatchWeights(lambda batch: None, measure, ALONE)
    masked = example(first=-100)
    assert weights([masked]) == [{TERM: 9.0}]  # the first labels are no targets: both ways agree
    assert not calls
    assert weights([masked, example()]) == [{TERM: 9.0}, {TERM: targets}]
    assert weights([example()]) == [{TERM: targets}]
    assert len(calls) == (4 if loss is demanding else 2)  # once


def test_values_are_counted_where_the_loss_is_squared() -> None:
    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "labels": torch.rand(2, 3)}
    weights = BatchWeights(lambda batch: None, lambda batch: measured(squared(batch)), ALONE)
    assert weights([batch]) == [{TERM: 6.0}]


def test_a_tokenizers_batch_keeps_its_type() -> None:
    batch = BatchEncoding(example())
    weights = BatchWeights(lambda batch: None, lambda batch: measured(aligned(batch.to("cpu"))), ALONE)
    assert weights([batch]) == [{TERM: 11.0}]
    assert torch.equal(batch["labels"], example()["labels"])


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "4", True, None])
def test_a_declared_weight_is_a_number_of_at_least_0(value: Any) -> None:
    weights = BatchWeights(lambda batch: {"ce": value}, lambda batch: 1.0, ALONE)
    with pytest.raises(ModelError, match=r"loss_weights returned .* for the term 'ce', not a number of at least 0"):
        weights([example()])


def test_declared_weights_count_and_nothing_is_measured() -> None:
    def never(batch: Any) -> float:
        raise AssertionError

    weights = BatchWeights(lambda batch: {"ce": 2, "aux": 0.5}, never, ALONE)
    assert weights([example()]) == [{"ce": 2.0, "aux": 0.5}]
    with pytest.raises(ModelError, match="loss_weights returned 3, not a dict of numbers"):
        BatchWeights(lambda batch: 3, never, ALONE)([example()])  # pyright: ignore[reportArgumentType]
    told = iter([{"a": 1.0}, {"b": 1.0}])
    with pytest.raises(ModelError, match=r"gives the terms \['a'\] for one batch and \['b'\] for another"):
        BatchWeights(lambda batch: next(told), never, ALONE)([1, 2])


def on_sharded_ranks() -> tuple[float, int]:
    """Rank 0's batch tells nothing; rank 1's does, and both have to measure."""
    ranks, calls = group(), 0

    def measure(batch: Any) -> float:
        nonlocal calls
        calls += 1
        ranks.barrier()  # a forward of a sharded model
        return measured(aligned(batch))

    weights = BatchWeights(lambda batch: None, measure, ranks)
    weights([example(first=4 if ranks.rank else -100)])
    return weights([example()])[0][TERM], calls


def test_all_ranks_measure_together() -> None:
    assert run_ranks(on_sharded_ranks, 2) == [(11.0, 2)] * 2


@pytest.mark.parametrize("output", [None, "x", {"loss": torch.ones(())}, [torch.zeros(0)]], ids=str)
def test_what_is_no_number_measures_as_none(output: Any) -> None:
    assert math.isnan(measured(output))


def test_sums_measure_as_their_total() -> None:
    assert measured({"a": LossSum(torch.tensor(2.0), 1.0), "b": LossSum(torch.tensor(3.0), 1.0)}) == 5.0
    assert measured((LossSum(torch.tensor(2.0), 1.0), {"x": 1})) == 2.0
