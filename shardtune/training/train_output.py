"""Converts what a train method returns to sums by loss term, and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import SupportsFloat

import torch

from shardtune.batch import LossSum, Metric
from shardtune.data.loader.protocol import MicroBatch
from shardtune.errors import ModelError

TERM = "loss"
"""The name of a single loss."""
TRAIN = "get_train_model_output"
MetricValue = float | torch.Tensor | Metric | Sequence[float]
Loss = torch.Tensor | Sequence[torch.Tensor] | LossSum | Mapping[str, LossSum]
TrainOutput = Loss | tuple[Loss, Mapping[str, MetricValue]]
"""A mean loss (of a tensor of several elements the mean counts), a list of them (likewise), a `LossSum`, one by term;
or a pair of any of these and metrics."""


def read_train_output(returned: object, batch: MicroBatch) -> tuple[dict[str, LossSum], dict[str, Metric]]:
    """The losses that a train method returned, as sums by term, and its metrics.

    Args:
        returned: a `TrainOutput`; anything else is refused.
        batch: a mean loss is multiplied by the weight of its only term. A batch that does not count has losses of 0,
            with their graph.
    """
    output, beside = split_metrics(returned)
    if isinstance(output, LossSum):
        losses = _by_term({TERM: output}, batch)
    elif sums := loss_sums(output):
        losses = _by_term(sums, batch)
    else:
        losses = _mean_by_term(_mean(output), batch)
    if not batch.counts:
        return {name: LossSum(loss.total * 0.0, 0.0) for name, loss in losses.items()}, {}
    return losses, {str(name): metric_of(str(name), value, batch.metric_weight) for name, value in beside.items()}


def split_metrics(returned: object) -> tuple[object, Mapping[object, object]]:
    """Split a return value into loss and metrics."""
    if isinstance(returned, tuple) and not isinstance(returned, LossSum) and len(returned) == 2:
        output, metrics = returned
        if isinstance(metrics, Mapping) and not any(isinstance(item, LossSum) for item in metrics.values()):
            return output, metrics
    return returned, {}


def loss_sums(value: object) -> dict[str, LossSum]:
    """The mapping if all its values are `LossSum`s; otherwise empty."""
    if not isinstance(value, Mapping):
        return {}
    sums = {str(name): item for name, item in value.items() if isinstance(item, LossSum)}
    return sums if len(sums) == len(value) else {}


def _by_term(sums: Mapping[str, LossSum], batch: MicroBatch) -> dict[str, LossSum]:
    """Sums under the names of their weights; where there is one term, its name does not matter."""
    if len(sums) == len(batch.weights) == 1:
        sums = dict(zip(batch.weights, sums.values(), strict=True))
    if set(sums) != set(batch.weights):
        raise ModelError(
            f"{TRAIN} returned the terms {sorted(sums)}, the batch was given weights for {sorted(batch.weights)}",
            where=TRAIN,
            remedy=f"write loss_weights(self, batch) -> {{{', '.join(f'{name!r}: …' for name in sums)}}}: how much a "
            "batch weighs in each term, known before its loss",
        )
    for name, term in sums.items():
        if not isinstance(term.total, torch.Tensor) or term.total.numel() != 1 or term.total.grad_fn is None:
            raise _no_loss(term.total)
        expected = batch.weights[name]
        if batch.counts and not math.isclose(term.weight, expected, rel_tol=1e-5, abs_tol=1e-6):
            raise ModelError(
                f"{TRAIN} returned a sum of weight {term.weight:g}, the batch weighs {expected:g}",
                where=TRAIN,
                remedy="write loss_weights(self, batch) -> {term: weight}: by default it is the number of labels that "
                "are not -100, or of rows where there are no labels",
            )
    return {name: LossSum(term.total.reshape(()), term.weight) for name, term in sums.items()}


def _mean_by_term(mean: torch.Tensor, batch: MicroBatch) -> dict[str, LossSum]:
    if len(batch.weights) > 1:
        raise ModelError(
            f"{TRAIN} returned one loss, loss_weights gives the terms {sorted(batch.weights)}",
            where=TRAIN,
            remedy="return a dict with a LossSum(total, weight) for each of them",
        )
    ((name, weight),) = batch.weights.items()
    return {name: LossSum(mean * weight, weight)}


def _mean(output: object) -> torch.Tensor:
    """A mean loss, or the mean of several: the mean of all elements of a tensor or of tensors of one size."""
    entries = list(output) if isinstance(output, (list, tuple)) else [output]
    means = [entry_mean(entry) for entry in entries if isinstance(entry, torch.Tensor)]
    sizes = {entry.numel() for entry in entries if isinstance(entry, torch.Tensor)}
    if not entries or len(means) < len(entries):
        raise _no_loss(output)
    if len(sizes) > 1:
        raise ModelError(
            f"{TRAIN} returned tensors of {' and '.join(str(size) for size in sorted(sizes))} elements, whose mean is "
            "ambiguous",
            where=TRAIN,
            remedy="return the mean of each, or LossSum(total, weight)",
        )
    mean = means[0] if len(means) == 1 else torch.stack(means).mean()
    if mean.grad_fn is None or not sizes - {0}:
        raise _no_loss(output)
    return mean


def entry_mean(entry: torch.Tensor) -> torch.Tensor:
    """The mean of a tensor's elements; its only one unchanged."""
    return entry.reshape(()) if entry.numel() == 1 else entry.to(torch.promote_types(entry.dtype, torch.float32)).mean()


def _no_loss(value: object) -> ModelError:
    return ModelError(
        f"{TRAIN} returned {_describe(value)}, not a loss with a graph",
        where=TRAIN,
        remedy="return outputs.loss (a mean), several of them in a list, (loss, {name: metric}), "
        "LossSum(total, weight) or a dict of LossSums",
    )


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}{'' if value.grad_fn else ' without a graph'}"
    return f"a {type(value).__name__}"


def metric_of(name: str, value: object, weight: float) -> Metric:
    """A metric beside a loss: the mean over a batch of this weight, or a pair of a sum and its own weight.

    Each element of a tensor of several counts once, as in HALOs.
    """
    if isinstance(value, Metric):
        return value
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        return Metric(float(value.detach().double().sum()), float(value.numel()))
    given = value if isinstance(value, (tuple, list)) else (value,)
    try:
        first, *others = (_number(item) for item in given)
        return Metric(first, *others) if others else Metric(first * weight, weight)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"{TRAIN} returned the metric {name!r} as {_describe(value)}, not as a number, nor as a sum with a "
            "weight of 0 or more",
            where=TRAIN,
            remedy="give a number (a mean over the batch), a tensor of several or a pair (sum, weight)",
        ) from error


def _number(value: object) -> float:
    if isinstance(value, torch.Tensor):
        return float(value.detach())
    if isinstance(value, SupportsFloat):
        return float(value)
    raise TypeError(value)
