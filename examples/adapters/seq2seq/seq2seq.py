"""An encoder-decoder (T5, BART and the like): text in, text out.

The loss is summed over the tokens of the answers and divided once by their number in the whole step, so that every
token counts the same. (The loss that the model returns when it is given labels is a mean over one padded micro-batch;
means of those give the tokens of short answers more weight.) Labels are padded with -100, which cross_entropy leaves
out and which the default `weights` leaves out too: it counts the entries of a field `labels` that are not -100.
"""

import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from shardtune import Adapter, LossSum, Sample


class Seq2Seq(Adapter):
    padding = {"input_ids": 0, "labels": -100}  # fields that differ in length, and what they are filled with

    def build(self):
        config = AutoConfig.from_pretrained(self.recipe.actor.model.model_path)
        return AutoModelForSeq2SeqLM.from_config(config)

    def encode(self, row):
        """The tokenizer ends both texts with its end token, as T5's does: the model learns where to stop."""
        tokens = {name: self.tokenizer(row[name])["input_ids"] for name in ("source", "target")}
        return Sample(fields={"input_ids": tokens["source"], "labels": tokens["target"]})

    def _logits(self, model, batch):
        """[rows, tokens, vocabulary]: given labels, the model makes its decoder's inputs of them, shifted by one.

        Without `use_cache=False` it would keep keys and values, which is a waste and breaks gradient checkpointing.
        """
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch.mask("input_ids")}
        return model(**inputs, labels=batch["labels"], use_cache=False).logits

    def loss(self, model, batch):
        logits, labels = self._logits(model, batch), batch["labels"]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return LossSum(total, int((labels != -100).sum()))

    def metrics(self, model, batch):
        right = self._logits(model, batch).argmax(-1) == batch["labels"]
        return {"token_accuracy": (int(right.sum()), int((batch["labels"] != -100).sum()))}

    def examples(self):
        words = ["two", "one", "nine", "six", "ten"]
        return [{"source": " ".join(words[:n]), "target": " ".join(words[-n:])} for n in range(1, 6)]
