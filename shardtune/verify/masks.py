"""How targets can be taken out of a sample: found by trying, as each adapter has its own way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from shardtune.batch import Sample
from shardtune.models.adapter import IGNORED, LABELS, Adapter


@dataclass(frozen=True, slots=True)
class Masking:
    """A sample without targets.

    Attributes:
        how: what was done to it, in words.
        sample: the result.
        terms: the loss terms that it no longer weighs in.
    """

    how: str
    sample: Sample
    terms: frozenset[str]


def maskings(adapter: Adapter, sample: Sample) -> list[Masking]:
    """The ways in which one field of a sample takes its targets away, told by `weights`."""
    before = adapter.weights(sample)
    found = []
    for how, changed in _attempts(sample, adapter.padding):
        try:
            after = adapter.weights(changed)
        except Exception:  # a value that the field never has
            continue
        terms = frozenset(term for term, weight in before.items() if weight and not after.get(term, 0.0))
        if terms:
            found.append(Masking(how, changed, terms))
    return found


def _attempts(sample: Sample, padding: Mapping[str, float]) -> Iterator[tuple[str, Sample]]:
    if len(sample.loss_weights):
        zeros = np.zeros_like(sample.loss_weights)
        yield "all token weights 0", replace(sample, loss_weights=zeros)
    for name, array in sample.fields.items():
        for value in _values(array):
            if name != LABELS and value == padding.get(name) and len(np.unique(array)) > 2:
                continue  # that would be no row without targets but one of padding alone, which does not come about
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
