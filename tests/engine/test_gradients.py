"""Gradients of tensors that are no parameters, and what optimizers keep of those that are."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardtune import NeedParallel, TrainEngine, nn
from shardtune.errors import ModelError

EXECUTORS = ["fsdp2", "fsdp1", "ddp"]


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def clear(self) -> None:
        self.lines = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


LISTENER = Listener()


class Net(nn.Fsdp2TrainModule):
    """Gives the gradients of what it is called with, and what its optimizer keeps."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(5, 3).double(), torch.nn.Linear(3, 2).double()
        self.kind = kind

    @property
    def non_split_modules(self) -> set[type]:
        return {torch.nn.Linear}

    def on_weights_materialized(self) -> None:
        self.optimizer: Any = self.kind(self.parameters(), lr=0.01)  # pyright: ignore[reportCallIssue]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))

    def gradient(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            (self(x).square().mean() / 2).backward()
        assert x.grad is not None
        return x.grad

    def of_all(self, x: torch.Tensor, delta: torch.Tensor, sums: bool = False) -> torch.Tensor:
        delta = delta.requires_grad_()
        self(x + delta).square().mean().backward()
        assert delta.grad is not None
        if sums and self.ranks.world_size > 1:
            torch.distributed.all_reduce(delta.grad)
        return delta.grad

    def step(self, x: torch.Tensor) -> None:
        self(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step_in_two_passes(self, x: torch.Tensor) -> None:
        hidden = torch.tanh(self.first(x))
        leaf = hidden.detach().requires_grad_()
        self.last(leaf).square().mean().backward()
        hidden.backward(leaf.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def after_gradient_of_input(self, x: torch.Tensor) -> list[bool]:
        x = x.clone().requires_grad_()
        torch.autograd.grad(self(x).square().mean(), x)
        return [parameter.grad is None for parameter in self.parameters()]

    def step_by_joined(self, x: torch.Tensor) -> None:
        self(x).square().mean().backward()
        parameters = list(self.parameters())
        joined = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        for parameter, grad in zip(parameters, joined.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = grad.view_as(parameter).clone()
        self.optimizer.step()

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        return {
            name: {key: each for key, each in self.optimizer.state[p].items() if isinstance(each, torch.Tensor)}
            for name, p in self.named_parameters()
        }

    def listen(self) -> None:
        """Keep what the engine's log says on this rank."""
        LISTENER.clear()
        logging.getLogger("shardtune").addHandler(LISTENER)

    def said(self) -> list[str]:
        return LISTENER.lines

    def norm_of_moment(self) -> float:
        return self.optimizer.state[self.first.weight]["exp_avg"].norm().item()


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_leaves_have_the_gradients_of_one_process(two_ranks: TrainEngine, executor: Any, rows) -> None:
    plain: Any = Net()
    delta = torch.zeros(5, dtype=torch.float64)
    wanted, of_all = plain.gradient(rows), plain.of_all(rows, delta.clone())
    with TrainEngine(Net(), executor).build(colocate_with=two_ranks, take_turns=False) as engine:
        engine.listen()
        for found in engine.gradient(rows):  # nothing is divided: that of each rank's loss
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-15)
        parts = engine.gradient(NeedParallel(rows))
        torch.testing.assert_close(torch.cat(parts), wanted, rtol=0, atol=1e-15)
        summed = engine.of_all(NeedParallel(rows), delta, sums=True)
        torch.testing.assert_close(summed[1], of_all, rtol=0, atol=1e-15)
        assert engine.said() == [[], []]
        torch.testing.assert_close(sum(engine.of_all(NeedParallel(rows), delta)), of_all, rtol=0, atol=1e-15)
        engine.of_all(NeedParallel(rows), delta)
        said, other = engine.said()
    assert not other
    (line,) = said
    assert "Net.of_all: .grad of the argument [5], which is not divided among ranks, is of this rank's samples" in line


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_backward_pass_goes_on_from_the_gradient_of_a_leaf(two_ranks: TrainEngine, executor: Any) -> None:
    """That has been counted by the rank's share already: here 1 of 3 rows, and 2 of 3."""
    rows = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    plain = Net(torch.optim.SGD)
    plain.on_weights_materialized()
    with TrainEngine(Net(torch.optim.SGD), executor).build(colocate_with=two_ranks, take_turns=False) as engine:
        for _ in range(2):
            plain.step_in_two_passes(rows)
            engine.step_in_two_passes(NeedParallel(rows))
        found = dict(engine.named_tensors())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=1e-15)


def test_a_gradient_that_is_whole_beside_a_part_of_a_weight_is_refused(two_ranks: TrainEngine, rows) -> None:
    for executor in EXECUTORS[::2]:
        with TrainEngine(Net(), executor).build(colocate_with=two_ranks, take_turns=False) as engine:
            if executor == "ddp":
                engine.step_by_joined(NeedParallel(rows))
                continue
            with pytest.raises(ModelError, match=r"first\.weight\.grad is a whole tensor that the method has set"):
                engine.step_by_joined(NeedParallel(rows))


class Kept(Net):
    """One unit, of which a hook keeps a tensor from inside."""

    @property
    def non_split_modules(self) -> set[type]:
        return {torch.nn.Sequential}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh(), torch.nn.Linear(5, 5)).double()
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))

    def of_kept(self, x: torch.Tensor, returned: bool) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        handle = self.blocks[1].get_submodule("0").register_forward_hook(lambda *call: kept.append(call[2]))
        out = self(x)
        handle.remove()
        (kept[0].square().mean() + (0 * out.sum() if returned else 0)).backward()
        grad = self.blocks[0].get_submodule("0").weight.grad
        assert isinstance(grad, torch.Tensor)
        return grad


@pytest.mark.parametrize("executor", ["fsdp2", "ddp"])
def test_a_loss_of_what_was_kept_inside_of_a_unit(two_ranks: TrainEngine, executor: Any, rows) -> None:
    wanted = Kept().of_kept(rows, False)
    with TrainEngine(Kept(), executor).build(colocate_with=two_ranks, take_turns=False) as engine:
        with pytest.raises(ModelError, match=r"let the loss also use what that forward returns: loss \+ 0 \* output"):
            engine.of_kept(NeedParallel(rows), returned=False)
        for found in engine.of_kept(NeedParallel(rows), returned=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-15)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_gradient_of_an_input_leaves_parameters_without_one(two_ranks, executor: Any, rows) -> None:
    """Not with zeros, by which an optimizer would decay weights and go on by their momentum."""
    with TrainEngine(Net(), executor).build(colocate_with=two_ranks, take_turns=False) as engine:
        assert engine.after_gradient_of_input(NeedParallel(rows)) == [[True] * 4] * 2


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_an_optimizer_keeps_is_returned_whole(two_ranks, executor: Any, rows, tmp_path: Path) -> None:
    for kind in (torch.optim.Adam, torch.optim.Adagrad):
        module = Net(kind)
        plain = copy.deepcopy(module)
        plain.on_weights_materialized()
        for _ in range(2):
            plain.step(rows)
        with TrainEngine(module, executor).build(colocate_with=two_ranks, take_turns=False) as engine:
            engine.step(NeedParallel(rows))
            engine.save(tmp_path / kind.__name__)
            engine.load(tmp_path / kind.__name__)
            engine.step(NeedParallel(rows))
            found = engine.states()
            for mine in found:
                torch.testing.assert_close(mine, plain.states(), rtol=0, atol=1e-15)
            if executor == "fsdp1" and kind is torch.optim.Adam:
                with pytest.raises(ModelError, match=r"norm of .* of an optimizer's state, .* is that of this rank's"):
                    engine.norm_of_moment()


class Scaled(nn.Fsdp2TrainModule):
    """Has parameters that ranks hold whole: one number, and a norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(5, 3), torch.nn.Linear(3, 2)
        self.scale = torch.nn.Parameter(torch.tensor(0.7))
        self.norm = torch.nn.BatchNorm1d(3).eval()

    @property
    def non_split_modules(self) -> set[type]:
        return {torch.nn.Linear}

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x) * self.scale))

    def step(self, rows: torch.Tensor) -> float:
        with torch.no_grad():
            self(rows)
        for row in rows:
            (self(row[None]).float().square().sum() / len(rows)).backward()
        norm = self.clip_grad_norm_(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


@pytest.mark.parametrize(
    ("executor", "precision"), [("fsdp2", "bf16"), ("fsdp1", "bf16"), ("fsdp1", "fp16"), ("ddp", "fp16")]
)
def test_parameters_of_one_number_and_forwards_alone_in_half_precision(
    two_ranks, executor: Any, precision: str
) -> None:
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    plain = TrainEngine(Scaled(), precision="fp32").build()
    made = TrainEngine(Scaled(), executor, precision=precision)
    with made.build(colocate_with=two_ranks, take_turns=False) as engine:
        for _ in range(2):
            norms, (wanted,) = engine.step(NeedParallel(rows)), plain.step(rows)
            assert norms == [pytest.approx(wanted, rel=0.02)] * 2
        found, wanted = dict(engine.named_tensors()), dict(plain.named_tensors())
    for name in ("scale", "first.weight"):
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=2e-3)
    assert abs(float(wanted["scale"]) - 0.7) > 5e-3


class Rare(torch.nn.Module):
    """A unit with a layer that only some rows use."""

    def __init__(self) -> None:
        super().__init__()
        self.every, self.some = torch.nn.Linear(5, 5).double(), torch.nn.Linear(5, 5).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, :1] > 0
        return torch.tanh(self.every(x)) + (chosen * self.some(x) if chosen.any() else 0.0)


class Choosing(nn.Fsdp2TrainModule):
    """Goes backward row by row, and forward once more before the update."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = torch.nn.ModuleList([Rare(), Rare()])

    @property
    def non_split_modules(self) -> set[type]:
        return {Rare}

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = torch.cat([x[:, :1], unit(x)[:, 1:]], 1)
        return x

    def step(self, rows: torch.Tensor) -> int:
        for row in rows:
            (self(row[None]).square().sum() / len(rows)).backward()
        with torch.no_grad():
            self(rows)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return len(self.optimizer.state)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_layer_that_an_early_pass_of_one_rank_uses_has_states_on_all(
    two_ranks, executor: Any, tmp_path: Path
) -> None:
    x = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[..., 0] = -1.0
    x[:, 2, 0] = 1.0  # the first row of the second rank
    plain = TrainEngine(Choosing()).build()
    with TrainEngine(Choosing(), executor).build(colocate_with=two_ranks, take_turns=False) as engine:
        for rows in x:
            assert engine.step(NeedParallel(rows)) == 2 * plain.step(rows)
            engine.save(tmp_path / "state")
            engine.load(tmp_path / "state")
        found, wanted = dict(engine.named_tensors()), dict(plain.named_tensors())
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)


class SkipsUpdates(Scaled):
    """Scales its loss of fp16 by torch's `GradScaler`, and has a gradient that only one rank finds infinite."""

    def on_weights_materialized(self) -> None:
        super().on_weights_materialized()
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=1024.0, growth_interval=2)

    def scaled_step(self, rows: torch.Tensor, overflows: bool, weights: torch.Tensor) -> tuple[float, float]:
        loss = (self(rows).float().square().sum(1) * weights).sum()
        self.scaler.scale(loss).backward()
        if overflows and self.ranks.rank == self.ranks.world_size - 1:
            gradient: Any = self.last.weight.grad
            part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            part.view(-1)[-1] = float("inf")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return self.scaler.get_scale(), self.scale.detach().float().item()


@pytest.mark.parametrize("executor", ["fsdp2", "fsdp1"])
def test_a_gradient_scaler_skips_the_same_updates_on_all_ranks(two_ranks, executor: Any) -> None:
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    made = TrainEngine(SkipsUpdates(), executor, precision="fp16")
    with made.build(colocate_with=two_ranks, take_turns=False) as engine:
        found = [engine.scaled_step(NeedParallel(rows), overflows) for overflows in (False, True, False, False)]
    assert all(first == second for first, second in found)
    scales, values = zip(*(first for first, _ in found), strict=True)
    assert scales == (1024, 512, 512, 1024)
    assert 0.7 != values[0] == values[1] != values[2]
