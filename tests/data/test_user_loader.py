"""A user's own loader: what a mean loss means as a sum, and which batch is whose."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shardtune.data.loader import DataState, Step
from shardtune.data.user_loader import TERM, BatchLoader, UserBatch, targets_of
from shardtune.errors import ConfigError, DataError, ModelError
from shardtune.parallel.mesh import Ranks
from shardtune.parallel.shard import Weights
from shardtune.step import optimizer_step
from tests.dist.ranks import run_ranks
from tests.parallel.test_shard import group

ALONE = Ranks(0, 1, torch.device("cpu"))
BATCHES, ROWS = 7, 2


def batches(count: int = BATCHES) -> list[dict[str, torch.Tensor]]:
    """Batches of two rows with ragged numbers of targets; the fourth has none."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        labels = torch.randint(0, 9, (ROWS, 6), generator=generator)
        labels[torch.rand(labels.shape, generator=generator) < number / count] = -100
        if number == 3:
            labels[:] = -100
        made.append({"input_ids": torch.randint(0, 9, (ROWS, 6), generator=generator), "labels": labels})
    return made


def loader(items: Any = None, ranks: Ranks = ALONE, size: int = 4, *, sharded: bool = False) -> BatchLoader:
    return BatchLoader.of(
        batches() if items is None else items,
        {"sharded": sharded},
        ranks=ranks,
        global_batch_size=size,
        micro_batch_size=ROWS,
        shifted=False,
        seed=3,
    )


def one_epoch(made: BatchLoader) -> list[Step]:
    return list(islice(made.steps(DataState()), made.num_steps(0)))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)).double()


def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """As models compute it: 0 / 0 where nothing is a target."""
    return nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def take_step(made: BatchLoader, step: Step, model: nn.Module, ranks: Ranks) -> tuple[float, float, torch.Tensor]:
    """Loss, norm and (averaged over ranks by hand, as nothing is sharded here) gradient."""
    weights = Weights(model, model, "fp64", ALONE)
    kept: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def keep(*_: Any) -> None:
        kept.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))

    optimizer.register_step_pre_hook(keep)
    result = optimizer_step(
        lambda batch: made.losses(mean_loss(model, batch.fields), batch),
        step.micro_batches,
        step.denominators,
        weights,
        optimizer,
        ranks,
        draws=(0, 0, 0),
        clip=None,
    )
    gradient = kept[0]
    if ranks.mesh is not None:
        torch.distributed.all_reduce(gradient)
    return result.loss, result.gradient_norm, gradient


def big_batch(numbers: list[int]) -> tuple[float, torch.Tensor]:
    """Loss and gradient of some batches as one."""
    model = net()
    chosen = [batches()[number] for number in numbers]
    loss = mean_loss(model, {key: torch.cat([batch[key] for batch in chosen]) for key in chosen[0]})
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


def on_ranks(sharded: bool) -> list[tuple[float, torch.Tensor]]:
    """(loss, gradient) of each step of an epoch, each from the same weights."""
    ranks = group()
    items = batches()[ranks.rank :: ranks.world_size] if sharded else batches()
    made = loader(items, ranks, size=ROWS * ranks.world_size * 2, sharded=sharded)
    told = []
    for step in one_epoch(made):
        loss, _, gradient = take_step(made, step, net(), ranks)
        told.append((loss, gradient))
    return told


@pytest.mark.parametrize("sharded", [False, True], ids=["same batches everywhere", "sharded"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ragged_targets_give_the_loss_and_gradient_of_one_big_batch(ranks: int, sharded: bool) -> None:
    """Seven batches: the last step lacks some, and three ranks' sharded loaders do not even have as many."""
    cuts = {1: [[0, 1], [2, 3], [4, 5], [6]], 2: [[0, 1, 2, 3], [4, 5, 6]], 3: [[0, 1, 2, 3, 4, 5], [6]]}[ranks]
    told = [on_ranks(sharded)] if ranks == 1 else run_ranks(on_ranks, ranks, sharded)
    for steps in told:
        assert len(steps) == len(cuts)
        for (loss, gradient), numbers in zip(steps, cuts, strict=True):
            wanted_loss, wanted_gradient = big_batch(numbers)
            assert loss == pytest.approx(wanted_loss, abs=1e-12)
            torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=1e-12)


def test_a_mean_weighs_as_many_targets_as_it_averages() -> None:
    labels = torch.tensor([[5, -100, 3], [-100, 2, -100]])
    assert targets_of({"labels": labels}, shifted=False) == 3
    assert targets_of({"labels": labels}, shifted=True) == 2
    assert targets_of({"labels": torch.tensor([1, 0, 2])}, shifted=True) == 3
    assert targets_of({"name": "x", "pixel_values": torch.zeros(4, 3)}, shifted=True) == 4


@pytest.mark.parametrize("batch", [[torch.zeros(2)], {"name": "x"}, {"loss_scale": torch.ones(())}], ids=str)
def test_a_batch_whose_rows_cannot_be_counted_is_refused(batch: Any) -> None:
    with pytest.raises(DataError):
        targets_of(batch, shifted=True)


def batch_of(weight: float = 4.0) -> UserBatch:
    return UserBatch({}, {TERM: weight}, {})


def test_what_a_worker_may_return() -> None:
    made = loader()
    one, two = torch.tensor(2.0, requires_grad=True), torch.tensor(4.0, requires_grad=True)
    assert float(made.losses(one * 1, batch_of())[TERM].total) == 8.0
    assert float(made.losses([one * 1, two * 1], batch_of())[TERM].total) == 12.0
    assert float(made.losses((one * 1, two * 1), batch_of())[TERM].total) == 12.0
    told = batch_of()
    assert float(made.losses((one * 1, {"accuracy": 0.5}), told)[TERM].total) == 8.0
    assert told.metrics["accuracy"].mean == 0.5
    assert told.metrics["accuracy"].weight == 4.0


@pytest.mark.parametrize("output", [torch.ones(3), torch.tensor(1.0), 2.0, None], ids=str)
def test_what_is_no_loss_is_refused(output: Any) -> None:
    with pytest.raises(ModelError, match="not a scalar loss with a graph"):
        loader().losses(output, batch_of())


@pytest.mark.parametrize("number", range(5))
def test_a_run_that_goes_on_sees_the_rest_with_the_same_draws(number: int) -> None:
    def collate(items: list[int]) -> dict[str, torch.Tensor]:
        return {"rows": torch.tensor(items), "noise": torch.rand(len(items))}  # drawn in this process

    def made() -> BatchLoader:
        return loader(DataLoader(list(range(11)), batch_size=ROWS, shuffle=True, collate_fn=collate))  # pyright: ignore

    whole = list(islice(made().steps(DataState()), 6))
    rest = list(islice(made().steps(whole[number].state), 2))
    for one, other in zip(rest, whole[number:], strict=False):
        assert (one.state, one.after) == (other.state, other.after)
        for mine, theirs in zip(one.micro_batches, other.micro_batches, strict=True):
            assert torch.equal(mine.fields["rows"], theirs.fields["rows"])
            assert torch.equal(mine.fields["noise"], theirs.fields["noise"])
    epoch = torch.cat([batch.fields["rows"] for step in whole[:3] for batch in step.micro_batches])
    assert sorted(epoch.tolist()) == list(range(11))
    assert epoch.tolist() != list(range(11))


def test_sizes_that_do_not_divide_are_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"set actor.global_batch_size to 4 or 6"):
        loader(size=5)
    with pytest.raises(DataError, match="without a length"):
        loader(iter([]))


def test_a_loader_that_does_not_hold_its_length_is_an_error() -> None:
    class Short(list):
        def __len__(self) -> int:
            return 9

    with pytest.raises(DataError, match="ended after 7 batches, its length is 9"):
        list(islice(loader(Short(batches())).steps(DataState()), 5))
