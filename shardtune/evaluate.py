"""Evaluation over exactly the supervised tokens of all rows, on any number of ranks: every sum is divided once, at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from shardtune.batch import Batch, Metric
from shardtune.data.loader import BatchMaker
from shardtune.models.adapter import Evaluation
from shardtune.parallel.mesh import Ranks

BLOCK_MICRO_BATCHES = 16
"""Micro-batches of each rank that are dealt together: enough to balance ranks, few enough to keep memory flat."""


def evaluation_batches(num_rows: int, maker: BatchMaker, rows_per_block: int) -> Iterator[Batch]:
    """This rank's micro-batches of an evaluation set, as many as every other rank's; the set is fixed and none is dropped."""
    for start in range(0, num_rows, rows_per_block):
        yield from maker.micro_batches(np.arange(start, min(start + rows_per_block, num_rows)))


def sum_evaluation(
    evaluate: Callable[[Batch], Evaluation],
    batches: Iterator[Batch],
    ranks: Ranks,
    *,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Metric]:
    """Sum the losses and the right predictions of all micro-batches over all ranks.

    Args:
        evaluate: one micro-batch to its losses and counts.
        batches: this rank's.
        ranks: over which the sums are taken.
        progress: told the number of rows after each micro-batch.

    Returns:
        Per loss term its Metric, and "token_accuracy".
    """
    totals: dict[str, Metric] = {}
    with torch.no_grad():
        for batch in batches:
            result = evaluate(batch)
            found = {name: Metric(float(term.total), term.weight) for name, term in result.losses.items()}
            found["token_accuracy"] = Metric(float(result.correct), float(result.targets))
            for name, metric in found.items():
                totals[name] = totals.get(name, Metric(0.0, 0.0)) + metric
            if progress is not None:
                progress(batch.num_documents)
    return ranks.reduce_metrics(totals)


def summarize(sums: dict[str, Metric], token_term: str = "ce") -> dict[str, float]:
    """The metrics of an evaluation set: `loss` (the sum of all terms), `perplexity` and `token_accuracy`.

    With several loss terms each also stands as `loss/<term>`.
    """
    terms = {name: metric.mean for name, metric in sums.items() if name != "token_accuracy"}
    metrics = {"loss": sum(terms.values())}
    if len(terms) > 1:
        metrics |= {f"loss/{name}": value for name, value in terms.items()}
    if token_term in terms:
        metrics["perplexity"] = math.exp(min(terms[token_term], 700.0))
    metrics["token_accuracy"] = sums["token_accuracy"].mean
    return metrics
