"""The weights of batches of a user-defined loader in the loss, determined before the loss is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from numbers import Real

import torch

from shardtune.batch import IGNORED, LossSum
from shardtune.data.user_loader.batch import LABELS, targets_of
from shardtune.errors import ModelError
from shardtune.parallel.ranks import Ranks
from shardtune.training.train_output import TERM, entry_mean, split_metrics


class BatchWeights:
    """The weight of each batch in each term of the loss, determined before the loss is computed.

    A worker may declare it; otherwise it is the number of targets that a mean loss averages. Whether the first label
    of a row is a target depends on the model: one that compares each logit with the next label never uses it.
    That is measured, once, on the first batch that has such a label: with the first labels alone such a model has the
    same loss as with none.

    Args:
        declared: maps a batch to the weight of each term, or to None if the worker declares nothing.
        measure: maps a batch to the loss of the train method, without a gradient; to None if that fails.
            All ranks call it together.
        ranks: of the run.
    """

    def __init__(
        self,
        declared: Callable[[object], Mapping[str, float] | None],
        measure: Callable[[object], float | None],
        ranks: Ranks,
    ) -> None:
        self._declared = declared
        self._measure = measure
        self._ranks = ranks
        self._shifted: bool | None = None

    def __call__(self, batches: Sequence[object]) -> list[Mapping[str, float]]:
        """The weights of batches, at least one; all ranks call it together."""
        declared = [self._declared(batch) for batch in batches]
        given = [_checked(weights) for weights in declared if weights is not None]
        if given:
            return _same_terms(given)
        if self._shifted is None:
            self._find_shift(batches)
        return [{TERM: targets_of(batch, shifted=bool(self._shifted))} for batch in batches]

    def _find_shift(self, batches: Sequence[object]) -> None:
        """Determine the shift from the first batch with first labels; before, both ways of counting agree."""
        labelled = next((batch for batch in batches if has_first_labels(batch)), None)
        if not self._ranks.largest(float(labelled is not None)):
            return
        probed = batches[0] if labelled is None else labelled
        one, other = (self._measure(_with_labels(probed, 0, keep)) for keep in (1, 0))
        if self._ranks.largest(float(one is None or other is None)):  # the task fails with so few targets
            one, other = self._measure(probed), self._measure(_with_labels(probed, 1, None))
        used = labelled is not None and not _same_number(one, other)
        self._shifted = not self._ranks.largest(float(used))


def has_first_labels(batch: object) -> bool:
    """Whether some row's first label counts, in a batch with labels for each place of a row."""
    labels = batch.get(LABELS) if isinstance(batch, Mapping) else None
    return isinstance(labels, torch.Tensor) and labels.ndim > 1 and bool((labels[:, :1] != IGNORED).any())


def _same_number(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


def _with_labels(batch: object, start: int, stop: int | None) -> object:
    """The batch with only these labels of each row; unchanged without labels."""
    if not isinstance(batch, Mapping) or not isinstance(labels := batch.get(LABELS), torch.Tensor):
        return batch
    masked = torch.full_like(labels, IGNORED)
    masked[:, start:stop] = labels[:, start:stop]
    # Keep the type: a tokenizer's batch has methods.
    changed: MutableMapping[object, object] = copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
    changed[LABELS] = masked
    return changed


def _checked(weights: object) -> Mapping[str, float]:
    if not isinstance(weights, Mapping) or not weights:
        raise ModelError(
            f"loss_weights returned {weights!r}, not a dict of numbers",
            where="loss_weights",
            remedy="return {term: how much this batch weighs in it} for each term of the loss",
        )
    for name, value in weights.items():
        is_number = isinstance(value, (Real, torch.Tensor)) and not isinstance(value, bool)
        if not is_number or not 0 <= float(value) < math.inf:
            raise ModelError(
                f"loss_weights returned {value!r} for the term {name!r}, not a number of at least 0",
                where="loss_weights",
                remedy="return how much this batch weighs in the term: its targets, or 0",
            )
    return {str(name): float(value) for name, value in weights.items()}


def _same_terms(given: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    for weights in given:
        if set(weights) != set(given[0]):
            raise ModelError(
                f"loss_weights gives the terms {sorted(given[0])} for one batch and {sorted(weights)} for another",
                where="loss_weights",
                remedy="give every batch all terms; one that has none of a term's targets weighs 0 in it",
            )
    return list(given)


def measured(returned: object) -> float:
    """The loss that a train method returned, as a number; NaN without one."""
    output = split_metrics(returned)[0]
    if isinstance(output, LossSum):
        entries: Sequence[object] = [output.total]
    elif isinstance(output, Mapping):
        entries = [term.total for term in output.values() if isinstance(term, LossSum)]
    else:
        entries = output if isinstance(output, (list, tuple)) else [output]
    tensors = [entry for entry in entries if isinstance(entry, torch.Tensor) and entry.numel()]
    return math.fsum(entry_mean(entry).item() for entry in tensors) if tensors else math.nan
