"""Check of an adapter's metrics and predictions, which evaluation and the recipe's functions use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from shardtune.batch import Metric
from shardtune.errors import counted
from shardtune.evaluate.loss import as_metrics
from shardtune.models.adapter import Adapter
from shardtune.models.language_model import LanguageModel
from shardtune.models.tasks.task import TextTask
from shardtune.models.user_metrics import Prediction
from shardtune.models.whole_step_adapter import WholeStepAdapter
from shardtune.verify.kit import Kit
from shardtune.verify.result import Failed, Skipped
from shardtune.verify.trial import CLOSE, Trial, apart

PREDICTED = "predictions"
SHOWN = 4
"""Numbers of a prediction in a message."""
Sums = Mapping[str, tuple[float, float]]


def check_metrics(kit: Kit) -> str:
    """Metrics and predictions add up over any split, and are of the loss's targets; those of rows are the rows' own."""
    trial = kit.deterministic_trial()
    adapter = trial.adapter
    by_row = [_check_predicted_rows(trial)] if adapter.predicts_rows and not isinstance(adapter, TextTask) else []
    if isinstance(adapter, WholeStepAdapter):
        if by_row:
            return by_row[0]
        raise Skipped("it is evaluated by the loss of all rows of a step alone")
    if not adapter.predicts and not isinstance(adapter, LanguageModel) and type(adapter).metrics is Adapter.metrics:
        if by_row:
            return by_row[0]
        raise Skipped("it has neither metrics nor predictions of its own")
    rows = list(range(trial.num_rows))
    alone = _measured(trial, [[row] for row in rows])
    _compare(trial, alone, _measured(trial, trial.forwards(rows)))
    results = [f"{', '.join(sorted(alone))} of {len(rows)} rows, one by one and together"] if alone else []
    results += [*(_check_predictions(trial, alone) if adapter.predicts else ()), *by_row]
    return "; ".join(results) or "no metrics"


@torch.no_grad()
def _check_predicted_rows(trial: Trial) -> str:
    """What is predicted for a row does not depend on the rows beside it."""
    rows = list(range(trial.num_rows))
    with trial.draws():
        alone = [_numbers(value) for row in rows for value in trial.root.predict(trial.batch([row]))]
        together = [_numbers(value) for part in trial.forwards(rows) for value in trial.root.predict(trial.batch(part))]
    where = f"{type(trial.adapter).__name__}.predict_rows"
    if len(alone) != len(rows) or len(together) != len(rows):
        raise Failed(
            f"{len(rows)} rows have {len(alone)} predictions one by one and {len(together)} together",
            where=where,
            remedy="return a tensor [rows, …], or a value for each row",
        )
    for row, (one, other) in enumerate(zip(alone, together, strict=True)):
        if len(one) != len(other) or any(not _alike(*pair) for pair in zip(one, other, strict=True)):
            raise Failed(
                f"the prediction of row {row} is another one alone ({_shown(one)}) than together with all rows "
                f"({_shown(other)})",
                where=where,
                remedy="return values in the order of the rows, of each row alone, without its padding",
            )
    return f"predictions of {counted(len(rows), 'row')}, one by one and together"


def _numbers(value: object) -> list[object]:
    """The numbers and texts of a prediction, in order."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple):
        return [number for each in value for number in _numbers(each)]
    return [value]


def _alike(one: object, other: object) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return apart(float(one), float(other)) <= CLOSE
    return one == other


def _shown(values: Sequence[object]) -> str:
    shown = ", ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values[:SHOWN])
    return shown + (", …" if len(values) > SHOWN else "")


@torch.no_grad()
def _measured(trial: Trial, split: Sequence[Sequence[int]]) -> dict[str, tuple[float, float]]:
    """The sum and weight of each metric, and of the predictions, over micro-batches of these rows."""
    where = f"{type(trial.adapter).__name__}.metrics"
    sums: dict[str, tuple[float, float]] = {}
    trial.root.measure = _sum_of if trial.adapter.predicts else None
    try:
        for part in split:
            with trial.draws():
                found = trial.root.evaluate(trial.batch(part))
            for name, metric in as_metrics(found.metrics, where).items():
                total, weight = sums.get(name, (0.0, 0.0))
                sums[name] = (total + metric.total, weight + metric.weight)
    finally:
        trial.root.measure = None
    return sums


def _sum_of(predictions: Iterator[Prediction]) -> dict[str, Metric]:
    """A number that depends on every output, target and weight."""
    total, weight = 0.0, 0.0
    for outputs, targets, weights in predictions:
        if not len(outputs) == len(targets) == len(weights):
            raise Failed(
                f"a prediction has {len(outputs)} outputs, {len(targets)} targets and {len(weights)} weights",
                where=PREDICTED,
                remedy="yield Prediction(outputs, targets, weights) with as many of each",
            )
        each = outputs.double().flatten(1).sum(1) if outputs.ndim > 1 else outputs.double()
        each = each + (targets.double().flatten(1).sum(1) if targets.ndim > 1 else targets.double())
        total += float((each * weights.double()).sum())
        weight += float(weights.sum(dtype=torch.float64))
    return {PREDICTED: Metric(total, weight)}


def _compare(trial: Trial, alone: Sums, together: Sums) -> None:
    name = type(trial.adapter).__name__
    for metric in sorted({*alone, *together}):
        one, other = alone.get(metric, (0.0, 0.0)), together.get(metric, (0.0, 0.0))
        if apart(one[0], other[0]) > CLOSE or apart(one[1], other[1]) > CLOSE:
            method = PREDICTED if metric == PREDICTED else "metrics"
            raise Failed(
                f"{metric} is {one[0]:.6g} over {one[1]:g} row by row and {other[0]:.6g} over {other[1]:g} with all "
                f"{trial.num_rows} rows together",
                where=f"{name}.{method}: {metric}",
                remedy="return (sum, weight) over the batch, not a mean, and leave out padding and masked targets: "
                "the weight is the number of targets or rows that the sum is over",
            )


def _check_predictions(trial: Trial, measured: Sums) -> Iterator[str]:
    """Predictions weigh what the loss of the same rows weighs, and a loss of them has a graph."""
    adapter, name = trial.adapter, type(trial.adapter).__name__
    if len(trial.terms) > 1 and not isinstance(adapter, LanguageModel):
        return  # actor.loss does not support several terms
    rows = trial.forwards(range(trial.num_rows))[0]
    term = next(iter(trial.batch(rows).weights))
    expected, weight = trial.indexed_weights(range(trial.num_rows))[term], measured[PREDICTED][1]
    if apart(expected, weight) > CLOSE:
        raise Failed(
            f"the predictions of {trial.num_rows} rows weigh {weight:g}, their targets {expected:g} by weights",
            where=f"{name}.{PREDICTED}",
            remedy="yield exactly the targets that loss sums over, with their weights; actor.loss and eval.metrics "
            "take the place of the loss",
        )
    trial.root.token_loss = _any_loss
    try:
        total = trial.losses(trial.batch(rows))[term].total
    finally:
        trial.root.token_loss = None
    if not total.requires_grad:
        raise Failed(
            "a loss computed from the predictions (actor.loss) has no graph",
            where=f"{name}.{PREDICTED}",
            remedy="yield the model's own outputs, without detach() or torch.no_grad()",
        )
    yield f"predictions weigh {weight:g}, as the loss"


def _any_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.flatten(1).sum(1) if outputs.ndim > 1 else outputs
