"""Muon for the matrices of a model's hidden layers, with AdamW for everything else."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardtune.optim.low_bit import ParamGroup
from shardtune.parallel.meta_init import shard_of

MATRICES = "matrices"
"""The entry of a parameter group that is true for those of Muon."""
DIRECTION = ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
"""The arguments of `torch.optim.Muon` that decide what becomes of a matrix's momentum."""


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for groups with `matrices`, `torch.optim.AdamW` for the others.

    Muon replaces a matrix's momentum by the nearest orthogonal matrix, which is a function of the whole matrix. So each
    rank gathers one at a time, computes the same result from it, and applies its own part: steps do not depend on how
    the weights are sharded. The momentum stays sharded.

    Args:
        groups: parameter groups with `lr` and `weight_decay`.
        muon: further arguments of `torch.optim.Muon`.
        adamw: of `torch.optim.AdamW`.
    """

    def __init__(self, groups: list[ParamGroup], muon: ParamGroup, adamw: ParamGroup) -> None:
        defaults = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], **muon).defaults
        own = {key: value for key, value in defaults.items() if key not in ("lr", "weight_decay")}
        super().__init__([{**own, **group} if group[MATRICES] else group for group in groups], {})
        # The same groups and states: a rate that is set, or a state that is loaded, is that of both.
        others = [group for group in self.param_groups if not group[MATRICES]]
        self._adamw = torch.optim.AdamW(others, **adamw) if others else None
        if self._adamw is not None:
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"] if group[MATRICES] else ():
                if parameter.grad is not None:
                    self._step(group, parameter)
        if self._adamw is not None:
            _step(self._adamw)
        return loss

    def _step(self, group: ParamGroup, parameter: torch.Tensor) -> None:
        grad, state = parameter.grad, self.state[parameter]
        assert grad is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        full = update.full_tensor() if isinstance(update, DTensor) else update
        # torch's own step, on a matrix of zeros without momentum: what it becomes is what is added.
        moved = nn.Parameter(torch.zeros_like(full))
        moved.grad = full
        settings = {key: group[key] for key in DIRECTION}
        _step(torch.optim.Muon([moved], lr=group["lr"], weight_decay=0.0, momentum=0.0, nesterov=False, **settings))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        shard = shard_of(parameter)
        if shard.local.numel():
            shard.local.add_(shard.of(moved.detach()))


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Step without the hooks that torch runs around each optimizer's step: they have run for the outer one."""
    inspect.unwrap(type(optimizer).step)(optimizer)
