"""A contrastive loss is one of all rows of a step, however they are spread over ranks and micro-batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardtune import Batch, LossSum, Sample
from shardtune.batch.seeds import derive_seed, seed_generators
from shardtune.config import ActorConfig, load_recipe
from shardtune.data.loader.step_loader import BatchMaker, Limits
from shardtune.errors import ModelError
from shardtune.models.whole_step_adapter import WholeStepAdapter
from shardtune.optim.build import build_optimizer
from shardtune.parallel.fsdp2 import shard
from shardtune.parallel.ranks import join_ranks
from shardtune.parallel.weights import Weights
from shardtune.training.step import optimizer_step
from shardtune.training.whole_step_loss import WholeStep
from tests.support.dist.ranks import run_ranks

ROWS, WIDTH = 7, 6


class Pair(nn.Module):
    """Two views of a row to two vectors, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.tower(left), self.tower(right), self.scale.expand(len(left))


class Contrast(WholeStepAdapter):
    """InfoNCE with the other rows of the step as negatives."""

    def build(self) -> nn.Module:
        return Pair()

    def encode(self, row: Mapping[str, Any]) -> Sample:
        return Sample(fields={name: np.asarray(row[name]) for name in ("left", "right", "number")})

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        left, right, scale = model(batch["left"], batch["right"])
        number = batch["number"]  # no output of the model, but known of each row
        return {"left": left, "right": right, "scale": scale, "number": number, "counts": number >= 0}

    def step_loss(self, outputs: Mapping[str, torch.Tensor]) -> LossSum:
        logits = outputs["left"] @ outputs["right"].t() * outputs["scale"].mean()
        number = outputs["number"]
        targets = torch.where(outputs["counts"], (number[:, None] == number).int().argmax(1), -100)
        return LossSum(F.cross_entropy(logits, targets, reduction="sum"), len(logits))


class Rows:
    """Seven rows of two views."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.views = draw.normal(size=(ROWS, 2, WIDTH))
        self.lengths = np.ones(ROWS, np.int32)
        self.term_weights = {"loss": np.ones(ROWS)}

    def row(self, index: int) -> Sample:
        views = {"left": self.views[index, 0], "right": self.views[index, 1]}
        return Sample(fields={**views, "number": np.array(index)}, size=1)


def make_adapter() -> Contrast:
    recipe = load_recipe(
        {
            "actor": {
                "model": {"precision": "fp64", "adapter": f"{__file__}:Contrast"},
                "optim": {"name": "SGD", "lr": 0.1, "weight_decay": 0.0},
            },
            "data": {"train_data_paths": "unused.jsonl"},
        },
        files_must_exist=False,
    )
    return Contrast(recipe)


def steps(micro_batch_size: int, number: int = 2) -> tuple[list[float], list[float], dict[str, torch.Tensor], float]:
    """Losses, norms and weights after some steps on the ranks there are, and the loss of the evaluation."""
    adapter, ranks = make_adapter(), join_ranks("cpu", ActorConfig())
    torch.manual_seed(0)
    model = adapter.build().double()
    root = adapter.root(model)
    shard(root, [model.tower[0]], ranks, "fp64", entry_points=root.entry_points)
    weights = Weights(root, model, "fp64", ranks)
    optimizer = build_optimizer(weights.trainable(), adapter.recipe.actor.optim)
    data = Rows()
    maker = BatchMaker(data, Limits(micro_batch_size), adapter, rank=ranks.rank, num_ranks=ranks.world_size)
    whole = WholeStep(adapter, ranks)
    results = [
        optimizer_step(
            root, maker.micro_batches(np.arange(ROWS)), {"loss": float(ROWS)}, weights, optimizer, ranks,
            draws=(0, step, ranks.rank), clip=0.5, accumulate=whole.accumulate,
        )
        for step in range(number)
    ]  # fmt: skip
    measured = whole.evaluate(root, iter([maker.micro_batches(np.arange(ROWS))]), poll=lambda: None)
    full = {name: _full(parameter) for name, parameter in model.named_parameters()}
    return (
        [result.loss for result in results],
        [result.gradient_norm for result in results],
        full,
        measured["loss/loss"].mean,
    )


def _full(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, torch.distributed.tensor.DTensor) else parameter).detach()


def plain(number: int = 2) -> tuple[list[float], list[float], dict[str, torch.Tensor], float]:
    """The same in plain PyTorch: all rows in one forward."""
    torch.manual_seed(0)
    model = Pair().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    views = torch.from_numpy(Rows().views)

    def loss() -> torch.Tensor:
        left, right, scale = model(views[:, 0], views[:, 1])
        return F.cross_entropy(left @ right.t() * scale.mean(), torch.arange(ROWS))

    losses, norms = [], []
    for _ in range(number):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(value.item())
    return losses, norms, dict(model.named_parameters()), loss().item()


def compare(got: Any, wanted: Any) -> None:
    for mine, other in zip(got[:2], wanted[:2], strict=True):
        assert mine == pytest.approx(other, abs=1e-12)
    for name, parameter in wanted[2].items():
        torch.testing.assert_close(got[2][name], parameter.detach(), atol=1e-12, rtol=0)
    assert got[3] == pytest.approx(wanted[3], abs=1e-12)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 7])
def test_micro_batches_do_not_change_the_loss_of_a_step(micro_batch_size: int) -> None:
    compare(steps(micro_batch_size), plain())


def test_ranks_do_not_change_the_loss_of_a_step() -> None:
    # Seven rows in micro-batches of three on two ranks: one of four micro-batches is a filler's or is not full.
    for got in run_ranks(steps, 2, 3):
        compare(got, plain())


class Counting(Contrast):
    """Its forwards in training add up rows in a buffer, and its outputs are larger with it."""

    def build(self) -> nn.Module:
        model = Pair()
        model.register_buffer("seen", torch.zeros(()))
        return model

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        model.get_buffer("seen").add_(len(batch.rows))
        found = super().outputs(model, batch)
        return {**found, "left": found["left"] * model.get_buffer("seen").clone()}


def accumulated(kind: type[Contrast]) -> tuple[nn.Module, Contrast, Sequence[Batch]]:
    """A model with the gradients of a step in three micro-batches."""
    adapter, ranks = kind(make_adapter().recipe), join_ranks("cpu", ActorConfig())
    torch.manual_seed(0)
    model = adapter.build().double()
    root = adapter.root(model)
    weights = Weights(root, model, "fp64", ranks)
    batches = BatchMaker(Rows(), Limits(3), adapter).micro_batches(np.arange(ROWS))
    WholeStep(adapter, ranks).accumulate(root, batches, {"loss": float(ROWS)}, weights, draws=(0, 0, 0), scale=1.0)
    return model, adapter, batches


def require_gradients_of(outputs: Sequence[Mapping[str, torch.Tensor]], adapter: Contrast, model: nn.Module) -> None:
    """Compare a model's gradients with those of the loss of outputs with a graph."""
    loss = adapter.step_loss({name: torch.cat([each[name] for each in outputs]) for name in outputs[0]})
    wanted = torch.autograd.grad(loss.total / loss.weight, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-12, rtol=0)


def test_both_forwards_of_a_micro_batch_find_the_same_buffers() -> None:
    model, adapter, batches = accumulated(Counting)
    assert model.get_buffer("seen") == ROWS  # as of one forward each
    model.get_buffer("seen").zero_()
    require_gradients_of([adapter.outputs(model, batch) for batch in batches], adapter, model)


class CountingUnsaved(Counting):
    """The same in a buffer of which there is no checkpoint; another is made anew by each forward."""

    def build(self) -> nn.Module:
        model = Pair()
        model.register_buffer("seen", torch.zeros(()), persistent=False)
        model.register_buffer("last", torch.ones(()), persistent=False)
        return model

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        found = super().outputs(model, batch)
        left = found["left"] * model.get_buffer("last")
        model.register_buffer("last", model.get_buffer("last") + len(batch.rows), persistent=False)
        return {**found, "left": left}


def test_both_forwards_find_the_same_buffers_that_are_not_persistent() -> None:
    model, adapter, batches = accumulated(CountingUnsaved)
    assert (model.get_buffer("seen"), model.get_buffer("last")) == (ROWS, ROWS + 1)
    model.get_buffer("seen").zero_()
    model.get_buffer("last").fill_(1.0)
    require_gradients_of([adapter.outputs(model, batch) for batch in batches], adapter, model)


class Noisy(Contrast):
    """Adds noise of numpy and of Python to its outputs."""

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        found = super().outputs(model, batch)
        noise = torch.from_numpy(np.random.standard_normal(found["left"].shape))
        return {**found, "left": (found["left"] + noise) * random.random()}


def test_both_forwards_of_a_micro_batch_draw_the_same() -> None:
    model, adapter, batches = accumulated(Noisy)
    found = []
    for number, batch in enumerate(batches):
        seed_generators(derive_seed(0, 0, number, 0, "train"))
        found.append(adapter.outputs(model, batch))
    require_gradients_of(found, adapter, model)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda left: {"mean": left.mean(0)}, r"'mean' has shape \[4\], the micro-batch 7 rows"),
        (lambda left: {"rows": len(left)}, "'rows' has type int, the micro-batch 7 rows"),
        (lambda left: left, "outputs returned a Tensor, not a dict of tensors"),
    ],
)
def test_an_output_without_a_row_each_is_refused(changed: Callable[[torch.Tensor], Any], message: str) -> None:
    class Changed(Contrast):
        def outputs(self, model: nn.Module, batch: Batch) -> Any:
            return changed(super().outputs(model, batch)["left"])

    adapter = Changed(make_adapter().recipe)
    model = adapter.build().double()
    maker = BatchMaker(Rows(), Limits(7), adapter)
    with pytest.raises(ModelError, match=message):
        WholeStep(adapter, join_ranks("cpu", ActorConfig())).evaluate(
            adapter.root(model), iter([maker.micro_batches(np.arange(ROWS))]), poll=lambda: None
        )
