"""What a user's train method returns, as sums: how much its batches weigh, and how a mean becomes a sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any

import torch

from shardtune.batch import IGNORED, LossSum, Metric
from shardtune.data.user_loader.batch import LABELS, UserBatch, rows_of, targets_of
from shardtune.errors import ModelError
from shardtune.parallel.ranks import Ranks

TERM = "loss"
"""The name of a loss that is the only one."""
TRAIN = "get_train_model_output"
TrainOutput = torch.Tensor | Sequence[torch.Tensor] | LossSum | Mapping[str, LossSum] | tuple[Any, Mapping[str, Any]]


class BatchWeights:
    """How much each batch weighs in each term of the loss, known before the loss is computed.

    A worker may declare it; otherwise a batch weighs as many targets as a mean over it averages. Whether the first
    label of a row is a target depends on the model: one that compares each logit with the next label never uses it.
    That is measured, once, on the first batch that has such a label: with the first labels alone such a model has the
    same loss as with none.

    Args:
        declared: a batch to the weight of each term; to None where the worker declares nothing.
        measure: a batch to the number that the train method returns for it, without a gradient; None where it fails.
            All ranks call it together.
        ranks: of the run.
    """

    def __init__(
        self,
        declared: Callable[[Any], Mapping[str, float] | None],
        measure: Callable[[Any], float | None],
        ranks: Ranks,
    ) -> None:
        self._declared = declared
        self._measure = measure
        self._ranks = ranks
        self._shifted: bool | None = None

    def __call__(self, batches: Sequence[Any]) -> list[Mapping[str, float]]:
        """The weights of batches, at least one; all ranks call it together."""
        declared = [self._declared(batch) for batch in batches]
        told = [_checked(weights) for weights in declared if weights is not None]
        if told:
            return _same_terms(told)
        if self._shifted is None:
            self._find_shift(batches)
        return [{TERM: targets_of(batch, shifted=bool(self._shifted))} for batch in batches]

    def _find_shift(self, batches: Sequence[Any]) -> None:
        """Until a batch tells, no first label is a target, and both ways of counting agree."""
        telling = next((batch for batch in batches if has_first_labels(batch)), None)
        if not self._ranks.largest(float(telling is not None)):
            return
        probed = batches[0] if telling is None else telling
        one, other = (self._measure(_with_labels(probed, 0, keep)) for keep in (1, 0))
        if self._ranks.largest(float(one is None or other is None)):  # a task that does not bear so few targets
            one, other = self._measure(probed), self._measure(_with_labels(probed, 1, None))
        used = telling is not None and not _same_number(one, other)
        self._shifted = not self._ranks.largest(float(used))


def has_first_labels(batch: Any) -> bool:
    """Whether some row's first label counts, in a batch with labels for each place of a row."""
    labels = batch.get(LABELS) if isinstance(batch, Mapping) else None
    return isinstance(labels, torch.Tensor) and labels.ndim > 1 and bool((labels[:, :1] != IGNORED).any())


def _same_number(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


def _with_labels(batch: Any, start: int, stop: int | None) -> Any:
    """The batch with these labels of each row alone; unchanged where it has none."""
    labels = batch.get(LABELS) if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor):
        return batch
    masked = torch.full_like(labels, IGNORED)
    masked[:, start:stop] = labels[:, start:stop]
    # Of its own type: a tokenizer's batch has methods.
    changed: Any = copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
    changed[LABELS] = masked
    return changed


def _checked(weights: Any) -> Mapping[str, float]:
    if not isinstance(weights, Mapping) or not weights:
        raise ModelError(
            f"loss_weights returned {weights!r}, not a dict of numbers",
            where="loss_weights",
            remedy="return {term: how much this batch weighs in it} for each term of the loss",
        )
    return {str(name): float(value) for name, value in weights.items()}


def _same_terms(told: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    for weights in told:
        if set(weights) != set(told[0]):
            raise ModelError(
                f"loss_weights gives the terms {sorted(told[0])} for one batch and {sorted(weights)} for another",
                where="loss_weights",
                remedy="give every batch all terms; one that has none of a term's targets weighs 0 in it",
            )
    return list(told)


def losses_of(returned: Any, batch: UserBatch) -> dict[str, LossSum]:
    """What a train method returned, as sums by term; its metrics go into the batch.

    Args:
        returned: a mean loss, a list or tuple of them, a `LossSum`, a dict of `LossSum`s; any of these with a dict of
            metrics behind it.
        batch: knows what its terms weigh; a mean loss counts as often as that.
    """
    output, metrics = _parted(returned)
    if batch.counts:
        weight = batch.weights.get(TERM) or float(rows_of(batch.fields) or 1)
        batch.metrics.update({name: metric_of(name, value, weight) for name, value in metrics.items()})
    if isinstance(output, LossSum):
        losses = _by_term({TERM: output}, batch)
    elif _is_sums(output):
        losses = _by_term(dict(output), batch)
    else:
        losses = _mean_by_term(_mean(output), batch)
    if batch.counts:
        return losses
    return {name: LossSum(loss.total * 0.0, 0.0) for name, loss in losses.items()}


def _parted(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """A loss, and the metrics beside it."""
    if isinstance(returned, tuple) and not isinstance(returned, LossSum) and len(returned) == 2:
        output, metrics = returned
        if isinstance(metrics, Mapping) and not any(isinstance(item, LossSum) for item in metrics.values()):
            return output, metrics
    return returned, {}


def _is_sums(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(item, LossSum) for item in value.values())


def _by_term(sums: Mapping[str, LossSum], batch: UserBatch) -> dict[str, LossSum]:
    """Sums under the names of their weights; one term of any name stands for the only one."""
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
        wanted = batch.weights[name]
        if batch.counts and not math.isclose(term.weight, wanted, rel_tol=1e-5, abs_tol=1e-6):
            raise ModelError(
                f"{TRAIN} returned a sum of weight {term.weight:g}, the batch weighs {wanted:g}",
                where=TRAIN,
                remedy="write loss_weights(self, batch) -> {term: weight}: by default it is the number of labels that "
                "are not -100, or of rows where there are no labels",
            )
    return {name: LossSum(term.total.reshape(()), term.weight) for name, term in sums.items()}


def _mean_by_term(mean: torch.Tensor, batch: UserBatch) -> dict[str, LossSum]:
    if len(batch.weights) > 1:
        raise ModelError(
            f"{TRAIN} returned one loss, loss_weights gives the terms {sorted(batch.weights)}",
            where=TRAIN,
            remedy="return a dict with a LossSum(total, weight) for each of them",
        )
    ((name, weight),) = batch.weights.items()
    return {name: LossSum(mean * weight, weight)}


def _mean(output: Any) -> torch.Tensor:
    """A mean loss, or the mean of several."""
    if isinstance(output, (list, tuple)) and output and all(isinstance(entry, torch.Tensor) for entry in output):
        if any(entry.numel() != 1 for entry in output):
            raise _no_loss(output)
        output = torch.stack([entry.reshape(()) for entry in output]).mean()
    if not isinstance(output, torch.Tensor) or output.numel() != 1 or output.grad_fn is None:
        raise _no_loss(output)
    return output.reshape(())


def _no_loss(value: Any) -> ModelError:
    return ModelError(
        f"{TRAIN} returned {_describe(value)}, not a scalar loss with a graph",
        where=TRAIN,
        remedy="return outputs.loss (a mean), several of them in a list, (loss, {name: metric}), "
        "LossSum(total, weight) or a dict of LossSums",
    )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}{'' if value.grad_fn else ' without a graph'}"
    return f"a {type(value).__name__}"


def metric_of(name: str, value: Any, weight: float) -> Metric:
    """What stands beside a loss: a mean over a batch of this weight, or a sum with its own."""
    if isinstance(value, Metric):
        return value
    given: list[Any] = [*value] if isinstance(value, (tuple, list)) else [value]
    try:
        first, *others = (float(item.detach() if isinstance(item, torch.Tensor) else item) for item in given)
        return Metric(first, *others) if others else Metric(first * weight, weight)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"{TRAIN} returned the metric {name!r} as {_describe(value)}, not as a number",
            where=TRAIN,
            remedy="give a number (a mean over the batch) or a pair (sum, weight)",
        ) from error


def measured(returned: Any) -> float:
    """The loss in what a train method returned, as a number; NaN where there is none."""
    output: Any = _parted(returned)[0]
    if isinstance(output, LossSum):
        output = output.total
    elif isinstance(output, Mapping):
        output = [term.total for term in output.values() if isinstance(term, LossSum)]
    entries: list[Any] = [*output] if isinstance(output, (list, tuple)) else [output]
    tensors = [entry for entry in entries if isinstance(entry, torch.Tensor) and entry.numel() == 1]
    return math.fsum(entry.item() for entry in tensors) if tensors else math.nan
