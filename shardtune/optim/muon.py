"""Muon for the matrices of a model's hidden layers, with AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from shardtune.optim.low_bit import ParamGroup
from shardtune.optim.matrices import of_whole
from shardtune.optim.sharded import plain_step
from shardtune.parallel.meta_init import shard_of

MATRICES = "matrices"
"""The entry of a parameter group that is true for those of Muon."""
DIRECTION = ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
"""The arguments of `torch.optim.Muon` that decide what becomes of a matrix's momentum."""


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for groups with `matrices`, `torch.optim.AdamW` for the others.

    Muon replaces a matrix's momentum by the nearest orthogonal matrix, which is a function of the whole matrix. So the
    momentum of each matrix is gathered on one rank, which computes the update for all: steps do not depend on how the
    weights are sharded, and the work is divided over ranks. The momentum stays sharded.

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
        matrices = [
            (group, parameter)
            for group in self.param_groups
            for parameter in (group["params"] if group[MATRICES] else ())
            if parameter.grad is not None
        ]
        updates = of_whole(
            [parameter for _, parameter in matrices],
            lambda number: self._momentum(*matrices[number]),
            lambda number, whole: _update(matrices[number][0], whole),
        )
        for number, update in updates:
            group, parameter = matrices[number]
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            part = shard_of(parameter).local
            if part.numel():
                part.add_(update)
        if self._adamw is not None:
            plain_step(self._adamw)
        return loss

    def _momentum(self, group: ParamGroup, parameter: torch.Tensor) -> torch.Tensor:
        """What is made orthogonal: this rank's part, laid out as the parameter."""
        grad, state = parameter.grad, self.state[parameter]
        assert grad is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def _update(group: ParamGroup, momentum: torch.Tensor) -> torch.Tensor:
    """What is added to a whole matrix, without weight decay.

    torch computes in bf16. In fp64 that would be the only part of a step which is not exact, and whose last bits differ
    between layouts, so there it is computed in fp64.
    """
    if momentum.dtype == torch.float64:
        found = _orthogonal(momentum, group["ns_coefficients"], group["ns_steps"], group["eps"])
        return found.mul_(-_rate(group, momentum.shape))
    settings = {key: group[key] for key in DIRECTION}
    # torch's own step, on a matrix of zeros without momentum: what it becomes is what is added.
    moved = nn.Parameter(torch.zeros_like(momentum))
    moved.grad = momentum
    plain_step(torch.optim.Muon([moved], lr=group["lr"], weight_decay=0.0, momentum=0.0, nesterov=False, **settings))
    return moved.detach()


def _orthogonal(matrix: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float) -> torch.Tensor:
    """The nearest orthogonal matrix, roughly: the iteration of Newton and Schulz as in `torch.optim.Muon`."""
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    found = matrix.T if tall else matrix
    found = found / found.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found


def _rate(group: ParamGroup, shape: torch.Size) -> float:
    """The learning rate of a matrix of some shape, as `torch.optim.Muon` adjusts it."""
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return group["lr"] * 0.2 * math.sqrt(max(rows, columns))
    return group["lr"] * math.sqrt(max(1.0, rows / columns))
