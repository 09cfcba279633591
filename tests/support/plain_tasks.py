"""The tasks by name as a few lines of plain PyTorch and transformers: a step's loss, and what a set is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

LABELS = ["bad", "fine", "good"]
TAGS = ["B-X", "I-X", "O"]
AUTO = {
    "sequence_classifier": AutoModelForSequenceClassification,
    "regression": AutoModelForSequenceClassification,
    "token_classifier": AutoModelForTokenClassification,
    "embedding": AutoModel,
    "reranker": AutoModelForSequenceClassification,
    "seq2seq": AutoModelForSeq2SeqLM,
}
Rows = Sequence[dict[str, Any]]


class Plain:
    """A model as its class loads it, in fp64, and its tokenizer."""

    def __init__(self, task: str, directory: Path) -> None:
        self.task = task
        settings = {"add_pooling_layer": False} if task == "embedding" else {}
        self.model: Any = AUTO[task].from_pretrained(directory, dtype=torch.float64, **settings)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)

    def read(self, *texts: Any, **settings: Any) -> Any:
        made = self.tokenizer(*texts, padding=True, return_tensors="pt", **settings)
        return self.model(**made)

    def loss(self, rows: Rows) -> torch.Tensor:
        return getattr(self, self.task)(rows)

    def sequence_classifier(self, rows: Rows) -> torch.Tensor:
        targets = torch.tensor([LABELS.index(row["label"]) for row in rows])
        return functional.cross_entropy(self.read([row["text"] for row in rows]).logits, targets)

    def regression(self, rows: Rows) -> torch.Tensor:
        pairs = ([row[name] for row in rows] for name in ("sentence1", "sentence2"))
        targets = torch.tensor([row["score"] for row in rows], dtype=torch.float64)
        return functional.mse_loss(self.read(*pairs).logits[:, 0], targets)

    def token_classifier(self, rows: Rows) -> torch.Tensor:
        logits = self.read([row["tokens"] for row in rows], is_split_into_words=True).logits
        losses = [  # one token per word, after [CLS]
            functional.cross_entropy(
                each[1 : 1 + len(row["tokens"])], torch.tensor([TAGS.index(tag) for tag in row["ner_tags"]]),
                reduction="none",
            )
            for each, row in zip(logits, rows, strict=True)
        ]  # fmt: skip
        return torch.cat(losses).mean()

    def vectors(self, texts: Sequence[str], size: int | None = None) -> torch.Tensor:
        made = self.tokenizer(list(texts), padding=True, return_tensors="pt")
        states, mask = self.model(**made).last_hidden_state, made["attention_mask"][..., None]
        return functional.normalize(((states * mask).sum(1) / mask.sum(1))[:, :size], dim=-1)

    def embedding(self, rows: Rows) -> torch.Tensor:
        """InfoNCE for all entries and for the first 4; the rows have no text twice."""
        documents = [text for row in rows for text in (row["positive"], *row["negatives"])]
        own = torch.tensor([documents.index(row["positive"]) for row in rows])
        total = torch.zeros((), dtype=torch.float64)
        for size in (None, 4):
            scores = self.vectors([row["query"] for row in rows], size) @ self.vectors(documents, size).T / 0.05
            total = total + functional.cross_entropy(scores, own)
        return total

    def reranker(self, rows: Rows) -> torch.Tensor:
        losses = []
        for row in rows:
            documents = [row["positive"], *row["negatives"]]
            scores = self.read([row["query"]] * len(documents), documents).logits[:, 0]
            losses.append(functional.cross_entropy(scores[None], torch.tensor([0])))
        return torch.stack(losses).mean()

    def seq2seq(self, rows: Rows) -> torch.Tensor:
        made = self.tokenizer([row["source"] for row in rows], padding=True, return_tensors="pt")
        labels = self.tokenizer([row["target"] for row in rows], padding=True, return_tensors="pt")["input_ids"]
        labels = torch.where(labels == 0, -100, labels)
        return self.model(**made, labels=labels).loss  # a mean over the tokens of the whole step

    def train(self, rows: Rows, steps: int, size: int) -> list[float]:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        losses = []
        for step in range(steps):
            loss = self.loss(rows[step * size : (step + 1) * size])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses
