"""Adapters whose loss is one of a whole optimizer step, such as a contrastive one over all of its rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from shardtune.batch import Batch
from shardtune.models.adapter import Adapter, AdapterRoot, Losses
from shardtune.models.mixed_precision import compute_in
from shardtune.parallel.precision import COMPUTE_DTYPE


class WholeStepAdapter(Adapter):
    """A model whose loss is no sum over rows but a function of all rows of a step, such as a contrastive loss.

    `outputs` is computed micro-batch by micro-batch and gathered from all ranks; `step_loss` receives those of all rows
    of the step, for any ranks and micro-batches. Each micro-batch is computed twice, so that memory is that of one of
    them (Gao et al., 2021, arXiv:2101.06983). Evaluation is by `step_loss` alone: a `metrics` of its own is refused.

    Attributes:
        evaluation_rows: rows that `step_loss` compares at once in evaluation, in the order of the set. The size of the
            steps of training has no part in it, so that the losses of different runs can be compared.
    """

    evaluation_rows: ClassVar[int] = 64

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Tensors [rows, ...] of one micro-batch, by name."""

    @abstractmethod
    def step_loss(self, outputs: Mapping[str, torch.Tensor]) -> Losses:
        """The loss of a step from the outputs of all its rows, in an order that is the same on all ranks."""

    @property
    def predicts(self) -> bool:
        """False: its loss is no sum over targets."""
        return False

    def loss(self, model: nn.Module, batch: Batch) -> Losses:
        """The loss of a step that is one micro-batch."""
        return self.step_loss(self.outputs(model, batch))

    def root(self, model: nn.Module) -> AdapterRoot:
        compute_in(model, COMPUTE_DTYPE[self.recipe.actor.model.precision])
        return WholeStepRoot(self, model)


class WholeStepRoot(AdapterRoot):
    """A root whose forward returns the outputs from which the loss of a step is computed."""

    def __init__(self, adapter: WholeStepAdapter, model: nn.Module) -> None:
        super().__init__(adapter, model)
        self._step_adapter = adapter

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = self._step_adapter.outputs(self.model, batch)
        return dict(found) if isinstance(found, Mapping) else found  # `WholeStep` refuses anything else
