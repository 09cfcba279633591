"""One process in the place of several data-parallel ranks: it computes their micro-batches, one rank after the other.

So a step of a run on many ranks can be computed again on one, with the micro-batches and the random draws that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from shardtune.batch import Batch, Metric
from shardtune.config.rank_layout import Layout
from shardtune.data.loader.protocol import DataState, MicroBatch
from shardtune.data.loader.step_loader import BatchMaker
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights
from shardtune.training.step import Accumulate, Totals


def ranks_of(ranks: Ranks, number: int) -> list[Ranks]:
    """The data-parallel ranks in whose place a process is: itself, or `number` others.

    Args:
        ranks: of the process.
        number: 1, or the ranks that it stands for.
    """
    if number == 1:
        return [ranks]
    return [Ranks(rank, number, ranks.device, layout=Layout(shard=number)) for rank in range(number)]


class MakersInTurn:
    """The micro-batches of all ranks.

    Args:
        makers: one for each rank.
    """

    def __init__(self, makers: Sequence[BatchMaker]) -> None:
        self._makers = list(makers)

    def micro_batches(self, rows: np.ndarray, state: DataState | None = None) -> tuple[Batch, ...]:
        """Those of rank 0, then as many of rank 1, and so on, fillers included."""
        return tuple(batch for maker in self._makers for batch in maker.micro_batches(rows, state))

    @property
    def is_seeded(self) -> bool:
        """As `BatchMaker.is_seeded`."""
        return self._makers[0].is_seeded

    @property
    def takes_apart(self) -> bool:
        """As `BatchMaker.takes_apart`."""
        return self._makers[0].takes_apart

    def alone(self, row: int | None, state: DataState | None = None) -> Batch:
        """As `BatchMaker.alone`."""
        return self._makers[0].alone(row, state)

    def denominators(self, rows: np.ndarray) -> dict[str, float]:
        """As `BatchMaker.denominators`."""
        return self._makers[0].denominators(rows)


def in_turn(accumulate: Accumulate, number: int) -> Accumulate:
    """A function that accumulates the micro-batches of `MakersInTurn`, each rank's with the draws of that rank."""
    return accumulate if number == 1 else partial(_accumulate, accumulate, number)


def _accumulate(
    accumulate: Accumulate,
    number: int,
    forward: Callable[..., object],
    micro_batches: Sequence[MicroBatch],
    denominators: Mapping[str, float],
    weights: Weights,
    *,
    draws: tuple[int, int, int],
    scale: float,
) -> Totals:
    """Worked example: of 6 micro-batches of 3 ranks, rank 1 has those at the places 2 and 3, its numbers 0 and 1."""
    each, (seed, step, _) = len(micro_batches) // number, draws
    losses, metrics = dict[str, torch.Tensor](), dict[str, Metric]()
    for rank in range(number):
        own = micro_batches[rank * each : (rank + 1) * each]
        found = accumulate(forward, own, denominators, weights, draws=(seed, step, rank), scale=scale)
        for name, total in found.losses.items():
            losses[name] = losses[name] + total if name in losses else total
        for name, metric in found.metrics.items():
            metrics[name] = metrics.get(name, Metric(0.0, 0.0)) + metric
    return Totals(losses, metrics)
