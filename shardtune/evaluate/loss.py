"""Evaluation over exactly the supervised tokens of all rows, on any number of ranks; each sum is divided once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np
import torch

from shardtune.batch import Batch, Metric
from shardtune.config import RunnerConfig
from shardtune.data.loader.prefetch import computed_ahead
from shardtune.data.loader.step_loader import BatchMaker
from shardtune.errors import ConfigError, ModelError
from shardtune.evaluate.metric_direction import named_direction
from shardtune.models.recipe_hooks import OF_ANSWERS, OF_LOSSES
from shardtune.parallel.ranks import Ranks

BLOCK_MICRO_BATCHES = 16
"""Micro-batches per rank that are dealt together: enough to balance ranks, few enough to keep memory flat."""


def evaluation_blocks(
    num_rows: int, maker: BatchMaker, rows_per_block: int, num_processes: int = 0
) -> Iterator[tuple[Batch, ...]]:
    """This rank's micro-batches of an evaluation set, as many as every other rank's; each row comes exactly once."""

    def block(start: int) -> tuple[Batch, ...]:
        return maker.micro_batches(np.arange(start, min(start + rows_per_block, num_rows)))

    return computed_ahead(block, range(0, num_rows, rows_per_block), num_processes)


def as_metrics(values: Mapping[str, Metric | tuple[float, float]], where: str) -> dict[str, Metric]:
    """The values of an adapter's `metrics`, as `Metric`s by name.

    Raises:
        ModelError: a value is no pair of numbers, or a name is that of a loss.
    """
    found = {}
    for name, value in values.items():
        if name in OF_LOSSES or name.startswith("loss/"):
            raise ModelError(
                f"a metric is named {name!r}, as what evaluation makes of the losses",
                where=where,
                remedy="give it another name",
            )
        try:
            total, weight = (value.total, value.weight) if isinstance(value, Metric) else value
            found[name] = Metric(float(total), float(weight))
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"the metric {name!r} is {value!r}, not a pair (sum, weight) with a weight of 0 or more",
                where=where,
                remedy="return the sum over this batch and what it is divided by in the end: "
                f'{{"{name}": (int(right.sum()), len(right))}}',
            ) from error
    return found


def sum_evaluation(
    evaluate: Callable[[Batch], Mapping[str, Metric]],
    batches: Iterator[Batch],
    ranks: Ranks,
    *,
    poll: Callable[[], None],
) -> dict[str, Metric]:
    """Sum the metrics of all micro-batches over all ranks.

    Args:
        evaluate: one micro-batch to its (sum, weight) pairs.
        batches: this rank's.
        ranks: over which the sums are taken.
        poll: called before each micro-batch, by all ranks alike.
    """
    totals: dict[str, Metric] = {}
    with torch.no_grad():
        for batch in batches:
            poll()
            for name, metric in evaluate(batch).items():
                totals[name] = totals.get(name, Metric(0.0, 0.0)) + metric
    return ranks.reduce_metrics(totals)


def summarize(sums: Mapping[str, Metric], token_term: str | None = None) -> dict[str, float]:
    """The metrics of an evaluation set: `loss` (the sum of all terms), `perplexity` of tokens, and all others.

    With several loss terms there is also `loss/<term>` for each. One that has no weight in the set is NaN, and no part
    of the sum, as in a step of training.

    Args:
        sums: (sum, weight) of every metric; the terms of the loss are named `loss/<term>`.
        token_term: the term that is the cross-entropy of tokens, of which there is a perplexity; None: none is.
    """
    terms = {name: metric.mean for name, metric in sums.items() if name.startswith("loss/")}
    weighed = [value for name, value in terms.items() if sums[name].weight]
    metrics = {"loss": sum(weighed) if weighed or not terms else math.nan, **(terms if len(terms) > 1 else {})}
    tokens = None if token_term is None else terms.get(f"loss/{token_term}")
    if tokens is not None:
        metrics["perplexity"] = math.exp(min(tokens, 700.0))
    return metrics | {name: metric.mean for name, metric in sums.items() if name not in terms}


def check_monitors(config: RunnerConfig, known: Collection[str] | None) -> None:
    """Refuse a monitor that is no metric of any evaluation, or whose name does not say which values are better.

    Args:
        config: names the monitors of early stopping and the best checkpoint.
        known: the names of all metrics; None if they are known only after the first evaluation.
    """
    watched = {"best": config.best, "early_stop": config.early_stop if config.early_stop.enabled else None}
    for section, watch in watched.items():
        if watch is None or watch.monitor is None:
            continue
        monitor, key = watch.monitor, f"runner.{section}.monitor"
        if known is not None and monitor not in known:
            remedy = (
                f"use one of {', '.join(sorted(known))}" if known else "give data.eval_data_paths or data.eval_split"
            )
            if monitor.rpartition("/")[2] in OF_ANSWERS:
                remedy += "; answers are counted with eval.generate: true"
            raise ConfigError(f"{key}: no evaluation of this run gives {monitor!r}", where=key, remedy=remedy)
        if watch.mode == "auto" and monitor.startswith("eval/") and named_direction(monitor) is None:
            raise ConfigError(
                f"{key}: the name {monitor!r} does not say whether larger or smaller values are better",
                where=key,
                remedy=f"set runner.{section}.mode: max, or min",
            )
