"""Evaluation over exactly the supervised tokens of all rows, on any number of ranks: each sum is divided once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from shardtune.batch import Batch, Metric
from shardtune.config import RunnerConfig
from shardtune.data.loader import BatchMaker
from shardtune.errors import ConfigError, DataError
from shardtune.parallel.mesh import Ranks

BLOCK_MICRO_BATCHES = 16
"""Micro-batches of each rank that are dealt together: enough to balance ranks, few enough to keep memory flat."""


def evaluation_batches(num_rows: int, maker: BatchMaker, rows_per_block: int) -> Iterator[Batch]:
    """This rank's micro-batches of an evaluation set, as many as every other rank's; each row comes exactly once."""
    for start in range(0, num_rows, rows_per_block):
        yield from maker.micro_batches(np.arange(start, min(start + rows_per_block, num_rows)))


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


def sum_user_batches(
    evaluate: Callable[[Any], Any],
    batches: Iterable[Any],
    ranks: Ranks,
    *,
    sharded: bool,
    num_samples: int | None,
    name: str,
    poll: Callable[[], None],
) -> dict[str, Metric]:
    """Sum what a user's own method measures over the batches of a user's own loader.

    Args:
        evaluate: a batch to the number of its samples that are correct, or to a dict of (sum, weight).
        batches: this rank's if `sharded`, otherwise all of them, of which batch i is rank i mod ranks'.
        ranks: over which the sums are taken.
        sharded: whose batches they are.
        num_samples: how many there are; to see fewer is an error.
        name: of the evaluation set.
        poll: called before each batch, by all ranks alike.
    """
    sums: dict[str, Metric] = {}
    seen = 0
    with torch.no_grad():
        for batch, counts in _turns(batches, ranks, sharded):
            poll()
            output = evaluate(batch)
            if not counts:
                continue
            size = _batch_size(batch)
            seen += size
            found = output if isinstance(output, Mapping) else {"eval_accuracy": (float(output), float(size))}
            for key, pair in found.items():
                metric = pair if isinstance(pair, Metric) else Metric(float(pair[0]), float(pair[1]))
                sums[key] = sums.get(key, Metric(0.0, 0.0)) + metric
    total = int(ranks.sum([seen])[0])
    if num_samples is not None and total < num_samples:
        raise DataError(
            f"evaluation saw {total} samples of the {num_samples} that build_dataloader announced",
            where=f"evaluation set {name}",
            remedy="build the evaluation loader with drop_last=False",
        )
    return ranks.reduce_metrics(sums)


def _turns(batches: Iterable[Any], ranks: Ranks, sharded: bool) -> Iterator[tuple[Any, bool]]:
    """This rank's batch of each turn, and whether it counts.

    A forward of a sharded model is one of all ranks, so all of them have as many turns: a rank without a batch goes
    through another once more.
    """
    source = iter(batches)
    spare: list[Any] = []
    while True:
        taken = list(islice(source, 1 if sharded else ranks.world_size))
        if not (ranks.largest(len(taken)) if sharded else len(taken)):
            return
        spare = taken[:1] or spare
        mine = taken if sharded else taken[ranks.rank : ranks.rank + 1]
        if not mine and not spare:
            raise DataError(
                f"rank {ranks.rank} has no batch to evaluate while others have",
                where="build_dataloader",
                remedy="let the loader yield all batches on every rank (without sharded: true)",
            )
        yield (mine or spare)[0], bool(mine)


def _batch_size(batch: Any) -> int:
    """Samples in a user's batch: the first dimension of its first tensor, or the length of its first list."""
    if isinstance(batch, Mapping):
        for value in batch.values():
            if isinstance(value, torch.Tensor) and value.ndim:
                return value.shape[0]
            if isinstance(value, (list, tuple)):
                return len(value)
    return len(batch) if isinstance(batch, Sequence) else 1


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


def check_monitors(config: RunnerConfig, known: Collection[str] | None) -> None:
    """Refuse to watch a metric that no evaluation gives.

    Args:
        config: says what early stopping and the best checkpoint watch.
        known: the names that evaluations give; None where that shows only in the first one.
    """
    watched = {
        "best": config.best.monitor,
        "early_stop": config.early_stop.monitor if config.early_stop.enabled else None,
    }
    for section, monitor in watched.items():
        if monitor is None or known is None or monitor in known:
            continue
        remedy = f"use one of {', '.join(sorted(known))}" if known else "give data.eval_data_paths or data.eval_split"
        if monitor.rpartition("/")[2] in ("eval_accuracy", "unparsed"):
            remedy += "; answers are counted with eval.generate: true"
        key = f"runner.{section}.monitor"
        raise ConfigError(f"{key}: no evaluation of this run gives {monitor!r}", where=key, remedy=remedy)
