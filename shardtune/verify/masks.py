"""Ways to take targets out of a sample, found by trial, as each adapter has its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from shardtune.batch import IGNORED, Sample
from shardtune.models.adapter import LABELS

Weigh = Callable[[Sample], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Masking:
    """A sample without targets.

    Attributes:
        how: the change, for messages.
        sample: the result.
        terms: the loss terms in which it no longer has a weight.
    """

    how: str
    sample: Sample
    terms: frozenset[str]


def maskings(weigh: Weigh, sample: Sample, padding: Mapping[str, float]) -> list[Masking]:
    """The ways in which one field of a sample removes its targets, judged by its weights.

    Args:
        weigh: a sample to its weight in each loss term.
        sample: to be masked.
        padding: the adapter's.
    """
    before = weigh(sample)
    found = []
    for how, changed in _attempts(sample, padding):
        try:
            after = weigh(changed)
        except Exception:  # a value that the field cannot have
            continue
        terms = frozenset(term for term, weight in before.items() if weight and not after.get(term, 0.0))
        if terms:
            found.append(Masking(how, changed, terms))
    return found


def partial_maskings(weigh: Weigh, sample: Sample, padding: Mapping[str, float]) -> list[Masking]:
    """The ways in which the first half of a field removes some of a sample's targets and leaves others."""
    before = weigh(sample)
    found = []
    for masking in maskings(weigh, sample, padding):
        fields = dict(sample.fields)
        for name, array in masking.sample.fields.items():
            if array is not sample.fields[name] and array.ndim:
                half = len(array) // 2
                fields[name] = np.concatenate([array[:half], sample.fields[name][half:]])
        changed = replace(sample, fields=fields)
        after = weigh(changed)
        terms = frozenset(term for term in masking.terms if 0 < after[term] < before[term])
        if terms and sample.fields:
            found.append(Masking(masking.how.replace(" all ", " half "), changed, terms))
    return found


def _attempts(sample: Sample, padding: Mapping[str, float]) -> Iterator[tuple[str, Sample]]:
    if len(sample.loss_weights):
        zeros = np.zeros_like(sample.loss_weights)
        yield "all token weights 0", replace(sample, loss_weights=zeros)
    for name, array in sample.fields.items():
        for value in _values(array):
            if name != LABELS and value == padding.get(name) and len(np.unique(array)) > 2:
                continue  # all padding: such a row does not occur, so it is not a row without targets
            fields = {**sample.fields, name: np.full_like(array, value)}
            yield f"{name} all {value:g}", replace(sample, fields=fields)


def _values(array: np.ndarray) -> list[float]:
    if array.dtype.kind == "f":
        return [0.0, float("nan")]
    if array.dtype.kind == "i":
        return [IGNORED, 0]
    return [0]


def halves(sample: Sample) -> tuple[Sample, Sample] | None:
    """A sample of tokens with the first half of its targets, and with the others; None where it has fewer than two."""
    targets = np.flatnonzero(sample.loss_weights[1:]) + 1 if len(sample.loss_weights) else np.empty(0, np.int64)
    if len(targets) < 2:
        return None
    first, second = sample.loss_weights.copy(), sample.loss_weights.copy()
    first[targets[len(targets) // 2 :]] = 0.0
    second[targets[: len(targets) // 2]] = 0.0
    return replace(sample, loss_weights=first), replace(sample, loss_weights=second)


def without_last_target(sample: Sample, vocabulary: Mapping[int, int]) -> tuple[Sample, Sample] | None:
    """A sample whose last token is no target, and the same with another token there."""
    if len(sample.input_ids) < 3 or not sample.loss_weights[1:-1].any():
        return None
    weights, tokens = sample.loss_weights.copy(), sample.input_ids.copy()
    weights[-1] = 0.0
    tokens[-1] = vocabulary[int(tokens[-1])]
    masked = replace(sample, loss_weights=weights)
    return masked, replace(masked, input_ids=tokens)
