"""Losses that differentiate a gradient have the numbers of one process on ranks, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import grad, hessian, jvp, vmap
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from shardtune import Adapter
from shardtune.batch import LossSum
from shardtune.config.rank_layout import Layout
from shardtune.errors import ModelError
from shardtune.models.loss import linear_cross_entropy
from shardtune.models.objectives.log_probs import log_probs
from shardtune.parallel.collectives import exchange, replicated_input, sum_over
from shardtune.parallel.meta_init import materialise
from shardtune.parallel.ranks import Ranks, lay_out
from shardtune.parallel.shard import shard_model
from shardtune.parallel.torch_private.recomputation import selective_contexts
from shardtune.training.step import optimizer_step
from tests.support.chosen import chosen, slow_except
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import whole

WIDTH = 4
SHARDED, COPIES, FLAT = Layout(shard=2), Layout(replicate=2), Layout(shard=2, flat=True)
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


class Energy(nn.Module):
    """A number for each point; `aside` is used on request, `extra` never."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.aside, self.extra = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, aside: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x + torch.tanh(self.aside(x)) if aside else x)


class Linears(nn.Sequential):
    """Its gradient for inputs depends on the weights alone: a pass through it reaches no output of a unit."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def slope(model: Any, x: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    value = model(x, **how)
    return x, value, torch.autograd.grad(value.sum(), x, create_graph=True)[0]


def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    _, value, found = slope(model, x)
    return value.square().sum() + (found.norm(dim=-1) - 1).square().sum()


def forces(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (slope(model, x)[2] - x).square().sum()


def laplacian(model: Any, x: torch.Tensor) -> torch.Tensor:
    x, value, found = slope(model, x)
    second = sum(torch.autograd.grad(found[:, n].sum(), x, create_graph=True)[0][:, n] for n in range(WIDTH))
    return (value[:, 0] - second).square().sum()


def called_again(model: Any, x: torch.Tensor) -> torch.Tensor:
    _, value, found = slope(model, x)
    return (model(x + 0.1 * found) - value).square().sum() + model(2 * x).square().sum() + found.square().sum()


def some_parameters(model: Any, x: torch.Tensor) -> torch.Tensor:
    return slope(model, x, aside=bool(x[0, 0] > 0))[2].square().sum()


def not_differentiated(model: Any, x: torch.Tensor) -> torch.Tensor:
    _, value, found = slope(model, x)
    return (value * found.detach().norm(dim=-1, keepdim=True)).square().sum()


def first_only(model: Any, x: torch.Tensor) -> torch.Tensor:
    given = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(model(given).square().sum(), given)
    return model(x + 0.1 * found.sign()).square().sum()


def other_passes(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Between the gradient and the pass through it are passes and forwards that need none of it, or its value."""
    given, value, found = slope(model, x)
    (second,) = torch.autograd.grad(found.sum(), given, retain_graph=True)
    other = (2 * x).requires_grad_()
    (first,) = torch.autograd.grad(model(other).square().sum(), other)
    with torch.no_grad():
        weight = model(3 * x)
    return (found.square() * (1 + second.square() + first.square())).sum() + (weight * value).sum()


def by_functions(model: Any, x: torch.Tensor) -> torch.Tensor:
    second = vmap(hessian(lambda row: model(row[None])[0, 0]))(x)
    value, along = jvp(model, (x,), (x.flip(-1),))
    first = grad(lambda rows: model(rows).sum())(x)
    return second.square().sum() + (value * along).sum() + first.square().sum()


@dataclass
class Case:
    """A loss, and how its model is sharded; `recomputes` is how blocks are checkpointed."""

    loss: Loss
    layout: Layout = SHARDED
    model: type[nn.Module] = Energy
    recomputes: str = ""
    how: dict[str, Any] = field(default_factory=dict)
    frozen: str = "nothing"


CASES = {
    "value and penalty": Case(penalty),
    "copies": Case(penalty, COPIES),
    "checkpoints": Case(called_again, recomputes="all"),
    "selective checkpoints": Case(called_again, recomputes="some"),
    "kept between forward and backward": Case(penalty, how={"reshard_after_forward": False}),
    "gathered ahead": Case(called_again, how={"prefetch": 2}),
    "forces": Case(forces),
    "third derivatives": Case(laplacian),
    "called again": Case(called_again),
    "called again, copies": Case(called_again, COPIES, recomputes="all"),
    "some parameters": Case(some_parameters),
    "some parameters, copies": Case(some_parameters, COPIES),
    "no output of a unit reached": Case(forces, model=Linears),
    "not differentiated": Case(not_differentiated),
    "first derivatives": Case(first_only),
    "other passes": Case(other_passes),
    "other passes, checkpoints": Case(other_passes, recomputes="all", how={"prefetch": 2}),
    "a frozen unit": Case(penalty, frozen="blocks.0."),
    "frozen but for one": Case(forces, frozen="blocks.1.", how={"prefetch": 2}),
    "torch.func": Case(by_functions),
    "torch.func, copies": Case(by_functions, COPIES),
}
QUICK = (
    "value and penalty", "copies", "selective checkpoints", "gathered ahead", "third derivatives",
    "called again, copies", "some parameters", "no output of a unit reached", "not differentiated", "other passes",
    "a frozen unit", "torch.func",
)  # fmt: skip


def products(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "addmm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass
class Trained:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def points(number: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


@dataclass
class Rows:
    x: torch.Tensor
    weights: dict[str, float] = field(default_factory=lambda: {"loss": 2.0})


def train(case: Case, ranks: Ranks) -> Trained:
    """Two steps of two micro-batches a rank; an evaluation before each has weights that are changed in place."""
    torch.manual_seed(3)
    model = case.model()
    blocks = [each for each in model.modules() if isinstance(each, Block)]
    contexts = {"context_fn": partial(selective_contexts, products)} if case.recomputes == "some" else {}
    for block in blocks if case.recomputes else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **contexts)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(case.frozen not in name)
    hold = shard_model(model, blocks, ranks, "fp64", **case.how)
    materialise(model, dtype=torch.float64, device=ranks.device)
    weights = hold(model)
    optimizer = torch.optim.SGD(weights.trainable().values(), lr=0.05, weight_decay=0.1)
    every = [Rows(points(number)) for number in range(4)]
    mine = every if ranks.world_size == 1 else every[2 * ranks.rank : 2 * ranks.rank + 2]
    losses, norms = [], []
    for step in range(2):
        for factor in (1.5, 1 / 1.5):
            with torch.no_grad():
                for parameter in weights.parameters.values():
                    parameter.mul_(factor)
            weights.copy_masters_to_model()
            losses += [float(case.loss(model, points(9)).detach())]
        result = optimizer_step(
            lambda batch: {"loss": LossSum(case.loss(model, batch.x), 2.0)}, mine, {"loss": 8.0}, weights, optimizer,
            ranks, draws=(0, step, ranks.rank), clip=None,
        )  # fmt: skip
        losses.append(result.loss)
        norms.append(result.gradient_norm)
    return Trained(losses, norms, {name: whole(tensor).clone() for name, tensor in weights.tensors().items()})


def train_all(names: list[str]) -> list[Trained]:
    return [train(CASES[name], lay_out(CASES[name].layout, dist.get_rank(), CPU)) for name in names]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[Trained]]:
    """By case, what each of two ranks has found."""
    names = chosen(request, "name")
    return {name: [*pair] for name, *pair in zip(names, *run_ranks(train_all, 2, names), strict=True)}


@pytest.mark.parametrize("name", slow_except(CASES, *QUICK))
def test_ranks_have_the_numbers_of_one_process(name: str, found: dict[str, list[Trained]]) -> None:
    alone = train(CASES[name], Ranks(0, 1, CPU))
    assert all(alone.norms)
    for of_rank in found[name]:
        assert of_rank.losses == pytest.approx(alone.losses, rel=1e-12)
        assert of_rank.norms == pytest.approx(alone.norms, rel=1e-12)
        for key, weight in alone.weights.items():
            assert torch.allclose(of_rank.weights[key], weight, rtol=0, atol=1e-13), key


def test_a_selective_checkpoint_is_computed_again_as_often_as_it_is_needed() -> None:
    kept, plain = (train(Case(laplacian, recomputes=how), Ranks(0, 1, CPU)) for how in ("some", ""))
    assert kept.losses == plain.losses
    assert all(torch.equal(weight, plain.weights[key]) for key, weight in kept.weights.items())


class Forces(Adapter):
    @torch.enable_grad()
    def loss(self, model, batch):
        positions = batch["positions"].detach().requires_grad_()
        energy = model(positions)
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return LossSum((slope + batch["forces"]).square().sum(), len(energy))


def test_an_evaluation_differentiates_where_it_is_said() -> None:
    unused: Any = None
    batch = {"positions": points(0), "forces": points(1)}
    with torch.no_grad():
        found = Forces.loss(unused, lambda x: x.square().sum(-1), batch)
    assert torch.equal(found.total.detach(), (2 * points(0) + points(1)).square().sum())


# What has no second derivatives.


def cross_entropy(hidden: torch.Tensor) -> torch.Tensor:
    head, targets = torch.eye(WIDTH, dtype=hidden.dtype), torch.tensor([1, 2])
    return linear_cross_entropy(hidden, head, targets, torch.ones(2))[0]


def chances(hidden: torch.Tensor) -> torch.Tensor:
    return log_probs(hidden, torch.tensor([1, 2])).sum()


@pytest.mark.parametrize("loss", [cross_entropy, chances])
def test_a_gradient_without_a_graph_of_its_own_is_not_differentiated(
    loss: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    hidden = points(0).requires_grad_()
    (first,) = torch.autograd.grad(loss(hidden), hidden)
    assert first.abs().sum() > 0
    with pytest.raises(ModelError, match="has first derivatives only") as caught:
        torch.autograd.grad(loss(hidden), hidden, create_graph=True)
    assert "logits" in str(caught.value.remedy)


def differentiated(x: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The gradient of the square of a gradient."""
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


def through_collectives() -> list[torch.Tensor]:
    """What the rank's part of some points has, and all of them where every rank holds them."""
    rank = dist.get_rank()
    mesh = lay_out(SHARDED, rank, CPU).mesh
    assert mesh is not None
    ranks, mine = mesh["shard"], points(0)[rank : rank + 1]

    def replicated(x: torch.Tensor) -> torch.Tensor:
        return sum_over(replicated_input(x, ranks)[rank].pow(3).sum(), ranks).square()

    return [
        differentiated(mine, lambda x: sum_over(x.pow(3), ranks).square().sum()),
        differentiated(points(0), replicated),
        differentiated(mine, lambda x: exchange(x.pow(3), ranks, split=1, join=0).square().sum()),
    ]


def test_exchanges_between_ranks_are_differentiated_twice() -> None:
    x = points(0)
    summed = differentiated(x, lambda x: x.pow(3).sum(0).square().sum())
    held = differentiated(x, lambda x: x.pow(3).sum().square())
    moved = differentiated(x, lambda x: x.pow(3).square().sum())
    for rank, found in enumerate(run_ranks(through_collectives, 2)):
        for one, other in zip(found, (summed[rank : rank + 1], held, moved[rank : rank + 1]), strict=True):
            assert torch.allclose(one, other, rtol=1e-12, atol=0)


def backward_to_weights() -> str:
    ranks = lay_out(SHARDED, dist.get_rank(), CPU)
    model = Energy()
    hold = shard_model(model, list(model.blocks), ranks, "fp64")
    materialise(model, dtype=torch.float64, device=ranks.device)
    hold(model)
    value = model(points(0).requires_grad_()).square().sum()
    try:
        value.backward(create_graph=True)
    except ModelError as error:
        return f"{error} {error.remedy}"
    return ""


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_gradients_that_ranks_sum_is_refused() -> None:
    for message in run_ranks(backward_to_weights, 2):
        assert "a gradient of weights, which ranks sum, has first derivatives only" in message
        assert "torch.autograd.grad(value, inputs, create_graph=True)" in message


REFUSED = {Layout(tensor=2): "parallel.tensor) has first derivatives only", FLAT: "a model that FSDP1 shards has"}


def differentiate_on(layout: Layout, create_graph: bool) -> str:
    """The message that refuses a gradient."""
    ranks = lay_out(layout, dist.get_rank(), CPU)
    model = Linears()
    hold = shard_model(model, [], ranks, "fp64")
    materialise(model, dtype=torch.float64, device=ranks.device)
    hold(model)
    x = points(0).requires_grad_()
    try:
        torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", REFUSED)
def test_layouts_without_second_derivatives_refuse_them(layout: Layout) -> None:
    for message in run_ranks(differentiate_on, 2, layout, True):
        assert REFUSED[layout] in message
    assert run_ranks(differentiate_on, 2, layout, False) == ["", ""]
