"""Optimizers by name, their groups and arguments, and the learning rate of each step."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardtune.config import OptimConfig
from shardtune.config.rank_layout import Layout
from shardtune.errors import ConfigError
from shardtune.optim.build import (
    build_optimizer,
    check_optimizer,
    rate_factor,
    set_learning_rate,
)
from shardtune.optim.muon import MuonWithAdamW
from shardtune.optim.named_class import REFUSED
from shardtune.run.plan.ledger import AsOnCuda

ALL = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
)


def config(**values: Any) -> OptimConfig:
    return OptimConfig.model_validate({"lr": 0.1, **values})


def parameters() -> dict[str, nn.Parameter]:
    return {
        "embed.weight": nn.Parameter(torch.ones(4, 3)),
        "layer.weight": nn.Parameter(torch.ones(3, 3)),
        "layer.bias": nn.Parameter(torch.ones(3)),
        "norm.weight": nn.Parameter(torch.ones(3)),
    }


def settings(optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    """(learning rate, weight decay) by name."""
    return {name: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for name in group["names"]}


@pytest.mark.parametrize("name", sorted(set(ALL) - set(REFUSED)))
def test_every_optimizer_of_torch_steps_by_its_name(name: str) -> None:
    given = parameters()
    optimizer = build_optimizer(given, config(name=name))
    assert type(optimizer) is (MuonWithAdamW if name == "Muon" else getattr(torch.optim, name))
    for parameter in given.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(bool((parameter != 1).any()) for parameter in given.values())


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_optimizers_that_cannot_work_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]):
        build_optimizer(parameters(), config(name=name))


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"(?s)Adamw is not an optimizer of torch.optim.*AdamW"):
        build_optimizer(parameters(), config(name="Adamw"))


def test_optimizers_of_whole_matrices_are_refused_where_ranks_have_flat_parts() -> None:
    check_optimizer(config(name="Adafactor"), Layout(shard=2))
    for layout in (Layout(shard=2, flat=True), Layout(shard=2, expert=2)):
        with pytest.raises(ConfigError, match=r"Adafactor cannot train on 2 ranks in this layout: it steps whole matr"):
            check_optimizer(config(name="Adafactor"), layout)
        check_optimizer(config(name="Rprop"), layout)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"args": {"momentum": 0.9}}, "args.momentum = 0.9: torch.optim.AdamW has no such argument"),
        ({"args": {"lr": 0.1}}, "args.lr = 0.1: torch.optim.AdamW takes that from keys of their own"),
        ({"args": {"foreach": True, "fused": True}}, "AdamW refuses its parameters or arguments"),
        ({"name": "SGD", "args": {"nesterov": True}}, "SGD refuses its parameters or arguments: Nesterov"),
        ({"name": "SGD", "adam_beta2": 0.95}, "adam_beta2 = 0.95 has no effect: torch.optim.SGD does not take it"),
        ({"name": "Rprop", "weight_decay": 0.1}, "weight_decay = 0.1 has no effect"),
        (
            {"name": "Rprop", "groups": [{"pattern": "w", "weight_decay": 0.1}]},
            "groups has no effect",
        ),
        ({"args": {"maximize": "no"}}, "args.maximize: no is not allowed: torch.optim.AdamW takes true or false"),
        ({"args": {"foreach": "no"}}, "args.foreach: no is not allowed"),
        (
            {"name": "SGD", "args": {"momentum": True}},
            "args.momentum: true is not allowed",
        ),
        ({"name": "SGD", "args": {"momentum": "0.9"}}, "takes a number"),
        ({"name": "Muon", "args": {"ns_steps": 2.5}}, "takes a whole number"),
        ({"name": "Muon", "args": {"ns_coefficients": [1, 2]}}, "Muon refuses its parameters or arguments: Coeff"),
        ({"args": {"differentiable": True}}, "AdamW refuses its parameters or arguments: a leaf Variable"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused_before_launch(values: dict, message: str) -> None:
    with pytest.raises(ConfigError) as told:
        check_optimizer(config(**values), Layout())
    assert message in str(told.value)
    assert told.value.remedy


def test_arguments_reach_the_optimizer() -> None:
    given = config(adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6, weight_decay=0.3, args={"amsgrad": True})
    group = build_optimizer(parameters(), given).param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"], group["amsgrad"]) == ((0.8, 0.9), 1e-6, 0.3, True)
    momentum = build_optimizer(parameters(), config(name="SGD", args={"momentum": 0.9})).param_groups[0]
    assert momentum["momentum"] == 0.9
    # An eps of its own, with another meaning or another default, is not Adam's.
    assert build_optimizer(parameters(), config(name="Adadelta")).param_groups[0]["eps"] == 1e-6


def test_matrices_decay_and_vectors_do_not() -> None:
    assert settings(build_optimizer(parameters(), config(weight_decay=0.2))) == {
        "embed.weight": (0.1, 0.2),
        "layer.weight": (0.1, 0.2),
        "layer.bias": (0.1, 0.0),
        "norm.weight": (0.1, 0.0),
    }


def test_the_last_group_that_matches_counts_key_by_key() -> None:
    groups = [
        {"pattern": "weight", "lr": 0.5},
        {"pattern": "^embed", "lr": 0.05, "weight_decay": 0.0},
        {"pattern": "norm", "weight_decay": 0.7},
    ]
    assert settings(build_optimizer(parameters(), config(weight_decay=0.2, groups=groups))) == {
        "embed.weight": (0.05, 0.0),
        "layer.weight": (0.5, 0.2),
        "layer.bias": (0.1, 0.0),
        "norm.weight": (0.5, 0.7),
    }


def test_a_group_whose_values_are_all_replaced_by_later_ones_is_refused() -> None:
    narrow, wide = {"pattern": "^embed", "lr": 0.05}, {"pattern": "weight", "lr": 0.5}
    with pytest.raises(ConfigError, match=r"the lr of \^embed has no effect: later patterns match all"):
        build_optimizer(parameters(), config(groups=[narrow, wide]))
    build_optimizer(parameters(), config(groups=[wide, narrow]))
    build_optimizer(parameters(), config(groups=[narrow, {"pattern": "weight", "weight_decay": 0.5}]))


def test_what_is_for_gpus_alone_is_refused_on_a_cpu() -> None:
    check_optimizer(config(args={"capturable": True}), Layout())
    with pytest.raises(ConfigError, match="capturable: true is for parameters on GPUs"):
        build_optimizer(parameters(), config(args={"capturable": True}))


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="pattern lm_head matches no trainable parameter"):
        build_optimizer(parameters(), config(groups=[{"pattern": "lm_head", "lr": 0.1}]))


@pytest.mark.parametrize("scheduler", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [{}, {"lr_warmup_steps": 7}, {"lr_warmup_steps_ratio": 0.1}], ids=str)
def test_rates_rise_in_the_warmup_then_never_again(scheduler: str, warmup: dict) -> None:
    given = config(lr_scheduler=scheduler, **warmup)
    steps = {"lr_warmup_steps": 7, "lr_warmup_steps_ratio": 10}.get(next(iter(warmup), ""), 0)
    factors = [rate_factor(step, 100, given) for step in range(250)]
    assert factors[:steps] == [(step + 1) / steps for step in range(steps)]
    assert factors[steps] == 1.0
    assert all(later <= sooner for sooner, later in zip(factors[steps:], factors[steps + 1 :], strict=False))
    assert all(0.0 <= factor <= 1.0 for factor in factors)
    assert factors[100:] == [1.0 if scheduler == "constant" else 0.0] * 150


def test_the_shape_of_each_schedule() -> None:
    at = {name: [rate_factor(step, 100, config(lr_scheduler=name)) for step in (0, 25, 50, 90, 95)] for name in
          ("linear", "cosine", "wsd")}  # fmt: skip
    assert at["linear"] == pytest.approx([1.0, 0.75, 0.5, 0.1, 0.05])
    assert at["cosine"] == pytest.approx([1.0, 0.8535534, 0.5, 0.0244717, 0.0061558], abs=1e-6)
    assert at["wsd"] == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.5])


def test_no_horizon_and_one_step_do_not_divide_by_zero() -> None:
    for scheduler in ("constant", "linear", "cosine", "wsd"):
        given = config(lr_scheduler=scheduler)
        assert rate_factor(0, 1, given) == 1.0
        assert 0.0 <= rate_factor(0, 0, given) <= 1.0
    assert rate_factor(4, 3, config(lr_warmup_steps=10)) == 0.5  # stopped within the warm-up
    from_zero = config(lr_warmup_steps=4, lr_warmup_from_zero=True)
    assert [rate_factor(step, 100, from_zero) for step in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_rates_end_at_min_lr_in_every_group_that_lies_above_it() -> None:
    given = config(min_lr=0.01, lr_scheduler="linear", groups=[{"pattern": "embed", "lr": 0.001}])
    optimizer = build_optimizer(parameters(), given)
    assert set_learning_rate(optimizer, 100, 100, given) == pytest.approx(0.01)
    rates = {name: rate for name, (rate, _) in settings(optimizer).items()}
    assert rates["layer.weight"] == pytest.approx(0.01)
    assert rates["embed.weight"] == pytest.approx(0.001)
    assert set_learning_rate(optimizer, 50, 100, given) == pytest.approx(0.055)
    # The warm-up begins at nothing, not at min_lr.
    warm = config(min_lr=0.01, lr_warmup_steps=10)
    assert set_learning_rate(build_optimizer(parameters(), warm), 0, 100, warm) == pytest.approx(0.01)
    assert set_learning_rate(build_optimizer(parameters(), warm), 1, 100, warm) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("name", "args", "on_a_gpu"),
    [
        ("AdamW", {}, True),
        ("SGD", {}, True),
        ("AdamW", {"foreach": True}, None),
        ("AdamW", {"fused": False}, False),
        ("NAdam", {}, None),
    ],
)
def test_kernels_are_fused_on_a_gpu_unless_the_recipe_chooses(name: str, args: dict, on_a_gpu: bool | None) -> None:
    config = OptimConfig(name=name, args=args)
    parameters = {"weight": nn.Parameter(torch.zeros(2, 2))}
    with AsOnCuda():
        assert build_optimizer(parameters, config).param_groups[0].get("fused") is on_a_gpu
    assert build_optimizer(parameters, config).param_groups[0].get("fused") is args.get("fused")


PASSING = """
import torch

class Passing(torch.optim.SGD):
    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)

class WithRate(torch.optim.SGD):
    def __init__(self, params, lr, **kwargs):
        super().__init__(params, lr, **kwargs)

class Alone(torch.optim.SGD):
    def __init__(self, params, **kwargs):
        super().__init__(params, momentum=kwargs.get("momentum", 0.0))
"""


@pytest.mark.parametrize("kind", ["Passing", "WithRate"])
def test_a_class_that_passes_its_arguments_on_has_the_decay_of_the_recipe(tmp_path: Path, kind: str) -> None:
    (tmp_path / "own.py").write_text(PASSING)
    name = f"{tmp_path / 'own.py'}:{kind}"
    check_optimizer(config(name=name, weight_decay=0.25), Layout(shard=2))
    groups = [{"pattern": "embed", "weight_decay": 0.5}]
    built = build_optimizer(parameters(), config(name=name, weight_decay=0.25, args={"momentum": 0.5}, groups=groups))
    assert settings(built) == {
        "embed.weight": (0.1, 0.5),
        "layer.weight": (0.1, 0.25),
        "layer.bias": (0.1, 0.0),
        "norm.weight": (0.1, 0.0),
    }
    assert {group["momentum"] for group in built.param_groups} == {0.5}
    for key in ("lr", "weight_decay"):
        with pytest.raises(
            ConfigError, match=f"(?s)args.{key} = 0.3: .*takes that from keys of their own.*takes others"
        ):
            build_optimizer(parameters(), config(name=name, args={key: 0.3}))
    with pytest.raises(ConfigError, match=r"weight_decay = 0.25 has no effect: .*Alone does not take it"):
        build_optimizer(parameters(), config(name=f"{tmp_path / 'own.py'}:Alone", weight_decay=0.25))


def test_no_decay_is_what_an_optimizer_without_one_has() -> None:
    groups = [{"pattern": "embed", "lr": 0.2, "weight_decay": 0.0}]
    built = build_optimizer(parameters(), config(name="Rprop", weight_decay=0.0, groups=groups))
    assert sorted({group["lr"] for group in built.param_groups}) == [0.1, 0.2]
