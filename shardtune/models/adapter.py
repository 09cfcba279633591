"""What a model is to the rest of the system: how it is built, what its loss is, what shards as a unit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from shardtune.batch import Batch, LossSum


class Evaluation(NamedTuple):
    """The losses of a micro-batch, and how many of its targets have the largest logit.

    Attributes:
        losses: as `Adapter.loss` returns them.
        correct: int64 scalar tensor.
        targets: the number of targets, each counted once whatever its weight.
    """

    losses: dict[str, LossSum]
    correct: torch.Tensor
    targets: int


class Adapter(ABC):
    """The contract between a model and the training loop; a subclass is final.

    An adapter holds no weights: `build` returns them, and every other method receives them.
    """

    @abstractmethod
    def build(self) -> nn.Module:
        """The model, its parameters on the meta device and its buffers real."""

    @abstractmethod
    def terms(self) -> Mapping[str, float | None]:
        """The loss terms: for each either None (its weight per row is in the row index) or one weight for every row."""

    @abstractmethod
    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        """The modules whose parameters are gathered and freed together, usually the decoder layers."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> dict[str, LossSum]:
        """The terms of the loss on one micro-batch; each reports the weight that the row index has for it."""

    @abstractmethod
    def evaluate(self, model: nn.Module, batch: Batch) -> Evaluation:
        """As `loss`, with the number of targets that were predicted right."""

    @abstractmethod
    def logits(self, model: nn.Module, batch: Batch, positions: torch.Tensor) -> torch.Tensor:
        """[positions, vocabulary]: the logits at these tokens, by the path that `loss` takes."""

    @abstractmethod
    def reference_logits(self, model: nn.Module, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[positions, vocabulary]: the logits of one row alone, by the model's own forward and its own attention."""

    @abstractmethod
    def generate(
        self, model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, arguments: Mapping[str, object]
    ) -> torch.Tensor:
        """Continue left-padded prompts [rows, tokens]; returns prompts and answers, int64 [rows, longer]."""


class AdapterRoot(nn.Module):
    """The module that is sharded: its forward is the adapter's loss, so that every parallel layout shares one path."""

    ENTRY_POINTS = ("evaluate", "logits", "reference_logits", "generate")

    def __init__(self, adapter: Adapter, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._adapter = adapter

    def forward(self, batch: Batch) -> dict[str, LossSum]:
        return self._adapter.loss(self.model, batch)

    def evaluate(self, batch: Batch) -> Evaluation:
        return self._adapter.evaluate(self.model, batch)

    def logits(self, batch: Batch, positions: torch.Tensor) -> torch.Tensor:
        return self._adapter.logits(self.model, batch, positions)

    def reference_logits(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._adapter.reference_logits(self.model, input_ids, positions)

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, arguments: Mapping[str, object]
    ) -> torch.Tensor:
        return self._adapter.generate(self.model, input_ids, attention_mask, arguments)
