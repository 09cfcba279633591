"""Ranks whose forwards use different units or parameters end before an update; those that use the same never do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardtune.batch import LossSum
from shardtune.config.rank_layout import Layout
from shardtune.errors import ModelError
from shardtune.parallel.meta_init import materialise
from shardtune.parallel.precision import MASTER_DTYPE
from shardtune.parallel.ranks import Ranks, lay_out
from shardtune.parallel.shard import shard_model
from shardtune.training.step import optimizer_step
from tests.support.chosen import chosen, slow_except
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import whole

WIDTH = 3


class Own(torch.autograd.Function):
    """A user's function: autograd gives it zeros where no gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 1.1


class Held:
    """What a unit may return: an object of a class that torch does not look into."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Block(nn.Module):
    """Two equal layers, of which a call uses one or both; what it returns is a view of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor, used: Sequence[int] = (0, 1), *, holds: bool = False) -> Any:
        for layer in used:
            found = torch.tanh(self.pair[layer](x))
            x = x + (Own.apply(found) if layer else found)
        return Held(x) if holds else x.flatten().view_as(x)


class Net(nn.Module):
    """Equal units, and equal layers outside of them; each micro-batch has the order in which they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)])

    def forward(self, batch: Rows) -> LossSum:
        for name, parameter in self.blocks.named_parameters():
            parameter.requires_grad_(f".pair.{batch.frozen}." not in name)
        x = batch.x.to(next(self.heads.parameters()).dtype)
        x = x * self.heads[0].weight if batch.begins else x
        x = x + self._steepest(x, batch) if batch.perturbed else x
        for block in batch.blocks:
            if block in batch.dropped:
                self.blocks[block](x, batch.layers)
                continue
            found = self.blocks[block](x, () if block in batch.skipped else batch.layers, holds=batch.holds)
            x = found.x if batch.holds else found
            x = x * 0.9 if block in batch.skipped else x.mul_(0.9)
        unread = x
        for block in batch.unread:
            unread = self.blocks[block](unread, batch.layers)
        return LossSum(torch.stack([self.heads[head](x).square().sum() for head in batch.heads]).sum(), 1.0)

    def _steepest(self, x: torch.Tensor, batch: Rows) -> torch.Tensor:
        """The gradient for the inputs, as adversarial training adds it to them; its graph is freed."""
        x = given = x.detach().requires_grad_()
        for block in batch.blocks:
            x = self.blocks[block](x)
        (slope,) = torch.autograd.grad(x.sum(), given)
        return slope


@dataclass
class Rows:
    """A micro-batch of one row.

    Attributes:
        blocks: the units that are called, in order.
        layers: that each of them uses.
        skipped: those that use none.
        dropped: those whose output the loss leaves out.
        unread: units that are called after them, in order, for nothing.
        perturbed: whether a first backward pass finds what is added to the inputs.
        heads: that are used.
        holds: whether units return objects that hold their results.
        begins: whether a weight outside of all units is used before the first of them.
        frozen: the layer of every block that is frozen in this micro-batch.
    """

    blocks: Sequence[int] = (0, 1, 2)
    layers: Sequence[int] = (0, 1)
    skipped: Sequence[int] = ()
    dropped: Sequence[int] = ()
    unread: Sequence[int] = ()
    perturbed: bool = False
    heads: Sequence[int] = (0, 1)
    holds: bool = False
    begins: bool = False
    frozen: int | None = None
    weights: dict[str, float] = field(default_factory=lambda: {"loss": 1.0})
    x: torch.Tensor = field(default_factory=lambda: torch.ones(1, WIDTH, dtype=torch.float64))


Steps = Sequence[Sequence[Rows]]
"""By rank, the micro-batches of a step."""
SHARDED = Layout(shard=2)
COPIES = Layout(replicate=2)
TENSOR = Layout(tensor=2)
FLAT = Layout(shard=2, flat=True)


@dataclass
class Case:
    """Micro-batches of two ranks, those of an evaluation before it, and how the model is sharded."""

    step: Steps
    layout: Layout = SHARDED
    each: bool = False
    reshard: bool = True
    prefetch: int = 1
    checkpoints: bool = False
    evaluates: Steps = ((), ())
    precision: str = "fp64"


@dataclass
class Trained:
    """The losses of two steps, or the message that ended them, and the weights before and afterwards."""

    losses: list[float]
    message: str
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


def train(case: Case, ranks: Ranks) -> Trained:
    """Two steps with weight decay, which a parameter without a gradient does not have."""
    torch.manual_seed(3)
    model = Net()
    for block in model.blocks if case.checkpoints else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    kept = {"reshard_after_forward": case.reshard, "prefetch": case.prefetch}
    hold = shard_model(model, [*model.blocks], ranks, case.precision, **kept)
    materialise(model, dtype=MASTER_DTYPE[case.precision], device=ranks.device)
    weights = hold(model, reduce_each=case.each)
    optimizer = torch.optim.SGD(
        weights.trainable().values(), lr=0.05, weight_decay=0.1
    )  # of None as of zeros, but for this
    before = {name: whole(tensor).clone() for name, tensor in weights.tensors().items()}
    divided = ranks.world_size > 1 and case.layout.tensor == 1
    mine: Any = case.step[ranks.rank] if divided else [batch for own in case.step for batch in own]
    losses, message, every = [], "", float(sum(map(len, case.step)))
    try:
        with torch.no_grad():
            for batch in case.evaluates[ranks.rank]:
                model(batch)
        weights.copy_masters_to_model()
        weights.unit_calls.compare()
        for number in range(2):
            result = optimizer_step(
                lambda batch: {"loss": model(batch)}, mine, {"loss": every}, weights, optimizer, ranks,
                draws=(0, number, ranks.rank), clip=None,
            )  # fmt: skip
            losses.append(result.loss)
    except ModelError as error:
        message = str(error)
    after = {name: whole(tensor).clone() for name, tensor in weights.tensors().items()}
    return Trained(losses, message, before, after)


def train_all(cases: Sequence[Case]) -> list[Trained]:
    rank = dist.get_rank()
    return [train(case, lay_out(case.layout, rank, torch.device("cpu"))) for case in cases]


def both(*batches: Rows) -> Steps:
    return [batches, batches]


TWICE = both(Rows(blocks=(0, 1, 1, 2, 0)), Rows())
HEADS = [[Rows(heads=(0,))], [Rows(heads=(1,))]]
SKIPPED = [[Rows(skipped=(1,))], [Rows()]]
FIRST_SKIPPED = [[Rows(skipped=(0,)), Rows()], [Rows(), Rows()]]
HELD_SKIPPED = [[Rows(skipped=(1,), holds=True)], [Rows(holds=True)]]
ALL_SKIPPED = [[Rows(skipped=(0, 1, 2))], [Rows()]]
UNREAD = Rows(blocks=(0,), unread=(1, 2))
FROZEN = [[Rows(), Rows(layers=(1,), frozen=0)], [Rows(layers=(1,)), Rows(layers=(1,), frozen=0)]]
LAYERS = [[Rows(layers=(1,))], [Rows(layers=(0,))]]
SWAPPED_HEADS = [[Rows(heads=(0,)), Rows(heads=(1,))], [Rows(heads=(1,)), Rows(heads=(0,))]]
LATE_HEAD = [[Rows(heads=(0,)), Rows()], []]
ALIKE: dict[str, Case] = {
    "a first gradient in the last micro-batch, whole rows on both ranks, in half precision": Case(
        LATE_HEAD, TENSOR, precision="bf16"
    ),
    "a unit several times": Case(TWICE),
    "checkpoints": Case(TWICE, checkpoints=True, evaluates=TWICE),
    "kept between forward and backward": Case(TWICE, reshard=False, checkpoints=True),
    "summed after each": Case(TWICE, each=True),
    "copies": Case(TWICE, COPIES, checkpoints=True),
    "FSDP1": Case(TWICE, FLAT, checkpoints=True),
    "FSDP1, kept": Case(TWICE, FLAT, reshard=False),
    "a unit and a head that no rank uses": Case(both(Rows(blocks=(0, 1), heads=(0,)))),
    "a unit in one micro-batch": Case(both(Rows(), Rows(blocks=(0, 1)))),
    "heads in other micro-batches": Case([[Rows(heads=(0,)), Rows(heads=(1,))], [Rows(heads=(1,)), Rows(heads=(0,))]]),
    "copies called another number of times": Case([[Rows(blocks=(0, 1, 2, 0))], [Rows()]], COPIES),
    "FSDP1, parameters of other ranks": Case([[Rows(layers=(0,), heads=(1,))], [Rows(layers=(1,), heads=(0,))]], FLAT),
    "another head": Case(HEADS),
    "another head, copies": Case(HEADS, COPIES),
    "heads in another order, summed after each": Case(SWAPPED_HEADS, each=True),
    "another layer": Case(LAYERS),
    "another layer, checkpoints": Case(LAYERS, checkpoints=True),
    "another layer, kept": Case(LAYERS, reshard=False),
    "a layer of one rank": Case([[Rows(layers=(0,)), Rows(layers=(0,))], [Rows(), Rows(layers=(0,))]], each=True),
    "no layer of a unit on one rank": Case(SKIPPED),
    "no layer of a unit on one rank, copies": Case(SKIPPED, COPIES),
    "no layer of a unit on one rank, summed after each": Case([[*own, Rows()] for own in SKIPPED], each=True),
    "no layer of a unit on one rank, then not called": Case([[*own, Rows(blocks=(0, 2))] for own in SKIPPED]),
    "no layer of the first unit on one rank": Case(FIRST_SKIPPED),
    "no layer of any unit on one rank, copies": Case(ALL_SKIPPED, COPIES, checkpoints=True),
    "FSDP1, no layer of a unit on one rank": Case([[*own, Rows()] for own in SKIPPED], FLAT),
    "FSDP1, no layer of any unit on one rank": Case(ALL_SKIPPED, FLAT, checkpoints=True),
    "FSDP1, no layer of the first unit on one rank, in half precision": Case(FIRST_SKIPPED, FLAT, precision="bf16"),
    "no layer of a unit on one rank, in an object": Case(HELD_SKIPPED),
    "no layer of any unit on one rank, in an object": Case([[Rows(skipped=(0, 1, 2), holds=True)], HELD_SKIPPED[1]]),
    "FSDP1, no layer of a unit on one rank, in an object": Case(HELD_SKIPPED, FLAT),
    "no layer of a unit on one rank, gathered ahead": Case(SKIPPED, prefetch=2),
    "no layer of any unit on one rank, gathered ahead": Case(ALL_SKIPPED, prefetch=2),
    "a weight outside of units before the first on one rank": Case([[Rows(), Rows(begins=True)], [Rows(), Rows()]]),
    "the output of a unit left out on all ranks": Case(both(Rows(dropped=(1,)), Rows(dropped=(1,)))),
    "the last units for nothing": Case(both(UNREAD, UNREAD)),
    "a backward pass inside the forward": Case(both(Rows(perturbed=True), Rows())),
    "no layer of a unit": Case([SKIPPED[0], SKIPPED[0]]),
    "a layer of one rank that is frozen before the sum": Case(FROZEN),
    "in half precision": Case(SWAPPED_HEADS, precision="bf16"),
    "another layer, in half precision": Case([[*own, Rows(layers=(1,))] for own in LAYERS], precision="fp16"),
    "a layer that no rank uses": Case(both(Rows(layers=(1,)), Rows(layers=(1,)))),
}
"""Nothing is wrong, and the losses are those of one process."""
ORDERED = [[Rows(blocks=(0, 1, 2))], [Rows(blocks=(1, 0, 2))]]
CHOSEN = [[Rows(blocks=(0, 1))], [Rows(blocks=(0, 2))]]
LATER = [[Rows(), Rows(blocks=(0, 1))], [Rows(), Rows(blocks=(0, 2))]]
UNITS = "ranks called units of the model in different order: where rank 0 used blocks.{}, rank 1 used blocks.{}, "
DIFFERENT: dict[str, tuple[Case, str]] = {
    "another order": (Case(ORDERED), UNITS.format(0, 1)),
    "another order, copies": (Case(ORDERED, COPIES), UNITS.format(2, 2)[:60]),
    "another order, FSDP1": (Case(ORDERED, FLAT), UNITS.format(0, 1)),
    "another order, FSDP1, kept": (Case(ORDERED, FLAT, reshard=False), UNITS.format(0, 1)),
    "another unit": (Case(CHOSEN), UNITS.format(1, 2)),
    "another unit, checkpoints": (Case(CHOSEN, checkpoints=True), UNITS.format(1, 2)),
    "another unit, kept": (Case(CHOSEN, reshard=False), UNITS.format(1, 2)),
    "another unit, copies": (Case(CHOSEN, COPIES), UNITS.format(1, 2)),
    "another unit in the last micro-batch": (Case(LATER), UNITS.format(1, 2)),
    "another unit in the last micro-batch, FSDP1": (Case(CHOSEN, FLAT), UNITS.format(1, 2)),
    "another unit in an evaluation": (Case(both(Rows()), evaluates=CHOSEN), UNITS.format(1, 2)),
    "another unit in an evaluation, FSDP1": (Case(both(Rows()), FLAT, evaluates=CHOSEN), UNITS.format(1, 2)),
}
"""Weights or gradients would be mixed; what the message begins with."""


FURTHER = (
    "kept between forward and backward", "FSDP1, kept", "a unit in one micro-batch", "heads in other micro-batches",
    "another head, copies", "heads in another order, summed after each", "another layer", "another layer, kept",
    "no layer of a unit on one rank, copies", "no layer of a unit on one rank, summed after each",
    "no layer of a unit on one rank, then not called", "FSDP1, no layer of a unit on one rank", "no layer of a unit",
    "FSDP1, no layer of the first unit on one rank, in half precision", "in half precision",
    "another order, copies", "another order, FSDP1, kept", "another unit, checkpoints", "another unit, kept",
    "another unit in the last micro-batch, FSDP1", "another unit in an evaluation, FSDP1",
)  # fmt: skip
"""Cases whose ways are those of others together."""


def most(cases: Iterable[str]) -> list[Any]:
    return slow_except(cases, *(name for name in cases if name not in FURTHER))


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[Trained]]:
    """By case, what each rank tells."""
    every: dict[str, Case] = ALIKE | {name: case for name, (case, _) in DIFFERENT.items()}
    cases = {name: every[name] for name in chosen(request, "name")}
    first, second = run_ranks(train_all, 2, [*cases.values()])
    return {name: [*pair] for name, pair in zip(cases, zip(first, second, strict=True), strict=True)}


@pytest.mark.parametrize("name", most(ALIKE))
def test_the_same_calls_are_no_fault(name: str, found: dict[str, list[Trained]]) -> None:
    alone = train(ALIKE[name], Ranks(0, 1, torch.device("cpu")))
    assert not alone.message
    assert len(alone.losses) == 2
    for of_rank in found[name]:
        assert not of_rank.message
        exact = ALIKE[name].precision == "fp64"
        assert of_rank.losses == pytest.approx(alone.losses, rel=1e-12 if exact else 1e-2)
        for key, weight in alone.after.items():
            assert torch.allclose(of_rank.after[key], weight, rtol=0, atol=1e-12 if exact else 1e-3), key
            assert torch.equal(of_rank.after[key], of_rank.before[key]) == torch.equal(weight, alone.before[key]), key


@pytest.mark.parametrize("name", most(DIFFERENT))
def test_different_calls_end_before_the_update(name: str, found: dict[str, list[Trained]]) -> None:
    for of_rank in found[name]:
        assert of_rank.message.startswith(DIFFERENT[name][1]), of_rank.message
        assert "remedy: " in of_rank.message
        assert not of_rank.losses
        assert all(torch.equal(weight, of_rank.after[key]) for key, weight in of_rank.before.items())


def test_one_rank_is_not_compared() -> None:
    for case in (Case(CHOSEN), Case(LAYERS, checkpoints=True)):
        alone = train(case, Ranks(0, 1, torch.device("cpu")))
        assert len(alone.losses) == 2
        assert not alone.message
