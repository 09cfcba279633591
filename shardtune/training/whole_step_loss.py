"""A loss over all rows of a step: outputs are gathered from all ranks, and gradients sent back to each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from shardtune.batch import Batch, LossSum, Metric
from shardtune.batch.seeds import derive_seed, seed_generators
from shardtune.errors import ModelError
from shardtune.launch.progress import PROGRESS
from shardtune.models.adapter import named
from shardtune.models.whole_step_adapter import WholeStepAdapter
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights
from shardtune.training.step import ROW_DRAWS, Totals, check_weights, objective

Outputs = Mapping[str, torch.Tensor]


class WholeStep:
    """Computes a step's loss from the outputs of all its rows.

    Every micro-batch is computed without a graph; the outputs of all of them, on all ranks, are concatenated; every
    rank computes the loss and its gradient with respect to the outputs; then each micro-batch is computed once more,
    with the same random draws and from the same buffers, and its part of that gradient is backpropagated. So memory is
    that of one micro-batch, and the gradient that of one process with one micro-batch (Gao et al., 2021,
    arXiv:2101.06983).

    Args:
        adapter: whose loss it is.
        ranks: of the run.
    """

    def __init__(self, adapter: WholeStepAdapter, ranks: Ranks) -> None:
        self._adapter = adapter
        self._ranks = ranks

    @property
    def rows_per_evaluation(self) -> int:
        """Rows that one loss of evaluation compares."""
        return self._adapter.evaluation_rows

    def _step_loss(self, outputs: Outputs) -> dict[str, LossSum]:
        return named(self._adapter.step_loss(outputs))

    def accumulate(
        self,
        forward: Callable[..., object],
        micro_batches: Sequence[Batch],
        denominators: Mapping[str, float],
        weights: Weights,
        *,
        draws: tuple[int, int, int],
        scale: float,
    ) -> Totals:
        """As `step.accumulate`, with a `forward` that returns outputs; only rank 0 has totals, as they are summed."""
        found = []
        seed, step, rank = draws
        micro_batches = [replace(batch, key=derive_seed(seed, step, ROW_DRAWS)) for batch in micro_batches]
        buffers = weights.copy_buffers() if weights.has_buffers else {}
        unsaved = weights.keep_unsaved_buffers()
        with torch.no_grad():
            for number, batch in enumerate(micro_batches):
                PROGRESS.beats += 1
                PROGRESS.micro_batch = number + 1
                seed_generators(derive_seed(seed, step, number, rank, "train"))
                found.append(_real(forward(batch), batch))
        mine = _joined(found)
        everyone, start = self._gather(mine)
        # Integer tensors, such as the label of each row, are gathered with the others and have no gradient.
        leaves = {name: tensor.requires_grad_() for name, tensor in everyone.items() if tensor.is_floating_point()}
        losses = self._step_loss(everyone)
        check_weights(losses, denominators)
        whole = objective(losses, denominators, scale)
        slopes = dict(zip(leaves, torch.autograd.grad(whole, list(leaves.values()), allow_unused=True), strict=True))
        unsaved.restore()
        if buffers:
            weights.restore_buffers(buffers)  # the second forwards change them, as those of a step that has one each
        for number, batch in enumerate(micro_batches):
            PROGRESS.beats += 1
            PROGRESS.micro_batch = number + 1
            weights.begin_micro_batch(last=number == len(micro_batches) - 1)
            seed_generators(derive_seed(seed, step, number, rank, "train"))
            outputs = _checked(forward(batch), batch)
            _backward(outputs, slopes, start, batch)
            start += batch.num_rows
        share = 1.0 if self._ranks.is_main else 0.0
        return Totals({name: loss.total.detach().double() * share for name, loss in losses.items()}, {})

    def evaluate(
        self, forward: Callable[..., object], blocks: Iterator[Sequence[Batch]], *, poll: Callable[[], None]
    ) -> dict[str, Metric]:
        """The loss of each block of rows, computed as for a step, and summed: `loss/<term>`, the same on every rank."""
        sums: dict[str, Metric] = {}
        with torch.no_grad():
            for block in blocks:
                poll()
                everyone, _ = self._gather(_joined([_real(forward(batch), batch) for batch in block]))
                for name, loss in self._step_loss(everyone).items():
                    key = f"loss/{name}"
                    sums[key] = sums.get(key, Metric(0.0, 0.0)) + Metric(float(loss.total), loss.weight)
        return sums

    def _gather(self, mine: Outputs) -> tuple[dict[str, torch.Tensor], int]:
        """The outputs of all ranks in order, and the offset of this rank's."""
        rows = len(next(iter(mine.values())))
        if self._ranks.mesh is None:
            return {name: tensor.clone() for name, tensor in mine.items()}, 0
        # Ranks that work on the same rows have the same outputs: of each such group the first counts.
        together = self._ranks.layout.model_ranks
        counts = self._ranks.gather(rows)[::together]
        largest = max(counts)
        everyone = {}
        for name, tensor in mine.items():
            padded = tensor.new_zeros((largest, *tensor.shape[1:]))
            padded[:rows] = tensor
            parts = [torch.empty_like(padded) for _ in range(self._ranks.world_size)]
            dist.all_gather(parts, padded)
            counted = zip(parts[::together], counts, strict=True)
            everyone[name] = torch.cat([part[:count] for part, count in counted])
        return everyone, sum(counts[: self._ranks.data_rank])


def _checked(outputs: object, batch: Batch) -> Outputs:
    """What `WholeStepAdapter.outputs` returned for a micro-batch.

    Raises:
        ModelError: it is not a dict of tensors with one entry per row.
    """
    if not isinstance(outputs, Mapping) or not outputs:
        raise ModelError(
            f"outputs returned a {type(outputs).__name__}, not a dict of tensors",
            where="WholeStepAdapter.outputs",
            remedy='return {"name": tensor of shape [rows, …], …}',
        )
    for name, tensor in outputs.items():
        shape = f"shape {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"type {type(tensor).__name__}"
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0 or len(tensor) != len(batch.rows):
            raise ModelError(
                f"the output {name!r} has {shape}, the micro-batch {len(batch.rows)} rows",
                where="WholeStepAdapter.outputs",
                remedy="give each output one entry per row in its first dimension (tensor.expand for a scalar)",
            )
    return outputs


def _real(outputs: object, batch: Batch) -> dict[str, torch.Tensor]:
    """The outputs of the rows that count, without a graph."""
    return {name: tensor.detach()[: batch.num_rows] for name, tensor in _checked(outputs, batch).items()}


def _joined(pieces: Sequence[Outputs]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _backward(outputs: Outputs, slopes: Mapping[str, torch.Tensor | None], start: int, batch: Batch) -> None:
    """Backpropagate this micro-batch's part of the gradient; a filler's is zero, but its collectives must run."""
    stop = start + batch.num_rows
    terms = []
    for name, tensor in outputs.items():
        if not tensor.requires_grad:
            continue
        slope = slopes[name]
        if slope is None or batch.is_filler:
            terms.append((tensor * 0.0).sum())
        else:
            terms.append((tensor * slope[start:stop]).sum())
    if not terms:
        raise ModelError(
            f"no output has a graph: {', '.join(outputs)}",
            where="WholeStepAdapter.outputs",
            remedy="return what model(…) computes; .detach() and torch.no_grad() cut the graph",
        )
    sum(terms[1:], terms[0]).backward()
