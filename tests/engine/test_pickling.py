"""What travels between the caller and its ranks."""

from __future__ import annotations

import functools
import threading
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn import Linear, Module, utils
from torch.nn.utils import parametrizations, parametrize
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardtune import NeedParallel, TrainEngine, nn
from shardtune.engine.pickling import check_sendable, detached, pack, unpack
from shardtune.errors import ParallelError

RATE, ROWS = 0.1, torch.arange(12, dtype=torch.float64).sin().view(4, 3)


def test_modules_that_are_objects_of_another_class_travel_by_name():
    """As `torch.backends` is, of which a method of a script sets a flag: the script's functions travel by value."""
    modules = (torch.backends, torch.backends.cudnn, torch.backends.mkldnn)
    check_sendable(modules, "Net.method", "the module")
    assert all(found is module for found, module in zip(unpack(pack(modules)), modules, strict=True))


def test_a_parametrized_module_travels_with_its_weights():
    given = torch.nn.Sequential(
        parametrizations.weight_norm(Linear(3, 4)), parametrizations.spectral_norm(Linear(4, 2))
    )
    found = unpack(pack(given))
    assert all(torch.equal(found.state_dict()[name], value) for name, value in given.state_dict().items())
    assert torch.equal(found.eval()(ROWS.float()), given.eval()(ROWS.float()))
    parametrize.remove_parametrizations(found[0], "weight")
    assert type(found[0]) is Linear
    assert parametrize.is_parametrized(given[0])


class Net(Module):
    """A layer with torch's present norm of weights, and one with its former one, which computes an attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = parametrizations.weight_norm(Linear(3, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.second = utils.weight_norm(Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Normed(nn.Fsdp2TrainModule, Net):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=RATE)

    def step(self, rows: torch.Tensor) -> float:
        loss = self(rows).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def test_layers_with_normed_weights_are_trained_as_by_plain_torch(two_ranks: TrainEngine):
    plain, losses = Net().double(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    for _ in range(2):
        loss = plain(ROWS).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for ranks in (None, two_ranks):
        with TrainEngine(Normed().double()).build(colocate_with=ranks, take_turns=False) as engine:
            found = [engine.step(NeedParallel(ROWS)) for _ in losses]
        assert [sum(parts) / len(parts) for parts in found] == pytest.approx(losses, rel=1e-12)


class Once:
    @functools.cached_property
    def four(self) -> int:
        return 4

    @functools.lru_cache(maxsize=3)  # noqa: B019
    def plus(self, number: int) -> int:
        return self.four + number


def test_cached_properties_and_functions_of_a_script_travel(monkeypatch: pytest.MonkeyPatch):
    for owner in (Once, Once.plus):
        monkeypatch.setattr(owner, "__module__", "__main__")
    kind = unpack(pack((Once.plus, vars(Once)["four"])))
    assert kind[0].cache_parameters() == {"maxsize": 3, "typed": False}
    assert kind[0](Once(), 2) == 6
    assert kind[1].__get__(Once()) == 4


def test_an_optimizer_of_a_script_that_was_used_before_has_the_hooks_of_its_ranks(two_ranks: TrainEngine):
    """torch wraps the `step` of a class once, and by value the wrapper would come with copies of this side's hooks."""

    class Descent(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(RATE * parameter.grad)

    class Stepping(nn.Fsdp2TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Linear(3, 1)

        def on_weights_materialized(self) -> None:
            self.optimizer = Descent(self.parameters(), lr=RATE)

        def step(self, rows: torch.Tensor) -> int:
            seen: list[object] = []
            self.layer(rows).sum().backward()
            handle = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
            self.optimizer.step()
            handle.remove()
            return len(seen)

    Descent([torch.nn.Parameter(torch.ones(2))], lr=RATE)
    with TrainEngine(Stepping()).build(colocate_with=two_ranks, take_turns=False) as engine:
        assert engine.step(ROWS.float()) == [1, 1]


def test_the_attribute_that_cannot_be_sent_is_named():
    module = torch.nn.Sequential(Linear(2, 2))
    vars(module[0])["lock"] = threading.Lock()
    with pytest.raises(
        ParallelError, match=r"the module cannot be sent between processes, for its attribute 0\.lock: "
    ):
        check_sendable(module, "Net", "the module")


@dataclass(slots=True)
class Kept:
    parts: list[torch.Tensor]
    graph: torch.Tensor
    unset: int = field(init=False)


@dataclass(frozen=True)
class Rollout:
    kept: Kept
    shape: torch.Tensor


class Holding(nn.Fsdp2TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear(3, 2)

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=RATE)

    def roll(self, rows: torch.Tensor) -> list[Rollout]:
        kept = Kept([self.layer.weight], self.layer(rows))
        return [Rollout(kept, torch.empty(5, device="meta"))]


@pytest.mark.parametrize("executor", ["fsdp2", "fsdp1"])
def test_weights_in_dataclasses_arrive_whole_and_without_a_graph(two_ranks: TrainEngine, executor: Any):
    module = Holding()
    for ranks in (None, two_ranks):
        with TrainEngine(module, executor).build(colocate_with=ranks, take_turns=False) as engine:
            (first, *_) = engine.roll(ROWS.float())
        assert torch.equal(first[0].kept.parts[0], module.layer.weight.detach())
        assert not first[0].kept.graph.requires_grad
        assert first[0].shape.is_meta


@dataclass
class Node:
    weight: torch.Tensor
    next: Any = None


def test_a_dataclass_that_leads_back_to_itself_is_copied_once() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    node = Node(weight)
    node.next = Node(weight * 2, node)
    made = detached({"first": node, "again": node}, lambda tensor: tensor, copy=True)
    first = made["first"]
    assert first is made["again"] is first.next.next is not node
    assert not first.weight.requires_grad
    assert first.next.weight.tolist() == [2.0, 2.0]
    assert node.weight is weight
