"""A label for a text or a pair of texts: `AutoModelForSequenceClassification`.

Rows: {text, label}, or a pair such as {sentence1, sentence2, label}; with `multi_label` {text, labels: [...]}.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from shardtune.batch import Batch, LossSum, Sample
from shardtune.data.encoder import Row, RowError
from shardtune.models.adapter import TERM
from shardtune.models.tasks.classes import Classifier, LabelOptions
from shardtune.models.tasks.columns import LABEL, column_of, list_of, text_columns, texts_of, value_of
from shardtune.models.tasks.labels import NO_LABEL, distinct, index_of, is_no_label
from shardtune.models.tasks.metrics import F1_NAMES, f1_scores, installed
from shardtune.models.tasks.task import Outputs, Record
from shardtune.models.user_metrics import Prediction


class ClassifierOptions(LabelOptions):
    """Options of a sequence classifier.

    Attributes:
        multi_label: a row has any number of labels, in a list, each of which is predicted by itself.
    """

    multi_label: bool = False


class SequenceClassifier(Classifier):
    """A text, or a pair of texts, to a label."""

    Options = ClassifierOptions
    auto = AutoModelForSequenceClassification
    libraries = ("sklearn",)
    row_form = "{text, label}, or a pair such as {sentence1, sentence2, label}"

    def configure(self, config: PreTrainedConfig) -> None:
        super().configure(config)
        several = self.options.multi_label
        if several:
            self.refuse_smoothing()
        config.problem_type = "multi_label_classification" if several else "single_label_classification"

    def row_labels(self, row: Row) -> Iterable[object]:
        found = value_of(row, LABEL, "its label", self.row_form)
        if self.options.multi_label:
            return distinct(list_of(found, "the labels"))
        if isinstance(found, list | tuple | np.ndarray):
            raise RowError("the row has a list of labels; set model.options.multi_label: true")
        if is_no_label(found):
            raise RowError(f"the label is {NO_LABEL}, which marks rows without one: leave it out by data.transform")
        return [found]

    @property
    def label_form(self) -> str:
        return f"{super().label_form}, several" if self.options.multi_label else super().label_form

    def columns(self, row: Row) -> Sequence[str | None]:
        return (*text_columns(row), column_of(row, LABEL))

    def encode_text(self, row: Row) -> dict[str, Any]:
        return self.tokens(*texts_of(row, self.row_form))

    def encode_target(self, row: Row, fields: Mapping[str, Any]) -> dict[str, Any]:
        found = self.row_labels(row)
        if not self.options.multi_label:
            (label,) = found
            return {"labels": index_of(label, self.labels)}
        chosen = np.zeros(len(self.labels), np.float32)
        chosen[[index_of(label, self.labels) for label in found]] = 1
        return {"labels": chosen}

    def no_target(self, row: Row, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"labels": np.zeros(len(self.labels), np.float32) if self.options.multi_label else 0}

    def weights(self, sample: Sample) -> Mapping[str, float]:
        return {TERM: float(len(self.labels)) if self.options.multi_label else 1.0}

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return {"logits": model(**self.inputs(batch)).logits}

    def loss_of(self, outputs: Outputs, batch: Batch) -> LossSum:
        logits, labels = outputs["logits"], batch["labels"]
        if self.options.multi_label:
            total = functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
            return LossSum(total, labels.numel())
        return LossSum(functional.cross_entropy(logits, labels, reduction="sum"), len(labels))

    def predictions(self, model: nn.Module, batch: Batch) -> Iterator[Prediction]:
        labels = batch["labels"]
        weights = torch.full((len(labels),), float(labels.shape[1:].numel()), device=labels.device)  # of `weights`
        yield Prediction(self.outputs(model, batch)["logits"], labels, weights)

    def records(self, outputs: Outputs, batch: Batch) -> list[Record]:
        logits = outputs["logits"].double()
        scores = logits.sigmoid() if self.options.multi_label else logits.softmax(-1)
        targets = batch["labels"].cpu().numpy()
        return [{"scores": one, "target": target} for one, target in zip(scores.cpu().numpy(), targets, strict=True)]

    @property
    def set_metric_names(self) -> Sequence[str]:
        scores = (*F1_NAMES, *(["f1"] if len(self.labels) == 2 else [])) if installed(*self.libraries) else ()
        return ("accuracy", *scores)

    def set_metrics(self, records: Sequence[Record]) -> dict[str, float]:
        scores, targets = np.stack([one["scores"] for one in records]), np.stack([one["target"] for one in records])
        if self.options.multi_label:
            guesses = (scores > 0.5).astype(int)
            right = (guesses == targets).all(1)
        else:
            guesses = scores.argmax(1)
            right = guesses == targets
        found = {"accuracy": float(right.mean())}
        if installed(*self.libraries):
            found |= f1_scores(targets.astype(int), guesses, len(self.labels))
        return found

    def prediction(self, record: Record) -> dict[str, Any]:
        scores = {label: float(score) for label, score in zip(self.labels, record["scores"], strict=True)}
        if self.options.multi_label:
            return {"labels": [label for label, score in scores.items() if score > 0.5], "scores": scores}
        return {"label": max(scores, key=scores.__getitem__), "scores": scores}

    def examples(self) -> Sequence[Row]:
        labels = self.labels
        rows = [("a word " * (1 + number % 3), labels[number % len(labels)]) for number in range(8)]
        return [{"text": text, "label": [label] if self.options.multi_label else label} for text, label in rows]
