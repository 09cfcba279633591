"""Steps of training from a user's own iterable of batches, and what such a user's loss means as a sum."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from shardtune.batch import LossSum, Metric
from shardtune.data.loader import DataState, Step
from shardtune.data.order import derive_seed
from shardtune.errors import ConfigError, DataError, ModelError

logger = logging.getLogger(__name__)
TERM = "loss"
IGNORED = -100


@runtime_checkable
class SizedLoader(Protocol):
    """A loader that can be gone through once per epoch and knows its number of batches."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True, slots=True)
class UserBatch:
    """A batch as the user's loader made it, and the weight of its mean loss."""

    fields: Any
    weights: Mapping[str, float]
    metrics: dict[str, Metric]


def targets_of(batch: Any, shifted: bool) -> float:
    """How many targets a mean loss over this batch averages: labels that count, or rows where there are no labels.

    Args:
        batch: a mapping, whose `labels` (if any) are int64 [rows, length] with -100 for what is not a target.
        shifted: whether the model compares logits with the next label, so that the first label of a row is never a target.
    """
    if not isinstance(batch, Mapping):
        raise DataError(
            f"the loader yields a {type(batch).__name__}, not a dict of tensors",
            where="build_dataloader: collate_fn",
            remedy="let collate_fn stack the samples into one dict of tensors",
        )
    labels = batch.get("labels")
    if isinstance(labels, torch.Tensor):
        counted = labels[:, 1:] if shifted and labels.ndim > 1 else labels
        return float((counted != IGNORED).sum())
    first = next((value for value in batch.values() if isinstance(value, torch.Tensor) and value.ndim), None)
    if first is None:
        raise DataError("a batch holds no tensor, so its rows cannot be counted", where="build_dataloader")
    return float(first.shape[0])


class BatchLoader:
    """Cuts a user's loader into optimizer steps.

    Every rank goes through the same batches, and batch i of a step belongs to rank i mod ranks; a loader that is already
    sharded yields this rank's batches alone. A resumed run goes through the epoch's first batches again to find its place.

    Args:
        loader: yields batches, anew at each `iter`.
        batches_per_step: of one step, on all ranks together.
        rows_per_batch: rows of a full batch.
        rank: this data-parallel rank.
        num_ranks: data-parallel ranks.
        sharded: whether the loader yields this rank's batches alone.
        shifted: whether the model shifts labels itself.
        seed: of the run; a loader that shuffles draws from it and the epoch.
    """

    def __init__(
        self,
        loader: SizedLoader,
        *,
        batches_per_step: int,
        rows_per_batch: int,
        rank: int = 0,
        num_ranks: int = 1,
        sharded: bool = False,
        shifted: bool = True,
        seed: int = 0,
    ) -> None:
        self._loader = loader
        self._per_step = batches_per_step
        self._rows = rows_per_batch
        self._rank, self._num_ranks = rank, num_ranks
        self._sharded = sharded
        self._shifted = shifted
        self._seed = seed

    @classmethod
    def of(
        cls,
        loader: Any,
        info: Mapping[str, Any],
        *,
        global_batch_size: int | None,
        micro_batch_size: int | None,
        rank: int,
        num_ranks: int,
        shifted: bool,
        seed: int,
    ) -> BatchLoader:
        """A user's loader under a recipe; sizes that do not divide are refused with the nearest that do."""
        if not isinstance(loader, SizedLoader):
            raise DataError(
                f"build_dataloader returned a {type(loader).__name__} without a length",
                remedy="return a DataLoader over a map-style data set",
            )
        if global_batch_size is None or micro_batch_size is None:
            raise ConfigError(
                "a worker with a loader of its own needs actor.global_batch_size and actor.micro_batch_size in rows"
            )
        unit = micro_batch_size * num_ranks
        if global_batch_size % unit:
            below, above = global_batch_size // unit * unit, -(-global_batch_size // unit) * unit
            near = f"{below} or {above}" if below else f"{above}"
            raise ConfigError(
                f"actor.global_batch_size = {global_batch_size} is not divisible by actor.micro_batch_size = "
                f"{micro_batch_size} times {num_ranks} ranks",
                remedy=f"set actor.global_batch_size to {near}",
            )
        return cls(
            loader,
            batches_per_step=global_batch_size // micro_batch_size,
            rows_per_batch=micro_batch_size,
            rank=rank,
            num_ranks=num_ranks,
            sharded=bool(info.get("sharded")),
            shifted=shifted,
            seed=seed,
        )

    @property
    def _take(self) -> int:
        """Batches of one step that this rank's loader yields."""
        return self._per_step // self._num_ranks if self._sharded else self._per_step

    @property
    def rows_per_epoch(self) -> int:
        return len(self._loader) * self._rows

    def num_steps(self, epoch: int) -> int:
        return -(-len(self._loader) // self._take)

    def steps(self, state: DataState) -> Iterator[Step]:
        """Steps without end from `state` on."""
        epoch, done = state.epoch, state.rows_consumed // self._rows
        while True:
            torch.manual_seed(derive_seed(self._seed, epoch, "loader"))
            batches = iter(self._loader)
            if done:
                logger.info("going through the first %d batches of epoch %d again to find the place", done, epoch)
                next(islice(batches, done - 1, None), None)
            empty = True
            while taken := list(islice(batches, self._take)):
                empty = False
                before, done = done, done + len(taken)
                ended = done >= len(self._loader)
                after = DataState(epoch + 1, 0) if ended else DataState(epoch, done * self._rows)
                yield self._step(taken, DataState(epoch, before * self._rows), after)
            if empty and not done:
                raise DataError("the loader yields no batch", where="build_dataloader")
            epoch, done = epoch + 1, 0

    def _step(self, batches: list[Any], state: DataState, after: DataState) -> Step:
        weights = [targets_of(batch, self._shifted) for batch in batches]
        count = len(batches) if self._sharded else -(-len(batches) // self._num_ranks)
        mine = []
        for turn in range(count):
            number = turn if self._sharded else turn * self._num_ranks + self._rank
            # A rank without a batch in the last turn repeats the step's first one with weight 0.
            weight = weights[number] if number < len(batches) else 0.0
            mine.append(UserBatch(batches[number if number < len(batches) else 0], {TERM: weight}, {}))
        return Step(
            state=state,
            after=after,
            rows=np.empty(0, dtype=np.int64),
            micro_batches=tuple(mine),
            denominators={TERM: sum(weights)},
            num_tokens=sum(_tokens(batch) for batch in batches),
            num_targets=sum(weights),
        )

    def losses(self, output: Any, batch: UserBatch) -> dict[str, LossSum]:
        """A user's output as a sum: a mean loss counts as often as it has targets."""
        weight = batch.weights[TERM]
        if isinstance(output, tuple) and not isinstance(output, LossSum) and isinstance(output[-1], Mapping):
            output, metrics = output
            batch.metrics.update({name: _metric(value, weight) for name, value in metrics.items()})
        if isinstance(output, LossSum):
            return {TERM: output}
        if isinstance(output, (list, tuple)):
            output = torch.stack([torch.as_tensor(entry) for entry in output]).mean()
        if not isinstance(output, torch.Tensor) or output.numel() != 1 or output.grad_fn is None:
            raise ModelError(
                f"get_train_model_output returned {_describe(output)}, not a scalar loss with a graph",
                remedy="return outputs.loss",
            )
        return {TERM: LossSum(output.reshape(()) * weight if weight else output.reshape(()) * 0.0, weight)}


def _metric(value: Any, weight: float) -> Metric:
    return value if isinstance(value, Metric) else Metric(float(value) * weight, weight)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}{'' if value.grad_fn else ' without a graph'}"
    return f"a {type(value).__name__}"


def _tokens(batch: Any) -> int:
    """Input tokens without padding where the batch tells, otherwise rows."""
    if isinstance(batch, Mapping):
        mask, ids = batch.get("attention_mask"), batch.get("input_ids")
        if isinstance(mask, torch.Tensor):
            return int((mask != 0).sum())
        if isinstance(ids, torch.Tensor):
            return ids.numel()
    return int(targets_of(batch, False))
