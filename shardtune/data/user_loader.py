"""Steps of training from a user's own iterable of batches, and what such a user's loss means as a sum."""

from __future__ import annotations

import logging
import random
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
from shardtune.parallel.mesh import Ranks

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
        shifted: whether the model compares logits with the next label, so that a row's first label is never a target.
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

    Every rank goes through the same batches, and batch i of a step belongs to rank i mod ranks; a loader that is
    already sharded yields this rank's batches alone, on some ranks perhaps fewer. A resumed run goes through the
    epoch's first batches again to find its place.

    Args:
        loader: yields batches, anew at each `iter`.
        ranks: over which a step's batches are spread; every rank makes its loader and goes through it alike.
        batches_per_rank: of one step, on each rank.
        rows_per_batch: rows of a full batch.
        sharded: whether the loader yields this rank's batches alone.
        shifted: whether the model shifts labels itself.
        seed: of the run; what a loader draws is a function of it, the epoch and the batch's number.
    """

    def __init__(
        self,
        loader: SizedLoader,
        ranks: Ranks,
        *,
        batches_per_rank: int,
        rows_per_batch: int,
        sharded: bool = False,
        shifted: bool = True,
        seed: int = 0,
    ) -> None:
        self._loader = loader
        self._ranks = ranks
        self._rows = rows_per_batch
        self._sharded = sharded
        self._shifted = shifted
        self._seed = seed
        # In turns: a batch of the loader each, on all ranks at once where it is sharded.
        self._turns_per_step = batches_per_rank if sharded else batches_per_rank * ranks.world_size
        self._rows_per_turn = rows_per_batch * ranks.world_size if sharded else rows_per_batch
        self._turns = int(ranks.largest(len(loader))) if sharded else len(loader)
        self._spare: Any = None

    @classmethod
    def of(
        cls,
        loader: Any,
        info: Mapping[str, Any],
        *,
        ranks: Ranks,
        global_batch_size: int | None,
        micro_batch_size: int | None,
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
        unit = micro_batch_size * ranks.world_size
        if global_batch_size % unit:
            below, above = global_batch_size // unit * unit, -(-global_batch_size // unit) * unit
            near = f"{below} or {above}" if below else f"{above}"
            raise ConfigError(
                f"actor.global_batch_size = {global_batch_size} is not divisible by actor.micro_batch_size = "
                f"{micro_batch_size} times {ranks.world_size} ranks",
                remedy=f"set actor.global_batch_size to {near}",
            )
        return cls(
            loader,
            ranks,
            batches_per_rank=global_batch_size // unit,
            rows_per_batch=micro_batch_size,
            sharded=bool(info.get("sharded")),
            shifted=shifted,
            seed=seed,
        )

    @property
    def rows_per_epoch(self) -> int:
        return self._turns * self._rows_per_turn

    def num_steps(self, epoch: int) -> int:
        return -(-self._turns // self._turns_per_step)

    def steps(self, state: DataState) -> Iterator[Step]:
        """Steps without end from `state` on."""
        epoch, done = state.epoch, state.rows_consumed // self._rows_per_turn
        while True:
            batches = self._batches(epoch, done)
            while done < self._turns:
                turns = min(self._turns_per_step, self._turns - done)
                taken = list(islice(batches, turns))
                if not self._sharded and len(taken) < turns:
                    raise DataError(
                        f"the loader ended after {done + len(taken)} batches, its length is {self._turns}",
                        where="build_dataloader",
                        remedy="let __len__ say how many batches the loader yields",
                    )
                before, done = done, done + turns
                after = DataState(epoch + 1, 0) if done == self._turns else self._state(epoch, done)
                yield self._step(taken, turns, self._state(epoch, before), after)
            epoch, done = epoch + 1, 0

    def _state(self, epoch: int, done: int) -> DataState:
        return DataState(epoch, done * self._rows_per_turn)

    def _batches(self, epoch: int, done: int) -> Iterator[Any]:
        """An epoch's batches from number `done` on; what they draw depends on their number, not on where it begins."""
        _seed_all(derive_seed(self._seed, epoch, "loader"))
        batches = iter(self._loader)
        if done:
            logger.info("going through the first %d batches of epoch %d again to find the place", done, epoch)
        number = 0
        while True:
            _seed_all(derive_seed(self._seed, epoch, number, "batch"))
            try:
                batch = next(batches)
            except StopIteration:
                break
            self._spare = batch
            if number >= done:
                yield batch
            number += 1
        if self._spare is None:
            raise DataError("the loader yields no batch", where="build_dataloader")

    def _step(self, batches: list[Any], turns: int, state: DataState, after: DataState) -> Step:
        """A step of the batches taken in so many turns, of which a sharded loader may have fewer."""
        weights = [targets_of(batch, self._shifted) for batch in batches]
        if self._sharded:
            mine = list(zip(batches, weights, strict=True))
            mine += [(None, 0.0)] * (turns - len(mine))
        else:
            dealt = [*zip(batches, weights, strict=True)][self._ranks.rank :: self._ranks.world_size]
            mine = dealt + [(None, 0.0)] * (-(-turns // self._ranks.world_size) - len(dealt))
        # A mean over no targets is 0 / 0: a batch without any repeats another with weight 0, as does a missing batch.
        counted = next((batch for batch, weight in zip(batches, weights, strict=True) if weight), self._spare)
        micro_batches = [UserBatch(batch if weight else counted, {TERM: weight}, {}) for batch, weight in mine]
        tokens = float(sum(_tokens(batch) for batch in batches))
        total, tokens = self._ranks.sum([sum(weights), tokens]) if self._sharded else (sum(weights), tokens)
        return Step(
            state=state,
            after=after,
            rows=np.empty(0, dtype=np.int64),
            micro_batches=tuple(micro_batches),
            denominators={TERM: total},
            num_tokens=int(tokens),
            num_targets=total,
        )

    def losses(self, output: Any, batch: UserBatch) -> dict[str, LossSum]:
        """A user's output as a sum: a mean loss counts as often as it has targets."""
        weight = batch.weights[TERM]
        if isinstance(output, tuple) and not isinstance(output, LossSum) and isinstance(output[-1], Mapping):
            output, metrics = output
            if weight:
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
        return {TERM: LossSum(output.reshape(()) * weight, weight)}


def _metric(value: Any, weight: float) -> Metric:
    return value if isinstance(value, Metric) else Metric(float(value) * weight, weight)


def _seed_all(seed: int) -> None:
    """Set every generator that a user's loader may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


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
