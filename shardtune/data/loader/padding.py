"""Rows of tokens padded side by side, under HALOs' names: one micro-batch as tensors [rows, tokens]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardtune.batch import IGNORED, Batch, Sample
from shardtune.data.loader.packing import stack
from shardtune.data.loader.step_loader import Companion

INPUT_IDS = "target_combined_input_ids"
ATTENTION_MASK = "target_combined_attention_mask"
LABELS = "target_labels"
WEIGHTS = "target_weights"
PADDING: Mapping[str, float] = {INPUT_IDS: 0, ATTENTION_MASK: 0, LABELS: IGNORED, WEIGHTS: 0.0}
"""The fields of a batch, [rows, tokens] each, and the padding values of rows that are shorter than the longest."""


class Padding:
    """Makes a micro-batch of rows of tokens side by side."""

    def collate(self, samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float]) -> Batch:
        return stack([_with_labels(sample) for sample in samples], rows, weights, PADDING)

    def filler(self, sample: Sample) -> Sample:
        """The row itself: a mean over its targets is a number, which counts 0 times; a mean over none might not be."""
        return sample

    def companion(self) -> Companion | None:
        return None


def _with_labels(sample: Sample) -> Sample:
    """A row of tokens as the fields of a batch."""
    weights = np.asarray(sample.loss_weights, np.float32).copy()
    weights[:1] = 0.0  # nothing comes before the first token
    ids = np.asarray(sample.input_ids, np.int64)
    fields = {
        INPUT_IDS: ids,
        ATTENTION_MASK: np.ones_like(ids),
        LABELS: np.where(weights != 0, ids, IGNORED),
        WEIGHTS: weights,
    }
    return Sample(fields=fields, size=len(ids))


@dataclass(frozen=True, slots=True)
class AnswerRows:
    """Answers behind their prompts as rows of a data set, in which the answers alone are targets.

    Attributes:
        term: the loss term that targets weigh in.
        prompts: int32 [length] each.
        answers: tokens.
    """

    term: str
    prompts: Sequence[np.ndarray]
    answers: Sequence[Sequence[int]]

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(prompt) + len(answer) for prompt, answer in zip(self.prompts, self.answers, strict=True)])

    @property
    def term_weights(self) -> Mapping[str, np.ndarray]:
        return {self.term: np.array([float(len(answer)) for answer in self.answers])}

    def field_counts(self, name: str) -> np.ndarray:
        """There are no fields."""
        return np.zeros(len(self.prompts), np.int64)

    def row(self, index: int) -> Sample:
        prompt, answer = self.prompts[index], np.asarray(self.answers[index], np.int32)
        weights = np.concatenate([np.zeros(len(prompt), np.float32), np.ones(len(answer), np.float32)])
        return Sample(np.concatenate([np.asarray(prompt, np.int32), answer]), weights)
