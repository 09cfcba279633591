"""Adapters that are as they should be, each of another kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from shardtune import Adapter, Batch, LossSum, Prediction, Sample
from shardtune.batch import PackedBatch
from shardtune.data.loader.packing import NO_ROW, pack
from shardtune.models.language_model import LanguageModel
from shardtune.models.whole_step_adapter import WholeStepAdapter

ROWS = 8
Row = Mapping[str, Any]


def draw() -> np.random.Generator:
    return np.random.default_rng(0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Tower(nn.Module):
    """Four numbers to two; dropout, so that training draws."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x))


class Regressor(Adapter):
    """Two terms of different denominators: what was observed of two values, and the sign of their sum."""

    class Options(BaseModel):
        width: int = 6

    unit_classes = ("Block",)

    def build(self) -> nn.Module:
        return Tower(self.options.width)

    def encode(self, row: Row) -> Sample:
        return Sample(fields={name: np.asarray(row[name], np.float32) for name in ("x", "y", "seen")})

    def weights(self, sample: Sample) -> dict[str, float]:
        return {"value": float(sample.fields["seen"].sum()), "sign": 1.0}

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, LossSum]:
        out = model(batch["x"])
        errors = (out - batch["y"]).square() * batch["seen"]
        sign = F.softplus(-out.sum(-1) * batch["y"].sum(-1).sign()).sum()
        return {
            "value": LossSum(errors.sum(), float(batch["seen"].sum())),
            "sign": LossSum(0.1 * sign, len(batch["x"])),
        }

    def examples(self) -> list[Row]:
        numbers = draw()
        return [
            {"x": numbers.normal(size=4), "y": numbers.normal(size=2), "seen": [1.0, float(row % 3 > 0)]}
            for row in range(ROWS)
        ]


class Denoiser(Regressor):
    """Flow matching with noise and times of each row."""

    def draws(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.randn_like("noise", batch["x"]), batch.rand_like("time", batch["x"][:, 0])

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, LossSum]:
        noise, time = self.draws(batch)
        velocity = model(torch.lerp(noise, batch["x"], time[:, None]))
        errors = (velocity - (batch["y"] - noise[:, :2])).square() * batch["seen"]
        sign = F.softplus(-velocity.sum(-1) * batch["y"].sum(-1).sign()).sum()
        return {"value": LossSum(errors.sum(), float(batch["seen"].sum())), "sign": LossSum(sign, len(batch["x"]))}

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float, float]]:
        noise, time = self.draws(batch)
        velocity = model(torch.lerp(noise, batch["x"], time[:, None]))
        return {"speed": (float(velocity.square().sum()), float(len(velocity)))}


class TorchDenoiser(Denoiser):
    """With those of torch's generator."""

    def draws(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        time = torch.randint(0, 100, (len(batch["x"]),)) / 100
        return F.dropout(torch.randn_like(batch["x"]), 0.2), time.to(batch["x"])


class Pictures(Adapter):
    """Convolutions and a batch norm, whose statistics are buffers."""

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)
        )

    def encode(self, row: Row) -> Sample:
        return Sample(fields={"picture": np.array(row["picture"], np.uint8), "label": np.array(row["label"])})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        logits = model(batch["picture"][:, None] / 255)
        return LossSum(F.cross_entropy(logits, batch["label"], reduction="sum"), len(batch["label"]))

    def examples(self) -> list[Row]:
        pictures = draw().integers(0, 256, (ROWS, 4, 4))
        return [{"picture": picture, "label": number % 3} for number, picture in enumerate(pictures)]


class Tagger(nn.Module):
    """Tokens to logits over the same tokens, the head being the embedding."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.0, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.scale
        count = torch.arange(1, tokens.shape[1] + 1, dtype=hidden.dtype)[:, None]
        return self.head(self.blocks(hidden.cumsum(1) / count))


class Tokens(Adapter):
    """The next token in plain PyTorch, rows padded, prompts masked."""

    padding = {"tokens": 0, "labels": -100}  # noqa: RUF012 (as users write it)

    def build(self) -> nn.Module:
        return Tagger()

    def encode(self, row: Row) -> Sample:
        tokens = np.asarray(row["tokens"])
        labels = np.append(tokens[1:], -100)
        labels[0] = -100
        return Sample(fields={"tokens": tokens, "labels": labels})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        labels = batch["labels"]
        logits = model(batch["tokens"]).flatten(0, 1)
        total = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
        return LossSum(total, float((labels != -100).sum()))

    def predictions(self, model: nn.Module, batch: Batch) -> Iterator[Prediction]:
        labels = batch["labels"].flatten()
        targets = labels != -100
        logits = model(batch["tokens"]).flatten(0, 1)[targets]
        yield Prediction(logits, labels[targets], torch.ones(len(logits)))

    def predict_rows(self, model: nn.Module, batch: Batch) -> list[dict[str, object]]:
        logits, lengths = model(batch["tokens"]), batch.lengths["tokens"].tolist()
        return [
            {"words": one[:length].argmax(-1), "last": one[length - 1]}
            for one, length in zip(logits, lengths, strict=True)
        ]

    def examples(self) -> list[Row]:
        numbers = draw()
        return [{"tokens": numbers.integers(1, 11, 4 + row % 4).tolist()} for row in range(ROWS)]


class Masked(Tokens):
    """Hides tokens that it draws where a micro-batch is made."""

    def collate(self, samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float]) -> Batch:
        batch = super().collate(samples, rows, weights)
        tokens = batch["tokens"]
        return replace(batch, fields={**batch.fields, "hidden": torch.rand(tokens.shape) < 0.3})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        hidden = batch["tokens"].masked_fill(batch["hidden"], 0)
        return super().loss(model, replace(batch, fields={**batch.fields, "tokens": hidden}))


class Encoder(Adapter):
    """A sequence classifier of transformers."""

    padding = {"tokens": 0}  # noqa: RUF012

    def build(self) -> nn.Module:
        config = BertConfig(
            vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=32, num_labels=3, pad_token_id=0,
        )  # fmt: skip
        return BertForSequenceClassification(config)

    def encode(self, row: Row) -> Sample:
        return Sample(fields={"tokens": np.asarray(row["tokens"]), "label": np.asarray(row["label"])})

    def _logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(input_ids=batch["tokens"], attention_mask=batch.mask("tokens").long()).logits

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        logits = self._logits(model, batch)
        return LossSum(F.cross_entropy(logits, batch["label"], reduction="sum"), len(batch["label"]))

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float, float]]:
        right = self._logits(model, batch).argmax(-1) == batch["label"]
        return {"accuracy": (float(right.sum()), len(right))}

    def examples(self) -> list[Row]:
        numbers = draw()
        return [{"tokens": numbers.integers(1, 20, 3 + row % 4).tolist(), "label": row % 3} for row in range(ROWS)]


class Contrast(WholeStepAdapter):
    """Two views of a row, the other rows of the step being negatives."""

    unit_classes = ("Block",)

    def build(self) -> nn.Module:
        return Tower()

    def encode(self, row: Row) -> Sample:
        return Sample(fields={name: np.asarray(row[name], np.float32) for name in ("left", "right")})

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        return {name: F.normalize(model(batch[name]), dim=-1) for name in ("left", "right")}

    def step_loss(self, outputs: Mapping[str, torch.Tensor]) -> LossSum:
        logits = outputs["left"] @ outputs["right"].t() * 5
        return LossSum(F.cross_entropy(logits, torch.arange(len(logits)), reduction="sum"), len(logits))

    def examples(self) -> list[Row]:
        views = draw().normal(size=(ROWS, 2, 4))
        return [{"left": left, "right": right} for left, right in views]


class ContrastWithMetric(Contrast):
    """The share of wrong ones is a term without a gradient, as such a loss has no metrics."""

    def weights(self, sample: Sample) -> dict[str, float]:
        return {"match": 1, "wrong": 1}

    def step_loss(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, LossSum]:
        found = (outputs["left"] @ outputs["right"].t()).argmax(1)
        wrong = (found != torch.arange(len(found))).sum().double()
        return {"match": super().step_loss(outputs), "wrong": LossSum(wrong, len(found))}


class Packed(LanguageModel):
    """A language model in plain PyTorch whose rows are laid end to end."""

    def build(self) -> nn.Module:
        return Documents()

    def encode(self, row: Row) -> Sample:
        tokens = np.asarray(row["tokens"], np.int32)
        return Sample(tokens, np.ones(len(tokens), np.float32))

    def collate(self, samples: Sequence[Sample], rows: Sequence[int], weights: Mapping[str, float]) -> Batch:
        return pack(samples, rows, weights)

    def filler(self, sample: Sample) -> Sample:
        return NO_ROW

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        assert isinstance(batch, PackedBatch)
        logits = self.logits(model, batch, batch.target_positions)
        losses = F.cross_entropy(logits, batch.targets, reduction="none") * batch.target_weights
        return LossSum(losses.sum() + 0.0 * logits.sum(), batch.target_weight)

    def logits(self, model: nn.Module, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
        return model(batch.input_ids, batch.cu_seqlens)[positions]

    def reference_logits(self, model: nn.Module, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
        return model(batch.input_ids, batch.cu_seqlens)[positions]

    def generate(self, model: nn.Module, input_ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return input_ids  # has nothing to say

    def examples(self) -> list[Row]:
        numbers = draw()
        return [{"tokens": numbers.integers(1, 11, 3 + row % 5).tolist()} for row in range(ROWS)]


class Documents(nn.Module):
    """The mean of a document's tokens so far to the logits of its next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        parts = [
            part.cumsum(0) / torch.arange(1, len(part) + 1, dtype=part.dtype)[:, None]
            for part in hidden.split(boundaries.diff().tolist())
        ]
        return self.head(torch.cat(parts))
