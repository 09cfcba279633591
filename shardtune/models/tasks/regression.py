"""A number for a text or a pair of texts: `AutoModelForSequenceClassification` with one output.

Rows: {text, label} or {text, score}, or a pair such as {sentence1, sentence2, score}.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from shardtune.batch import Batch, LossSum, Sample
from shardtune.data.encoder import Row
from shardtune.models.adapter import TERM
from shardtune.models.tasks.columns import SCORE, column_of, number_of, text_columns, texts_of, value_of
from shardtune.models.tasks.metrics import correlations, installed
from shardtune.models.tasks.task import Outputs, Record, TextTask
from shardtune.models.user_metrics import Prediction


class Regression(TextTask):
    """A text, or a pair of texts, to a number; the loss is the mean squared error."""

    auto = AutoModelForSequenceClassification
    libraries = ("scipy",)
    row_form = "{text, label} with a number, or a pair such as {sentence1, sentence2, score}"

    def configure(self, config: PreTrainedConfig) -> None:
        self.refuse_smoothing()
        config.num_labels = 1
        config.problem_type = "regression"

    def columns(self, row: Row) -> Sequence[str | None]:
        return (*text_columns(row), column_of(row, SCORE))

    def encode_text(self, row: Row) -> dict[str, Any]:
        return self.tokens(*texts_of(row, self.row_form))

    def encode_target(self, row: Row, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"target": np.float64(number_of(value_of(row, SCORE, "its number", self.row_form), "the label"))}

    def no_target(self, row: Row, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"target": np.float64(0)}

    def weights(self, sample: Sample) -> Mapping[str, float]:
        return {TERM: 1.0}

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return {"value": model(**self.inputs(batch)).logits.squeeze(-1)}

    def loss_of(self, outputs: Outputs, batch: Batch) -> LossSum:
        guesses = outputs["value"]
        return LossSum(functional.mse_loss(guesses, batch["target"].to(guesses), reduction="sum"), len(guesses))

    def predictions(self, model: nn.Module, batch: Batch) -> Iterator[Prediction]:
        guesses = self.outputs(model, batch)["value"]
        yield Prediction(guesses, batch["target"].to(guesses), torch.ones_like(guesses))

    def records(self, outputs: Outputs, batch: Batch) -> list[Record]:
        pairs = zip(outputs["value"].double().tolist(), batch["target"].tolist(), strict=True)
        return [{"value": value, "target": target} for value, target in pairs]

    @property
    def set_metric_names(self) -> Sequence[str]:
        return ("rmse", "mae", *(("spearman", "pearson") if installed(*self.libraries) else ()))

    def set_metrics(self, records: Sequence[Record]) -> dict[str, float]:
        values, targets = (np.array([one[name] for one in records]) for name in ("value", "target"))
        errors = values - targets
        found = {"rmse": float(np.sqrt((errors**2).mean())), "mae": float(np.abs(errors).mean())}
        return found | (correlations(targets, values) if installed(*self.libraries) else {})

    def prediction(self, record: Record) -> dict[str, Any]:
        return {"value": record["value"]}

    def examples(self) -> Sequence[Row]:
        return [{"text": "a word " * (1 + number % 3), "label": 0.5 * number} for number in range(8)]
