"""A text classifier on an encoder of transformers, with named labels in the data.

The pretrained encoder comes from `model.model_path`; the head on it is new. `final/` is a directory that
`AutoModelForSequenceClassification.from_pretrained` loads, with the names of the labels in its config. Instead of
`metrics`, this adapter gives `predictions`: what the model says of each target, before any loss. Functions that the
recipe names work on these: `eval.metrics: [file.py:function]`, as below, and `loss: file.py:function`.
"""

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel
from transformers import AutoConfig, AutoModelForSequenceClassification

from shardtune import Adapter, LossSum, Prediction, Sample


class Options(BaseModel):
    labels: list[str]  # without a default: the recipe has to name them


class SequenceClassifier(Adapter):
    Options = Options
    padding = {"input_ids": 0}  # fields that differ in length, and what they are filled with

    def build(self):
        config = AutoConfig.from_pretrained(
            self.recipe.actor.model.model_path,
            id2label=dict(enumerate(self.options.labels)),
            label2id={label: number for number, label in enumerate(self.options.labels)},
        )
        return AutoModelForSequenceClassification.from_config(config)

    def initial_weights(self):
        """The encoder's weights are read from model_path; those of the head are what its constructor draws."""
        return {"bert": self.recipe.actor.model.model_path, "classifier": None}

    def encode(self, row):
        """A label that is not among the options raises ValueError, which is reported with file and row."""
        ids = self.tokenizer(row["text"])["input_ids"]
        return Sample(fields={"input_ids": ids, "labels": np.array(self.options.labels.index(row["label"]))})

    def _logits(self, model, batch):
        return model(input_ids=batch["input_ids"], attention_mask=batch.mask("input_ids")).logits

    def loss(self, model, batch):
        total = F.cross_entropy(self._logits(model, batch), batch["labels"], reduction="sum")
        return LossSum(total, len(batch["labels"]))

    def predictions(self, model, batch):
        labels = batch["labels"]
        yield Prediction(self._logits(model, batch), labels, torch.ones_like(labels, dtype=torch.float32))

    def examples(self):
        labels = self.options.labels
        return [{"text": "a word " * (1 + n % 3), "label": labels[n % len(labels)]} for n in range(8)]


def accuracy(outputs, targets, weights):
    """For `eval.metrics`: (sum, weight) of some predictions; called piece by piece, added up over all."""
    return ((outputs.argmax(-1) == targets) * weights).sum(), weights.sum()
