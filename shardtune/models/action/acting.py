"""Models that act: the interface that closed-loop evaluation requires of an adapter."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from shardtune.models.action.environment import Policy
from shardtune.models.adapter import Adapter, AdapterRoot
from shardtune.models.mixed_precision import compute_in
from shardtune.parallel.fsdp2 import COMPUTE_DTYPE


class ActingAdapter(Adapter):
    """A model that predicts actions in an environment."""

    @abstractmethod
    def policy(self, root: AdapterRoot, device: torch.device) -> Policy:
        """The policy, which maps observations to actions.

        It is called at the same time on every rank, with any number of observations, from one on; each call has to run
        the same collectives for any observations. Actions are in the units of the environment, that is of the training
        data.

        Args:
            root: the sharded module that `self.root` made, in evaluation mode; `root.act(…)` is `self.act(model, …)`
                with the weights whole.
            device: where it computes.
        """

    @abstractmethod
    def act(self, model: nn.Module, *inputs: Any) -> Any:
        """What a policy computes with the model: from tensors to tensors."""

    def root(self, model: nn.Module) -> AdapterRoot:
        compute_in(model, COMPUTE_DTYPE[self.recipe.actor.model.precision])
        return ActingRoot(self, model)


class ActingRoot(AdapterRoot):
    """A root that also acts."""

    entry_points = (*AdapterRoot.entry_points, "act")

    def __init__(self, adapter: ActingAdapter, model: nn.Module) -> None:
        super().__init__(adapter, model)
        self._acting = adapter

    def act(self, *inputs: Any) -> Any:
        return self._acting.act(self.model, *inputs)
