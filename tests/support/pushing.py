"""A policy of one's own that normalises: a linear layer from the state to a chunk of actions, all normalised.

Recipes name it as `pushing.py:Pushing`; its rows are those of `tests.support.robot`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import BaseModel
from torch import nn

from shardtune import Batch, LossSum, Sample
from shardtune.models.action.acting import ActingAdapter, ActingRoot
from shardtune.models.action.environment import Observation, Policy
from shardtune.models.adapter import AdapterRoot


class Options(BaseModel):
    chunk: int = 2


class Pushing(ActingAdapter):
    """From a state of two numbers to actions of three."""

    Options = Options
    normalization_mapping: ClassVar[Mapping[str, str]] = {"STATE": "MEAN_STD", "ACTION": "MIN_MAX"}

    @property
    def action_chunk(self) -> int:
        return self.options.chunk

    def build(self) -> nn.Module:
        return nn.Linear(2, 3 * self.options.chunk)

    def encode(self, row: Mapping[str, Any]) -> Sample:
        state = self.normalizer.state.normalise(row["state"])
        return Sample(fields={"state": state, "actions": self.normalizer.actions.normalise(row["actions"])})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        error = model(batch["state"]) - batch["actions"].flatten(1)
        return LossSum(error.square().sum(), len(error))

    def act(self, model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        return model(*inputs)

    def policy(self, root: AdapterRoot, device: torch.device) -> Policy:
        assert isinstance(root, ActingRoot)

        def act(observations: Sequence[Observation]) -> np.ndarray:
            states = [self.normalizer.state.normalise(np.asarray(one["state"], np.float32)) for one in observations]
            with torch.no_grad():
                found = root.act(torch.from_numpy(np.stack(states)).to(device)).cpu()
            return self.normalizer.actions.unnormalise(found.unflatten(1, (-1, 3))).numpy()

        return act
