"""Optimizers whose states are in bf16 or int8: torch's arithmetic, losses near fp32, the same bits on any layout."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from shardtune.checkpoint.dcp import save_tensors
from shardtune.checkpoint.optimizer import load_optimizer_tensors, optimizer_tensors
from shardtune.config import OptimConfig
from shardtune.errors import CheckpointError, ConfigError
from shardtune.optim import low_bit
from shardtune.optim.build import build_optimizer
from tests.support.chosen import slow_except
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import whole

pytestmark = pytest.mark.lengthy

KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.1},
    "Adam": {"weight_decay": 0.1, "args": {"maximize": True}},
    "SGD": {"weight_decay": 0.1, "args": {"momentum": 0.9, "nesterov": True}},
    "SGD, dampened": {"args": {"momentum": 0.9, "dampening": 0.3}},
}
BARE: dict[str, dict[str, Any]] = {"SGD, without momentum": {"args": {}, "weight_decay": 0.0}}
SHAPES = {"layer.weight": (10, 600), "narrow.weight": (6, 3), "layer.bias": (7,), "experts": (3, 4, 300), "scale": ()}


def config(kind: str, state_dtype: str, **values: Any) -> OptimConfig:
    given = {"name": kind.partition(",")[0], "lr": 0.01, **KINDS.get(kind, {}), **values}
    return OptimConfig.model_validate({**given, "state_dtype": state_dtype})


def parameters(half: Collection[str] = ()) -> dict[str, nn.Parameter]:
    """Of all shapes; those named in `half` in bf16."""
    draw = torch.Generator().manual_seed(1)
    values = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    return {name: nn.Parameter(value.bfloat16() if name in half else value) for name, value in values.items()}


def gradient(name: str, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + len(name))
    return torch.randn(SHAPES[name], generator=draw)


def take_steps(optimizer: torch.optim.Optimizer, given: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        for name, parameter in given.items():
            grad = gradient(name, step)
            if isinstance(parameter, DTensor):
                grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
            parameter.grad = grad
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_in_full_moves_as_torch_moves_it(kind: str) -> None:
    """Vectors and narrow matrices beside int8 have no blocks."""
    given, reference = parameters(), parameters()
    small = ("layer.bias", "narrow.weight", "scale")
    take_steps(build_optimizer(given, config(kind, "int8")), given, range(6))
    take_steps(build_optimizer(reference, config(kind, "fp32")), reference, range(6))
    for name in small:
        torch.testing.assert_close(given[name], reference[name], rtol=1e-6, atol=1e-7)
    assert not torch.equal(given["layer.weight"], reference["layer.weight"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("state_dtype", "near"), [("bf16", 5e-3), ("int8", 3e-2)])
def test_a_first_steps_updates_are_close(kind: str, state_dtype: str, near: float) -> None:
    given, reference, before = parameters(), parameters(), parameters()
    take_steps(build_optimizer(given, config(kind, state_dtype)), given, range(3))
    take_steps(build_optimizer(reference, config(kind, "fp32")), reference, range(3))
    for name, parameter in given.items():
        wanted = reference[name] - before[name]
        assert (parameter - before[name] - wanted).norm() < near * wanted.norm(), name


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_states_take_the_memory_that_was_asked_for(state_dtype: str) -> None:
    given = parameters()
    optimizer = build_optimizer(given, config("AdamW", state_dtype))
    take_steps(optimizer, given, range(1))
    state = optimizer.state[given["layer.weight"]]
    size = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor) and value.ndim)
    assert size == 6000 * 2 * 2 if state_dtype == "bf16" else 6000 * 2 + 10 * 3 * 4 * 2


class Regression:
    """Least squares by batches, 24 outputs of 300 features; the first gradients are ten times too large."""

    def __init__(self, *, scales: bool = False) -> None:
        draw = torch.Generator().manual_seed(0)
        widths = torch.logspace(0, -4, 300) if scales else torch.ones(300)
        self.features = torch.randn(512, 300, generator=draw) * widths
        self.targets = self.features @ torch.randn(300, 24, generator=draw)
        self._spike = 1.0 if scales else 10.0

    def loss_after(self, steps: int, state_dtype: str, lr: float = 1e-2) -> float:
        weight = nn.Parameter(torch.zeros(24, 300))
        optimizer = build_optimizer({"weight": weight}, config("AdamW", state_dtype, lr=lr, weight_decay=0.0), seed=5)
        draw = torch.Generator().manual_seed(1)
        for step in range(steps):
            rows = torch.randint(512, (64,), generator=draw)
            factor = self._spike if step < 20 else 1.0
            weight.grad = None
            ((self.features[rows] @ weight.T - self.targets[rows]).square().mean() * factor).backward()
            optimizer.step()
        with torch.no_grad():
            return float((self.features @ weight.T - self.targets).square().mean())


@pytest.mark.slow
def test_after_hundreds_of_steps_the_loss_is_that_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to the nearest, bf16's second moment never falls again after large gradients."""
    problem = Regression()
    wanted = problem.loss_after(800, "fp32")
    assert problem.loss_after(800, "bf16") == pytest.approx(wanted, rel=0.03)
    assert problem.loss_after(800, "int8") == pytest.approx(wanted, rel=0.03)
    monkeypatch.setattr(low_bit, "noise", lambda numbers, _key: torch.full_like(numbers, 0x7FFF7FFF))
    assert problem.loss_after(800, "bf16") > 1.15 * wanted


def test_features_of_all_sizes_in_one_block() -> None:
    """Gradients over four decades, so second moments over eight: more than the codes have."""
    problem = Regression(scales=True)
    assert problem.loss_after(300, "int8") == pytest.approx(problem.loss_after(300, "fp32"), rel=0.05)


@pytest.mark.parametrize("kind", [*KINDS, "SGD, without momentum"])
def test_weights_in_bf16_move_as_far_as_in_fp32(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers near 1, whose neighbours are 2^-8 away, moved by some 2^-12 in each of 40 steps."""

    def moved(dtype: torch.dtype) -> torch.Tensor:
        values = torch.full((30, 100), 1.25)
        weight = nn.Parameter(values.to(dtype, copy=True))
        weight.grad_dtype = torch.float32
        optimizer = build_optimizer({"weight": weight}, config(kind, "fp32", lr=2.5e-4, **BARE.get(kind, {})), seed=3)
        for _ in range(40):
            weight.grad = torch.ones_like(values)
            optimizer.step()
        moments = [value for value in optimizer.state[weight].values() if torch.is_tensor(value)]
        assert {moment.dtype for moment in moments} <= {torch.float32}
        return weight.detach().float() - values

    exact = moved(torch.float32)
    found = moved(torch.bfloat16)
    assert float(found.mean()) == pytest.approx(float(exact.mean()), rel=0.05)
    assert found.unique().numel() > 1
    monkeypatch.setattr(low_bit, "noise", lambda numbers, _key: torch.full_like(numbers, 0x7FFF))
    if "SGD" not in kind or "without" in kind:  # momentum grows to larger steps
        assert not moved(torch.bfloat16).any()


def spread_out(mesh: DeviceMesh, columns: bool, half: Collection[str]) -> dict[str, nn.Parameter]:
    """As ranks hold them: rows are cut, or with `columns` those of the matrices; a scalar is whole on each."""

    def placed(name: str, value: torch.Tensor) -> torch.Tensor:
        dim = value.ndim - 1 if columns and name == "layer.weight" else 0
        placements: list[Placement] = [Shard(dim)] if value.ndim else [Replicate()]
        return distribute_tensor(value.detach(), mesh, placements) if value.ndim else value.detach()

    return {name: nn.Parameter(placed(name, value)) for name, value in parameters(half).items()}


def layout(columns: bool, state_dtype: str) -> dict[str, nn.Parameter]:
    """This process's part of the parameters; beside moments in bf16 some of them are in bf16 too."""
    half = ("layer.weight", "experts") if state_dtype == "bf16" else ()
    if not dist.is_initialized():
        given = parameters(half)
    else:
        given = spread_out(init_device_mesh("cpu", (dist.get_world_size(),)), columns, half)
    for parameter in given.values():
        parameter.grad_dtype = torch.float32
    return given


def on_layout(kind: str, state_dtype: str, folder: str, columns: bool = False) -> tuple[dict[str, Any], ...]:
    """Three steps, a checkpoint, two more; and two from the checkpoint."""
    given = layout(columns, state_dtype)
    optimizer = build_optimizer(given, config(kind, state_dtype), seed=7)
    take_steps(optimizer, given, range(3))
    held = {name: whole(value) for name, value in given.items()}
    names = {parameter: name for name, parameter in given.items()}
    tensors, description = optimizer_tensors(optimizer, names)
    save_tensors(folder, tensors)
    found = {name: whole(value) for name, value in tensors.items()}
    take_steps(optimizer, given, range(3, 5))
    again = continued(kind, state_dtype, folder, description, held, columns)
    return (
        found,
        {name: whole(value) for name, value in given.items()},
        again,
        {"text": json.dumps(description), **held},
    )


def continued(
    kind: str, state_dtype: str, folder: str, description: Any, held: dict[str, torch.Tensor], columns: bool = False
) -> dict[str, torch.Tensor]:
    given = layout(columns, state_dtype)
    with torch.no_grad():
        for name, parameter in given.items():
            value = held[name]
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
    optimizer = build_optimizer(given, config(kind, state_dtype), seed=7)
    names = {parameter: name for name, parameter in given.items()}
    kept = {key for group in optimizer.param_groups for key in group}
    load_optimizer_tensors(folder, optimizer, names, json.loads(json.dumps(description)), keep=kept)
    take_steps(optimizer, given, range(3, 5))
    return {name: whole(value) for name, value in given.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("state_dtype", slow_except(["bf16", "int8"], "int8"))
def test_any_number_of_ranks_gives_the_same_bits_and_continues(tmp_path: Path, state_dtype: str) -> None:
    """Ten rows on 1, 2 and 4 ranks, three experts on 4; each continues what the others have saved."""
    told = {ranks: one_of(ranks, "AdamW", state_dtype, str(tmp_path / str(ranks))) for ranks in (1, 2, 4)}
    state, after, _, held = told[1]
    assert any(not torch.equal(after[name], held[name]) for name in after)
    for other in told.values():
        same(other[0], state)
        same(other[1], after)
        same(other[2], after)
    weights = {name: value for name, value in held.items() if name != "text"}
    for ranks in (1, 2, 4):
        saved = str(tmp_path / str({1: 4, 2: 1, 4: 2}[ranks]))
        args = ("AdamW", state_dtype, saved, json.loads(held["text"]), weights)
        same(continued(*args) if ranks == 1 else run_ranks(continued, ranks, *args)[0], after)


def one_of(ranks: int, *args: Any) -> tuple[dict[str, Any], ...]:
    return on_layout(*args) if ranks == 1 else run_ranks(on_layout, ranks, *args)[0]


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_columns_on_several_ranks(tmp_path: Path, kind: str) -> None:
    """Halves of rows of 600 have blocks of their own: 256 and 44. Other layouts round once more, to the nearest."""
    alone = one_of(1, kind, "int8", str(tmp_path / "alone"))
    cut = one_of(2, kind, "int8", str(tmp_path / "cut"), True)
    same(cut[2], cut[1])  # from its own checkpoint: bit by bit
    first = "momentum_buffer" if kind == "SGD" else "exp_avg"
    assert alone[0][f"layer.weight::{first}_scale"].shape == (10, 3)
    assert cut[0][f"layer.weight::{first}_scale"].shape == (10, 4)
    wanted, before = alone[1]["layer.weight"], alone[3]["layer.weight"]
    for place, told, target in (("cut", cut, 1), ("alone", alone, 2)):
        held = {name: value for name, value in told[3].items() if name != "text"}
        args = (kind, "int8", str(tmp_path / place), json.loads(told[3]["text"]), held, True)
        moved = continued(*args) if target == 1 else run_ranks(continued, 2, *args)[0]
        own = moved["layer.weight"] - held["layer.weight"] - (told[1]["layer.weight"] - held["layer.weight"])
        assert 0 < own.norm() < 0.05 * (wanted - before).norm()
        same({"experts": moved["experts"]}, {"experts": told[1]["experts"]})


def test_states_of_another_kind_are_refused(tmp_path: Path) -> None:
    *_, held = on_layout("AdamW", "int8", str(tmp_path))
    description = json.loads(held.pop("text"))
    for other in ("fp32", "bf16"):
        with pytest.raises(CheckpointError, match=f"kept in int8, the recipe's in {other}"):
            continued("AdamW", other, str(tmp_path), description, held)


def test_another_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="RMSprop keeps its states and weights in fp32 only"):
        build_optimizer(parameters(), OptimConfig.model_validate({"name": "RMSprop", "state_dtype": "bf16"}))


def test_draws_differ_from_seed_to_seed_and_repeat() -> None:
    found = []
    for seed in (1, 1, 2):
        given = parameters()
        take_steps(build_optimizer(given, config("AdamW", "bf16"), seed=seed), given, range(4))
        found.append(given["layer.weight"].detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
