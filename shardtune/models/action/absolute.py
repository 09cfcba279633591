"""The policy of an adapter in absolute actions, whatever the model predicts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardtune.models.action.acting import ActingAdapter
from shardtune.models.action.environment import Observation, Policy
from shardtune.models.adapter import AdapterRoot

REMEDY = "let observations have the state of the training data: the model predicts differences from it"


def absolute_policy(adapter: ActingAdapter, root: AdapterRoot, device: torch.device) -> Policy:
    """`adapter.policy` with relative and delta actions made absolute, by the state of each observation.

    Args:
        adapter, root, device: as `ActingAdapter.policy` has them.
    """
    predict, form = adapter.policy(root, device), adapter.representation
    if form is None:
        return predict

    def act(observations: Sequence[Observation]) -> np.ndarray:
        chunks = np.asarray(predict(observations))
        if chunks.ndim != 3 or len(chunks) != len(observations):
            return chunks  # refused by the caller
        states = [
            form.checked_state(one["state"], chunk, where="observation['state']", remedy=REMEDY)
            for one, chunk in zip(observations, chunks, strict=True)
        ]
        return form.undo(chunks, np.stack(states)).astype(np.float32)

    return act
