"""One optimizer step: accumulate sums, divide once, clip by the global norm, update; and its metrics."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from shardtune.batch import Batch, LossSum, Metric
from shardtune.batch.seeds import derive_seed, seed_generators
from shardtune.data.loader.protocol import MicroBatch, Step
from shardtune.data.user_loader.batch import UserBatch
from shardtune.errors import ModelError
from shardtune.launch.progress import PROGRESS
from shardtune.parallel.clipping import EPSILON
from shardtune.parallel.half_products import recomputing
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights
from shardtune.training.anomalies import Kind
from shardtune.training.resident_memory import Earlier
from shardtune.training.train_output import read_train_output
from shardtune.training.utilisation import Utilisation

ROW_DRAWS = "rows"
"""`derive_seed(seed, step, ROW_DRAWS)` is the key of the rows' random numbers in a step, `derive_seed(seed, ROW_DRAWS)`
in evaluation."""
MAX_TRIES = 40
TRAIN_METRICS = (
    "train/loss",
    "train/grad_norm",
    "train/learning_rate",
    "train/tokens",
    "train/supervised_tokens",
    "perf/tokens_per_second",
    "perf/data_wait",
    "perf/peak_memory_gb",
)
"""The metrics of every step; of rows without tokens `samples` stands for `tokens` in these names."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums over the micro-batches of one rank.

    Attributes:
        losses: fp64 scalars by term.
        metrics: returned beside the losses.
    """

    losses: dict[str, torch.Tensor]
    metrics: dict[str, Metric]


Judge = Callable[[float, float, float], str]
"""`Spikes.judge`."""
Accumulate = Callable[..., Totals]
"""`accumulate`, or another function with its arguments that computes the same gradients."""


@dataclass(slots=True)
class LossScale:
    """The factor with which a step begins, so that fp16 gradients do not underflow.

    It is doubled after many steps without overflow. A step that overflows at it halves it once, however small a factor
    that step itself needs: at that one the gradients of the steps after it could underflow.

    Attributes:
        value: the factor.
        growth_interval: steps without overflow after which it doubles.
        quiet: the current number of such steps.
    """

    value: float = 2.0**16
    growth_interval: int = 2000
    quiet: int = 0

    @property
    def least(self) -> float:
        """The factor of the last try of a step: what overflows at it does so at any."""
        return self.value / 2 ** (MAX_TRIES - 1)

    def adjust(self, overflowed: bool) -> None:
        """After an update."""
        if overflowed:
            self.value, self.quiet = self.value / 2, 0
        self.quiet += 1
        if self.quiet >= self.growth_interval:
            self.value, self.quiet = self.value * 2, 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step.

    Attributes:
        losses: per term, the sum of its totals over all ranks divided by the step's weight of that term.
        gradient_norm: before clipping, over all ranks.
        updated: False if no weight, optimizer state or learning rate has changed.
        problem: the reason for that.
        anomaly: its kind, where the numbers are at fault.
        metrics: returned beside the losses, over all ranks.
        gradient_at: the time (`time.perf_counter()`) at which the norm was known, and so the gradient complete, on a
            GPU too; 0 where none was computed.
        scale: the factor of the loss with which the gradient was computed; 0 where nothing was updated.
    """

    losses: dict[str, float]
    gradient_norm: float
    updated: bool
    problem: str = ""
    anomaly: Kind | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    gradient_at: float = field(default=0.0, compare=False)
    scale: float = field(default=0.0, compare=False)

    @property
    def loss(self) -> float:
        """The quantity whose gradient was taken."""
        return sum(self.losses.values())


def check_weights(losses: Mapping[str, LossSum], expected: Mapping[str, float]) -> None:
    """Refuse a loss whose terms or weights differ from the row index's."""
    if set(losses) != set(expected):
        raise ModelError(
            f"the loss has the terms {sorted(losses)}, the rows were given weights for {sorted(expected)}",
            remedy="let weights(row) and loss(model, batch) name the same terms; one that no row of a micro-batch has "
            "is the sum over none of them, with weight 0",
        )
    for name, term in losses.items():
        if not isinstance(term, LossSum):
            raise ModelError(
                f"the loss term {name!r} is a {type(term).__name__}, not a LossSum",
                remedy="return {term: LossSum(total, weight)}, or a mean loss alone",
            )
        if not math.isclose(term.weight, expected[name], rel_tol=1e-5, abs_tol=1e-6):
            raise ModelError(
                f"the loss term {name!r} reports weight {term.weight}, its rows have {expected[name]}",
                remedy="let weights(row) count what loss(model, batch) sums over",
            )


def objective(losses: Mapping[str, LossSum], denominators: Mapping[str, float], scale: float) -> torch.Tensor:
    """The differentiated scalar: the sum over terms of total / weight of the whole step.

    A step without targets has gradient zero; the backward pass still runs, as it contains collectives.
    """
    shares = [loss.total * (scale / denominators[name]) for name, loss in losses.items() if denominators[name]]
    return torch.stack(shares or [loss.total * 0.0 for loss in losses.values()]).sum()


def accumulate(
    forward: Callable[..., object],
    micro_batches: Sequence[MicroBatch],
    denominators: Mapping[str, float],
    weights: Weights,
    *,
    draws: tuple[int, int, int],
    scale: float,
) -> Totals:
    """Forward and backward of every micro-batch; gradients of `sum of total / denominator` add up in the parameters.

    Args:
        forward: maps a micro-batch to its loss, a `TrainOutput`.
        micro_batches: this rank's.
        denominators: per term, the weight of the whole step on all ranks.
        weights: whose gradients are accumulated.
        draws: (seed, step, rank), which seed the random draws.
        scale: factor on the gradients.
    """
    seed, step, rank = draws
    totals = {name: torch.zeros((), dtype=torch.float64) for name in denominators}
    metrics: dict[str, Metric] = {}
    key = derive_seed(seed, step, ROW_DRAWS)
    for number, batch in enumerate(micro_batches):
        PROGRESS.beats += 1
        PROGRESS.micro_batch = number + 1
        if isinstance(batch, Batch):
            batch = replace(batch, key=key)
        if weights.on_ranks:
            weights.begin_micro_batch(last=number == len(micro_batches) - 1)
        seed_generators(derive_seed(seed, step, number, rank, "train"))
        output, beside = forward(batch), {}
        # Sums by term are taken as they are, but for a user's own batches and for those that only keep ranks in step.
        filler = isinstance(batch, Batch) and max(batch.rows) < 0
        if type(output) is not dict or filler or isinstance(batch, UserBatch):
            output, beside = read_train_output(output, batch)
        check_weights(output, batch.weights)
        with recomputing():
            objective(output, denominators, scale).backward()
        for name, loss in output.items():
            # A GPU adds a scalar of the CPU to its own without being waited for; it would be to move the scalar.
            totals[name] = totals[name] + loss.total.detach().double()
        for name, metric in beside.items():
            metrics[name] = metrics.get(name, Metric(0.0, 0.0)) + metric
    return Totals(totals, metrics)


def optimizer_step(
    forward: Callable[..., object],
    micro_batches: Sequence[MicroBatch],
    denominators: Mapping[str, float],
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    *,
    draws: tuple[int, int, int],
    clip: float | None,
    loss_scale: LossScale | None = None,
    accumulate: Accumulate = accumulate,
    judge: Judge | None = None,
) -> StepResult:
    """One step of the optimizer on all ranks.

    A gradient or a loss that is not finite changes nothing, on any rank: where fp16 gradients overflow, all batches are
    computed again at half the loss scale, as often as it takes (see `LossScale`), otherwise (or where no scale helps,
    which is as before then) the result has `updated=False`. So do a step that `judge` refuses, and one without a
    target, which decay alone would change.

    Raises:
        ModelError: there are targets and no gradient; ranks called different units; a parameter is trained now that the
            optimizer does not have; or a compiled module changes a buffer in place.
    """
    if any(parameter.requires_grad for parameter in weights.untrained.values()):
        weights.refuse_unfrozen()
    PROGRESS.begun += 1
    PROGRESS.micro_batch, PROGRESS.micro_batches = 0, len(micro_batches)
    if not any(denominators.values()):
        return StepResult(dict.fromkeys(denominators, 0.0), 0.0, updated=False, problem="no row has a target")
    buffers = weights.copy_buffers() if weights.has_buffers else {}
    accumulate = weights.compiled_buffers.watched(accumulate) if weights.compiled_buffers.owners else accumulate
    scale, tries = loss_scale.value if loss_scale else 1.0, 0
    while True:
        tries += 1
        weights.zero_gradients()
        totals = accumulate(forward, micro_batches, denominators, weights, draws=draws, scale=scale)
        if weights.replicates:
            weights.sync_replicated_gradients()
        # All numbers of the step are read at once: the one time at which it waits for a GPU.
        zeros = weights.unit_calls.filling.filled - weights.unit_calls.filling.used
        reached = any(each.grad is not None and id(each) not in zeros for each in weights.parameters.values())
        values = [*totals.losses.values(), float(len(totals.metrics)), float(reached)]
        mark = weights.unit_calls.mark() if weights.on_ranks else 0.0
        *sums, measured, reached, square, marks = ranks.sum(values, [weights.gradient_square(), mark])
        if weights.on_ranks:
            weights.unit_calls.settle(marks == mark * ranks.world_size)
        norm = math.sqrt(square) / scale
        if math.isfinite(norm) or loss_scale is None or tries == MAX_TRIES or not all(map(math.isfinite, sums)):
            break  # no scale mends a loss that is not finite
        scale /= 2
        if buffers:
            weights.restore_buffers(buffers)
    known_at = time.perf_counter()
    if not reached and not square:
        raise _without_gradient()
    losses = {
        name: value / denominators[name] if denominators[name] else 0.0
        for name, value in zip(totals.losses, sums, strict=True)
    }
    metrics = ranks.reduce_metrics(totals.metrics) if measured else {}
    kind, problem = None, ""
    if not all(map(math.isfinite, (norm, *losses.values()))):
        kind, problem = "nonfinite", _not_finite(norm, tries)
    elif judge is not None and (problem := judge(sum(losses.values()), norm, max(denominators.values()))):
        kind = "spike"
    if kind is not None:
        weights.zero_gradients()
        if buffers:
            weights.restore_buffers(buffers)
        return StepResult(losses, norm, False, problem, kind, metrics, known_at)
    factor = 1.0 if clip is None else min(1.0, clip / (norm + EPSILON))
    weights.scale_gradients(factor / scale)
    optimizer.step()
    weights.copy_masters_to_model()
    weights.zero_gradients()
    if loss_scale:
        loss_scale.adjust(tries > 1)
    return StepResult(losses, norm, updated=True, metrics=metrics, gradient_at=known_at, scale=scale)


def _not_finite(norm: float, tries: int) -> str:
    scaled = " at any loss scale of fp16" if tries > 1 else ""
    return f"the {'loss' if math.isfinite(norm) else 'gradient'} was not finite{scaled}"


def _without_gradient() -> ModelError:
    return ModelError(
        "the loss has no gradient for any trained parameter",
        where="backward pass of the step",
        remedy="compute it from what the model returns, without detach() or torch.no_grad() in between; where only "
        "parts that read images are trained, raise actor.global_batch_size until each step has a row with an image",
    )


def peak_memory_gb(device: torch.device) -> float:
    """The most memory this rank has used, in GB (1e9 bytes): of the device, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return max(Earlier.gigabytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9)


def step_metrics(
    step: Step[MicroBatch],
    result: StepResult,
    *,
    rate: float,
    seconds: float,
    waited: float,
    ranks: Ranks,
    utilisation: Utilisation | None,
) -> dict[str, float]:
    """The metrics of a step, the same on every rank; every rank calls it.

    Args:
        step: the rows that were trained on.
        result: of it.
        rate: the learning rate.
        seconds: the duration of the step, waiting for data included.
        waited: the part of them spent waiting for data.
        ranks: of the run.
        utilisation: where the peak of the devices is known.
    """
    metrics = {"train/loss": sum(result.losses.values())}
    if len(result.losses) > 1:
        metrics |= {f"train/loss/{name}": value for name, value in result.losses.items()}
    metrics |= {
        "train/grad_norm": result.gradient_norm,
        "train/learning_rate": rate,
        f"train/{step.unit}": float(step.num_tokens),
        "train/supervised_tokens": float(step.num_targets),
        f"perf/{step.unit}_per_second": step.num_tokens / seconds,
        "perf/data_wait": waited,
        "perf/peak_memory_gb": ranks.largest(peak_memory_gb(ranks.device)),
    }
    if utilisation is not None:
        mean_length = step.num_tokens / max(1, len(step.rows))
        metrics["perf/mfu"] = utilisation.of(step.num_tokens / seconds, mean_length)
    return metrics
