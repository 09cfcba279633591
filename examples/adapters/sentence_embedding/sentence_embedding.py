"""A sentence-embedding model, trained to find the passage that belongs to a question among those of the whole step.

Such a contrastive loss (InfoNCE: van den Oord et al., 2018, arXiv:1807.03748) is no sum over rows: every other row is
a wrong answer. A `WholeStepAdapter` says what a micro-batch gives, `outputs`, and what the loss of all rows of a step
is, `step_loss`. Outputs are gathered from all micro-batches and ranks, so `global_batch_size` sets the number of
wrong answers, `micro_batch_size` only the memory, and the numbers are those of one process with one micro-batch.

The model is a bare encoder of transformers: `final/` is a directory that `AutoModel.from_pretrained` loads.
"""

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from transformers import AutoConfig, AutoModel

from shardtune import LossSum, Sample, WholeStepAdapter


class Options(BaseModel):
    temperature: float = 0.05


class SentenceEmbedding(WholeStepAdapter):
    Options = Options
    padding = {"question": 0, "passage": 0}  # fields that differ in length, and what they are filled with

    def build(self):
        """BERT without its pooler, which nothing below would train: `verify adapter` tells of such parameters.

        Weights come from `model.model_path` like the config, unless `model.from_scratch` is set.
        """
        config = AutoConfig.from_pretrained(self.recipe.actor.model.model_path)
        return AutoModel.from_config(config, add_pooling_layer=False)

    def encode(self, row):
        """`self.tokenizer` is that of `tokenizer.tokenizer_model`, or else of `model.model_path`."""
        return Sample(fields={name: self.tokenizer(row[name])["input_ids"] for name in ("question", "passage")})

    def _embeddings(self, model, batch, name):
        """[rows, width] of length 1: the mean over a text's own tokens, not over its padding."""
        mask = batch.mask(name)
        states = model(input_ids=batch[name], attention_mask=mask).last_hidden_state
        summed = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return F.normalize(summed, dim=-1)

    def outputs(self, model, batch):
        """Of one micro-batch: tensors with a row for each of its rows."""
        return {name: self._embeddings(model, batch, name) for name in ("question", "passage")}

    def step_loss(self, outputs):
        """Of all rows of the step: the passage of row i is the right one for question i."""
        scores = outputs["question"] @ outputs["passage"].T / self.options.temperature
        rows = torch.arange(len(scores), device=scores.device)
        return LossSum(F.cross_entropy(scores, rows, reduction="sum"), len(scores))

    def examples(self):
        pairs = (("red fruit", "an apple"), ("yellow fruit", "a banana"), ("grey animal", "an elephant"))
        return [{"question": f"a {question}", "passage": passage} for question, passage in pairs]
