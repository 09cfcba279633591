"""Models that act: what closed-loop evaluation asks of an adapter."""

from __future__ import annotations

from abc import abstractmethod

import torch

from shardtune.environment import Policy
from shardtune.models.adapter import Adapter, AdapterRoot


class ActingAdapter(Adapter):
    """A model that says what to do next in an environment."""

    @abstractmethod
    def policy(self, root: AdapterRoot, device: torch.device) -> Policy:
        """What says of observations which actions to take.

        It is called at the same time on every rank, with any number of observations, from one on; each call has to do
        the same collectives whatever it is asked. Actions are in the units of the environment, that is of the training
        data.

        Args:
            root: the sharded module that `self.root` made, in evaluation mode.
            device: where it computes.
        """
