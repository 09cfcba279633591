"""Optimizer state through named tensors: as if the optimizer had never been away, for every kind torch has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from shardtune.checkpoint.dcp import load_tensors, save_tensors
from shardtune.checkpoint.optimizer import load_optimizer_tensors, optimizer_tensors
from shardtune.errors import CheckpointError
from tests.support.dist.ranks import run_ranks

KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {"betas": (0.8, 0.9), "amsgrad": True},
    "SGD": {"momentum": 0.9},
    "Adafactor": {},
    "Adagrad": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "NAdam": {},
    "ASGD": {},
    "Rprop": {},
    "LBFGS": {"max_iter": 3, "history_size": 2},
}
# Torch's own Adafactor cannot step sharded parameters; `Factored` has state of other shapes in its place.
SHARDED = ("AdamW", "SGD", "Factored")


class Factored(torch.optim.Optimizer):
    """State smaller than its parameter: a running value a row (sharded as the rows are) and a column (replicated)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        closure()
        for parameter in self.param_groups[0]["params"]:
            square = parameter.grad.square()
            state = self.state[parameter]
            new = {"row": square.mean(-1, keepdim=True), "column": square.mean(0, keepdim=True)}
            for key, value in new.items():
                if isinstance(value, DTensor) and (key == "column" or square.ndim == 1):
                    value = value.redistribute(placements=[Replicate()])
                state[key] = state[key] * 0.9 + value if key in state else value
            parameter.sub_(self.param_groups[0]["lr"] * parameter.grad * state["row"] * state["column"])


def build(kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)).double()
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if kind == "Factored":
        return model, Factored(model.parameters(), lr=0.05)
    return model, getattr(torch.optim, kind)(model.parameters(), lr=0.05, **KINDS[kind])


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(data).square().sum()
        value.backward()
        return value

    optimizer.step(loss)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [whole(parameter) for parameter in model.parameters()]


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors, description = optimizer_tensors(optimizer, names_of(model))
    save_tensors(folder, tensors)
    return json.dumps(description)


def taken_up(kind: str, folder: Path, description: str, values: list[torch.Tensor]) -> nn.Module:
    """A new model and optimizer with the saved state, two steps on."""
    model, optimizer = build(kind, seed=1)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
    load_optimizer_tensors(folder, optimizer, names_of(model), json.loads(description))
    for number in (3, 4):
        step(model, optimizer, number)
    return model


@pytest.mark.parametrize("kind", [*KINDS, "Factored"])
def test_a_restored_optimizer_goes_on_bitwise(tmp_path: Path, kind: str) -> None:
    model, optimizer = build(kind)
    for number in range(3):
        step(model, optimizer, number)
    description, values = save(tmp_path, model, optimizer), weights(model)
    for number in (3, 4):
        step(model, optimizer, number)
    restored = taken_up(kind, tmp_path, description, values)
    for expected, found in zip(weights(model), weights(restored), strict=True):
        assert torch.equal(expected, found)


def test_before_the_first_step(tmp_path: Path) -> None:
    model, optimizer = build("AdamW")
    description, values = save(tmp_path, model, optimizer), weights(model)
    assert json.loads(description)["state"] == {}
    for number in (3, 4):
        step(model, optimizer, number)
    restored = taken_up("AdamW", tmp_path, description, values)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(restored), strict=True))


def on_ranks(folder: str, saved_alone: dict[str, tuple[str, list[torch.Tensor]]]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for kind in SHARDED:
        model, optimizer = build(kind)
        for number in range(3):
            step(model, optimizer, number)
        description = save(Path(folder) / f"{kind}-ranks", model, optimizer)
        values = weights(model)
        for number in (3, 4):
            step(model, optimizer, number)
        after = weights(model)
        again = weights(taken_up(kind, Path(folder) / f"{kind}-ranks", description, values))
        same = all(torch.equal(a, b) for a, b in zip(after, again, strict=True))
        from_one = weights(taken_up(kind, Path(folder) / f"{kind}-alone", *saved_alone[kind]))
        told[kind] = same, from_one, description, values, after
    return told


def test_sharded_state_moves_between_ranks_and_one_process(tmp_path: Path) -> None:
    """Two ranks, where a bias of 5 and a matrix of 3 rows do not divide."""
    alone = {}
    expected = {}
    for kind in SHARDED:
        model, optimizer = build(kind)
        for number in range(3):
            step(model, optimizer, number)
        alone[kind] = save(tmp_path / f"{kind}-alone", model, optimizer), weights(model)
        for number in (3, 4):
            step(model, optimizer, number)
        expected[kind] = weights(model)
    told, _ = run_ranks(on_ranks, 2, str(tmp_path), alone)
    for kind in SHARDED:
        same, from_one, description, values, after = told[kind]
        assert same, f"{kind}: not bitwise on the same ranks"
        torch.testing.assert_close(from_one, expected[kind], rtol=0, atol=1e-12)
        one = weights(taken_up(kind, tmp_path / f"{kind}-ranks", description, values))
        torch.testing.assert_close(one, after, rtol=0, atol=1e-12)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and optimizer state, whole, by name."""
    moments = {
        f"{name}::{key}": whole(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    return {**{name: whole(parameter) for name, parameter in model.named_parameters()}, **moments}


def save_both(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    save_tensors(folder / "model", dict(model.named_parameters()))
    return save(folder / "optimizer", model, optimizer)


def load_both(folder: Path, description: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and optimizer of other values with what was saved."""
    model, optimizer = build("AdamW", seed=1)
    load_tensors(folder / "model", {name: parameter.detach() for name, parameter in model.named_parameters()})
    load_optimizer_tensors(folder / "optimizer", optimizer, names_of(model), json.loads(description))
    return model, optimizer


def pass_on(source: str, target: str, description: str) -> str:
    return save_both(Path(target), *load_both(Path(source), description))


def test_weights_and_state_are_the_same_bits_after_two_ranks_had_them(tmp_path: Path) -> None:
    """One process, two ranks, one process."""
    model, optimizer = build("AdamW")
    for number in range(3):
        step(model, optimizer, number)
    description = save_both(tmp_path / "one", model, optimizer)
    described, _ = run_ranks(pass_on, 2, str(tmp_path / "one"), str(tmp_path / "two"), description)
    assert len(list((tmp_path / "two/model").glob("*.safetensors"))) == 2
    expected, found = state_of(model, optimizer), state_of(*load_both(tmp_path / "two", described))
    assert expected.keys() == found.keys()
    assert len(expected) == 3 * 5
    different = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    assert different == []


def test_options_are_restored_except_those_kept(tmp_path: Path) -> None:
    model, optimizer = build("AdamW")
    optimizer.param_groups[0].update(lr=0.7, eps=1e-3, betas=(0.1, 0.2))
    description = json.loads(save(tmp_path, model, optimizer))
    other, fresh = build("AdamW")
    load_optimizer_tensors(tmp_path, fresh, names_of(other), description, keep=("lr",))
    group = fresh.param_groups[0]
    assert (group["lr"], group["eps"], group["betas"]) == (0.05, 1e-3, (0.1, 0.2))


def test_other_parameters_are_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = build("SGD")
    step(model, optimizer, 0)
    description = json.loads(save(tmp_path, model, optimizer))
    model[0].bias.requires_grad_(False)
    frozen = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(CheckpointError, match=r"1 no longer trained: 0\.bias"):
        load_optimizer_tensors(tmp_path, frozen, names_of(model), description)
    assert not frozen.state


@pytest.mark.parametrize(
    ("kind", "before", "now", "state"),
    [
        ("AdamW", {}, {"amsgrad": True}, "max_exp_avg_sq"),
        ("RMSprop", {}, {"centered": True}, "grad_avg"),
        ("RMSprop", {}, {"momentum": 0.5}, "momentum_buffer"),
        ("SGD", {}, {"momentum": 0.5}, None),
        ("AdamW", {"amsgrad": True}, {}, None),
    ],
)
def test_options_without_their_state_are_refused(
    tmp_path: Path, kind: str, before: dict[str, Any], now: dict[str, Any], state: str | None
) -> None:
    """What torch makes later by itself (momentum of SGD), or no longer needs, is none of them."""
    model, _ = build(kind)
    made = getattr(torch.optim, kind)
    optimizer = made(model.parameters(), lr=0.05, **before)
    step(model, optimizer, 0)
    description = json.loads(save(tmp_path, model, optimizer))
    other = made(model.parameters(), lr=0.05, **now)
    keep = other.param_groups[0].keys()
    if state is None:
        load_optimizer_tensors(tmp_path, other, names_of(model), description, keep=keep)
        step(model, other, 1)
        return
    with pytest.raises(CheckpointError, match=rf"{next(iter(now))} = .* needs a state '{state}'.* for 0\.weight"):
        load_optimizer_tensors(tmp_path, other, names_of(model), description, keep=keep)
    assert not other.state


def test_state_that_json_cannot_hold_is_refused() -> None:
    model, optimizer = build("SGD")
    optimizer.state[model[0].weight]["thing"] = object()
    with pytest.raises(CheckpointError, match=r"'0\.weight::thing' is a object"):
        optimizer_tensors(optimizer, names_of(model))
