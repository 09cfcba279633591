"""One optimizer step: accumulate sums, divide once, clip by the global norm, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardtune.batch import LossSum
from shardtune.data.loader.order import derive_seed
from shardtune.errors import ModelError
from shardtune.parallel.fsdp2 import Weights
from shardtune.parallel.ranks import Ranks

Accumulate = Callable[..., dict[str, torch.Tensor]]
"""`accumulate`, or another way to the same gradients with its arguments."""
MAX_HALVINGS = 40
CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


@dataclass(slots=True)
class LossScale:
    """The factor that keeps fp16 gradients above underflow; halved where they overflow, doubled after a quiet stretch.

    Attributes:
        value: the factor.
        growth_interval: steps without overflow after which it doubles.
        quiet: such steps so far.
    """

    value: float = 2.0**16
    growth_interval: int = 2000
    quiet: int = 0

    def halve(self) -> None:
        self.value, self.quiet = self.value / 2, 0

    def adjust(self) -> None:
        self.quiet += 1
        if self.quiet >= self.growth_interval:
            self.value, self.quiet = self.value * 2, 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step measured.

    Attributes:
        losses: per term, the sum of its totals over all ranks divided by the step's weight of that term.
        gradient_norm: before clipping, over all ranks.
        updated: False where no weight, optimizer state or learning rate has moved.
        problem: why that is so.
    """

    losses: dict[str, float]
    gradient_norm: float
    updated: bool
    problem: str = ""

    @property
    def loss(self) -> float:
        """The quantity whose gradient was taken."""
        return sum(self.losses.values())


def seed_rng(seed: int, step: int, micro_batch: int, rank: int, stage: str) -> None:
    """Make the random draws of a forward a function of where it stands, so that there is no generator state to lose."""
    torch.manual_seed(derive_seed(seed, step, micro_batch, rank, stage))


def check_weights(losses: Mapping[str, LossSum], expected: Mapping[str, float]) -> None:
    """Refuse a loss whose terms or weights are not those that the row index promised."""
    if set(losses) != set(expected):
        raise ModelError(
            f"the loss has the terms {sorted(losses)}, the rows were given weights for {sorted(expected)}",
            remedy="let weights(row) and loss(model, batch) name the same terms",
        )
    for name, term in losses.items():
        if not math.isclose(term.weight, expected[name], rel_tol=1e-5, abs_tol=1e-6):
            raise ModelError(
                f"the loss term {name!r} reports weight {term.weight}, its rows have {expected[name]}",
                remedy="let weights(row) count what loss(model, batch) sums over",
            )


def objective(losses: Mapping[str, LossSum], denominators: Mapping[str, float], scale: float) -> torch.Tensor:
    """What is differentiated: each total over the weight of the whole step, summed.

    A step without targets has gradient zero; its graph is still walked, as other ranks wait in it.
    """
    shares = [loss.total * (scale / denominators[name]) for name, loss in losses.items() if denominators[name]]
    return torch.stack(shares or [loss.total * 0.0 for loss in losses.values()]).sum()


def accumulate(
    forward: Callable[[Any], Mapping[str, LossSum]],
    micro_batches: Sequence[Any],
    denominators: Mapping[str, float],
    weights: Weights,
    *,
    draws: tuple[int, int, int],
    scale: float,
) -> dict[str, torch.Tensor]:
    """Forward and backward of every micro-batch; gradients of `sum of total / denominator` add up in the parameters.

    Args:
        forward: a micro-batch to its loss terms.
        micro_batches: this rank's.
        denominators: per term, the weight of the whole step on all ranks.
        weights: whose gradients are accumulated.
        draws: (seed, step, rank), of which the random draws are a function.
        scale: factor on the gradients.

    Returns:
        Per term, the sum of this rank's totals.
    """
    seed, step, rank = draws
    totals = {name: torch.zeros((), dtype=torch.float64) for name in denominators}
    for number, batch in enumerate(micro_batches):
        if weights.on_ranks:
            weights.begin_micro_batch(last=number == len(micro_batches) - 1)
        seed_rng(seed, step, number, rank, "train")
        losses = forward(batch)
        check_weights(losses, batch.weights)
        objective(losses, denominators, scale).backward()
        for name, loss in losses.items():
            totals[name] = totals[name].to(loss.total.device) + loss.total.detach().double()
    return totals


def optimizer_step(
    forward: Callable[[Any], Mapping[str, LossSum]],
    micro_batches: Sequence[Any],
    denominators: Mapping[str, float],
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    *,
    draws: tuple[int, int, int],
    clip: float | None,
    loss_scale: LossScale | None = None,
    accumulate: Accumulate = accumulate,
) -> StepResult:
    """One step of the optimizer on all ranks.

    A gradient that is not finite moves nothing, on any rank: with fp16 the same micro-batches are computed again at
    half the loss scale, otherwise the result says `updated=False`. So it does of a step without a target: momentum and
    weight decay alone would move the weights.
    """
    if not any(denominators.values()):
        return StepResult(dict.fromkeys(denominators, 0.0), 0.0, updated=False, problem="no row has a target")
    for _ in range(MAX_HALVINGS):
        scale = loss_scale.value if loss_scale else 1.0
        weights.zero_gradients()
        totals = accumulate(forward, micro_batches, denominators, weights, draws=draws, scale=scale)
        if weights.replicates:
            weights.sync_replicated_gradients()
        norm = weights.gradient_norm() / scale
        if math.isfinite(norm) or loss_scale is None:
            break
        loss_scale.halve()
    else:
        raise ModelError("fp16 gradients overflow at any loss scale", remedy="use actor.model.precision: bf16")
    sums = ranks.sum([float(total) for total in totals.values()])
    losses = {
        name: value / denominators[name] if denominators[name] else 0.0
        for name, value in zip(totals, sums, strict=True)
    }
    if not math.isfinite(norm):
        weights.zero_gradients()
        return StepResult(losses, norm, updated=False, problem="the gradient was not finite")
    factor = 1.0 if clip is None else min(1.0, clip / (norm + CLIP_EPSILON))
    weights.scale_gradients(factor / scale)
    optimizer.step()
    weights.copy_masters_to_model()
    weights.zero_gradients()
    if loss_scale:
        loss_scale.adjust()
    return StepResult(losses, norm, updated=True)
