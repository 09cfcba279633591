"""A rank's copy of a module: its functions, weak references and attributes of parameters, and hooks on gradients."""

from __future__ import annotations

import functools
import weakref
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from shardtune import NeedParallel, TrainEngine, nn
from shardtune.engine.module_copy import copy_of_module
from shardtune.errors import ModelError, ParallelError

RATE, ROWS = 0.1, torch.arange(12, dtype=torch.float64).sin().view(4, 3)


class Net(Module):
    """Hooks and functions that are closures over the module, and a parameter that is marked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Linear(3, 4), Linear(4, 1)
        self.scale = Parameter(torch.full((4,), 0.5))
        self.seen: list[Tensor] = []
        first, second = cast(Any, self.first), cast(Any, self.second)
        first.register_forward_hook(lambda _module, _rows, out: out * self.scale)
        first.register_forward_hook(lambda _module, _rows, out: self.seen.append(out))
        before = second.forward
        second.forward = lambda rows: before(rows) * 2
        self.both = functools.partial(lambda rows, power: self.second(self.first(rows)) ** power, power=2)
        mark: Any = self.scale
        mark.rate = RATE / 2

    def forward(self, rows: Tensor) -> Tensor:
        return self.both(rows)

    def step(self: Any, rows: Tensor) -> float:
        self.seen.clear()
        loss = self(rows).square().mean() + self.seen[0].square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD([{"params": [p], "lr": vars(p).get("rate", RATE)} for p in self.parameters()])


class Closed(Net, nn.Fsdp2TrainModule):
    pass


def _double(net: Module) -> Any:
    """The net in fp64, with the same objects."""
    for parameter in net.parameters():
        parameter.data = parameter.data.double()
    return net


@pytest.mark.parametrize("executor", ["fsdp2", "fsdp1"])
def test_functions_and_marks_of_a_module_are_those_of_its_copy(two_ranks: TrainEngine, executor: Any):
    plain = _double(Net())
    plain.on_weights_materialized()
    losses = [plain.step(ROWS) for _ in range(3)]
    for ranks in (None, two_ranks):
        module = _double(Closed())
        with TrainEngine(module, executor).build(colocate_with=ranks, take_turns=False) as engine:
            found = [engine.step(NeedParallel(ROWS)) for _ in losses]
        assert [sum(parts) / len(parts) for parts in found] == pytest.approx(losses, rel=1e-12)
        assert not module.seen


def test_a_copy_shares_what_its_functions_have_beside_the_module():
    seen: list[int] = []
    net = Net()
    net.first.register_forward_pre_hook(lambda _module, _rows: seen.append(len(net.seen)))
    copied = copy_of_module(net, "Net")
    copied(torch.ones(2, 3))
    copied(torch.ones(2, 3))
    assert seen == [0, 1]
    assert not net.seen


def test_a_weak_reference_to_a_part_is_refused_on_one_rank_too():
    module: Any = Closed()
    module.watched = weakref.ref(module.first)
    with pytest.raises(ParallelError, match="for its attribute watched: cannot pickle"):
        TrainEngine(module).build()
    module.watched = weakref.ref(ROWS)
    assert copy_of_module(module, "Closed")


class Hooked(Closed):
    kind = "register_hook"

    def on_weights_materialized(self) -> None:
        super().on_weights_materialized()
        for parameter in self.first.parameters():
            if self.kind == "register_hook":
                parameter.register_hook(lambda gradient: gradient * 3)
            else:
                parameter.register_post_accumulate_grad_hook(_triple)


class HookedAfter(Hooked):
    kind = "register_post_accumulate_grad_hook"


def _triple(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3)


def test_hooks_on_gradients_are_called_or_refused(two_ranks: TrainEngine):
    plain = _double(HookedAfter())
    plain.on_weights_materialized()
    losses = [plain.step(ROWS) for _ in range(2)]
    for kind, ranks in ((Hooked, None), (HookedAfter, None), (HookedAfter, two_ranks)):
        with TrainEngine(_double(kind())).build(colocate_with=ranks, take_turns=False) as engine:
            found = [engine.step(NeedParallel(ROWS)) for _ in losses]
        assert [sum(parts) / len(parts) for parts in found] == pytest.approx(losses, rel=1e-12)
    refused: list[tuple[Any, Any]] = [(Hooked, "fsdp2"), (Hooked, "fsdp1"), (HookedAfter, "fsdp1")]
    for kind, executor in refused:
        with pytest.raises(
            ModelError, match=r"a hook on the gradient of first\.weight .* is not called: the parameter"
        ):
            TrainEngine(kind(), executor).build(colocate_with=two_ranks, take_turns=False)
    module = Closed()
    module.scale.register_hook(lambda gradient: gradient * 3)
    with pytest.raises(ModelError, match=r"a hook on the gradient of scale .* ranks work on copies"):
        TrainEngine(module)
