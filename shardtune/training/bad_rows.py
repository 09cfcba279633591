"""Which rows of a step have a loss or a gradient that is not finite, or the highest loss; looked for when it is bad."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from shardtune.batch import Batch
from shardtune.data.loader.protocol import MicroBatch, Step
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights
from shardtune.training.step import accumulate

NAMED = 3
"""Rows of the highest losses that are named."""
Alone = Callable[[int | None], MicroBatch]
"""A row of the data set to a micro-batch of it alone; None to a filler, which calls the same parts of the model."""


@dataclass(frozen=True, slots=True, order=True)
class BadPart:
    """A part of a step that is not finite.

    Attributes:
        rank: the data-parallel rank that has it.
        micro_batch: its place among that rank's micro-batches.
        row: of the data set; -1: the micro-batch as a whole.
        loss: its loss alone, where it is one of the highest.
    """

    rank: int
    micro_batch: int
    row: int = -1
    loss: float = field(default=math.nan, compare=False)


class BadRows:
    """Computes a step again, part by part; every rank calls it.

    First its micro-batches, then the rows of those that are not finite, each alone. A loss is known to the rank that
    has the row. A gradient is known only as the sum over ranks, so the ranks are halved until one is left. Nothing is
    updated. Draws of dropout differ from those of the step, so that what they alone have caused is not found.

    Args:
        forward: maps a micro-batch to its loss.
        weights: of the model.
        ranks: of the run.
        draws: (seed, step, rank), of the step.
        alone: makes micro-batches of single rows; None: rows cannot be taken apart.
        scale: factor on the loss: in fp16 one so small that only a row that no factor helps is not finite.
    """

    def __init__(
        self,
        forward: Callable[..., object],
        weights: Weights,
        ranks: Ranks,
        *,
        draws: tuple[int, int, int],
        alone: Alone | None,
        scale: float = 1.0,
    ) -> None:
        self._forward = forward
        self._weights = weights
        self._ranks = ranks
        self._draws = draws
        self._alone = alone
        self._scale = scale

    def find(self, step: Step[MicroBatch]) -> list[BadPart]:
        """The parts of the step that are not finite by themselves, in order; the same on every rank."""
        return self._without_a_trace(self._find, step)

    def highest(self, step: Step[MicroBatch]) -> list[BadPart]:
        """The rows that add most to the loss of the step, with their losses, highest first; the same on every rank.

        Ranks look into their micro-batches, those that add most first, until no other can hold a row that adds more: a
        row adds no more than its micro-batch where no loss is negative. Where rows cannot be taken apart, the one
        micro-batch of all ranks that adds most.
        """
        return self._without_a_trace(self._highest, step)

    def _without_a_trace(
        self, search: Callable[[Step[MicroBatch]], list[BadPart]], step: Step[MicroBatch]
    ) -> list[BadPart]:
        buffers = self._weights.copy_buffers()
        try:
            return search(step)
        except Exception:
            if self._ranks.mesh is not None:  # other ranks may be in a collective
                raise
            return []  # as of a model that does not take a row alone
        finally:
            self._weights.zero_gradients()
            self._weights.restore_buffers(buffers)

    def _highest(self, step: Step[MicroBatch]) -> list[BadPart]:
        rank, batches, alone = self._ranks.data_rank, step.micro_batches, self._alone
        added = [self._added(batch, step) for batch in batches]
        places = sorted(range(len(batches)), key=lambda place: -added[place][0])
        if alone is None:
            first, loss = added[places[0]]
            return [part for _, part in self._of_all_ranks([(first, BadPart(rank, places[0], loss=loss))])][:1]
        found: list[tuple[float, BadPart]] = []
        for turn, place in enumerate(places):
            batch = batches[place]
            rows = [row for row in batch.rows if row >= 0] if isinstance(batch, Batch) else []
            for number in range(int(self._ranks.largest(float(len(rows))))):
                row = rows[number] if number < len(rows) else None
                adds, loss = self._added(alone(row), step)
                found += [(adds, BadPart(rank, place, row, loss))] if row is not None else []
            best = self._of_all_ranks(found)[:NAMED]
            following = added[places[turn + 1]][0] if turn + 1 < len(places) else -math.inf
            if len(best) == NAMED and self._ranks.largest(following) <= best[-1][0]:
                break
        return [part for _, part in self._of_all_ranks(found)][:NAMED]

    def _of_all_ranks(self, found: list[tuple[float, BadPart]]) -> list[tuple[float, BadPart]]:
        """What ranks have found, with what each adds to the loss of the step, highest first."""
        every = [one for own in self._ranks.gather(found if self._ranks.counts else []) for one in own]
        return sorted(every, key=lambda one: (-one[0], one[1]))

    def _added(self, batch: MicroBatch, step: Step[MicroBatch]) -> tuple[float, float]:
        """How much this rank's micro-batch adds to the loss of the step, and its own loss."""
        self._weights.zero_gradients()
        totals = accumulate(
            self._forward, [batch], step.denominators, self._weights, draws=self._draws, scale=self._scale
        ).losses
        terms = [(float(totals[name]), whole, batch.weights[name]) for name, whole in step.denominators.items()]
        adds = sum(total / whole for total, whole, _ in terms if whole)
        return adds, sum(total / weight for total, _, weight in terms if weight)

    def _find(self, step: Step[MicroBatch]) -> list[BadPart]:
        own: list[BadPart] = []
        for place, batch in enumerate(step.micro_batches):
            for rank in self._culprits(batch, step):
                own += self._rows(step, BadPart(rank, place), batch)
        return sorted({part for parts in self._ranks.gather(own) for part in parts})

    def _rows(self, step: Step[MicroBatch], part: BadPart, batch: MicroBatch) -> list[BadPart]:
        """The rows of a rank's micro-batch that are not finite alone; if none is, all of them."""
        mine = part.rank == self._ranks.data_rank
        rows = [row for row in batch.rows if row >= 0] if mine and isinstance(batch, Batch) else []
        number = int(self._ranks.largest(float(len(rows))))
        whole = [BadPart(part.rank, part.micro_batch, row) for row in rows] or ([part] if mine else [])
        if self._alone is None or number < 2:
            return whole
        found = []
        for place in range(number):
            batch_alone = self._alone(rows[place] if place < len(rows) else None)
            if self._compute(batch_alone, step)[1]:
                found += whole[place : place + 1] if rows else []
        return found or whole

    def _culprits(self, batch: MicroBatch, step: Step[MicroBatch]) -> list[int]:
        """The data-parallel ranks whose micro-batch is not finite; the same on every rank."""
        loss, gradient = self._compute(batch, step)
        if not loss and not gradient:
            return []
        losses = sorted({rank for rank in self._ranks.gather(self._ranks.data_rank if loss else -1) if rank >= 0})
        if losses or self._ranks.num_data_ranks == 1:
            return losses or [0]
        return self._halve(range(self._ranks.num_data_ranks), batch, step)

    def _halve(self, ranks: range, batch: MicroBatch, step: Step[MicroBatch]) -> list[int]:
        """Those of some ranks, of which at least one has a gradient that is not finite."""
        if len(ranks) == 1 or self._alone is None:
            return list(ranks)
        found = []
        for half in (ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]):
            given = batch if self._ranks.data_rank in half else self._alone(None)
            if self._compute(given, step)[1]:
                found += self._halve(half, batch, step)
        return found

    def _compute(self, batch: MicroBatch, step: Step[MicroBatch]) -> tuple[bool, bool]:
        """Whether this rank's loss of a micro-batch is not finite, and whether any rank's loss or gradient is not."""
        weights = self._weights
        weights.zero_gradients()
        totals = accumulate(self._forward, [batch], step.denominators, weights, draws=self._draws, scale=self._scale)
        if weights.replicates:
            weights.sync_replicated_gradients()
        norm = weights.gradient_norm()
        counted = [total for name, total in totals.losses.items() if step.denominators[name]]
        loss = not all(bool(total.isfinite()) for total in counted)
        return loss, bool(self._ranks.largest(float(loss or not math.isfinite(norm))))
