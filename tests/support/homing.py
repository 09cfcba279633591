"""A task for closed-loop tests: a point that is to come home, its environment and a linear model that acts in it.

Recipes name both as `homing.py:Homing` and `homing.py:Steering`. Where home is shows in the image alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from shardtune import Adapter, Batch, LossSum, Sample
from shardtune.models.action.acting import ActingAdapter, ActingRoot
from shardtune.models.action.environment import Environment, Observation, Outcome, Policy
from shardtune.models.adapter import AdapterRoot

NEAR = 0.05
CHUNK = 3


class Homing(Environment):
    """Come within NEAR of home, whose direction is in the picture's red and green, 128 in the middle.

    Args:
        fault: what goes wrong in the third step of an episode, for tests of messages.
        steps: actions after which an episode has failed.
    """

    frames_per_second = 5

    def __init__(self, fault: str = "", steps: int = 12) -> None:
        self._fault, self.max_steps = fault, steps
        self._way, self._steps = np.zeros(2), 0

    def reset(self, seed: int) -> Observation:
        self._way, self._steps = np.random.default_rng(seed).uniform(-1, 1, 2), 0
        return self._observe()

    def step(self, action: np.ndarray) -> Outcome:
        assert action.dtype == np.float32
        assert action.shape == (2,)
        self._steps += 1
        if self._steps == 3 and self._fault == "raises":
            raise ZeroDivisionError("the motor is hot")
        self._way = self._way - np.clip(action, -0.3, 0.3)
        seen = self._observe()
        if self._steps == 3 and self._fault == "image":
            seen["images"]["eye"] = seen["images"]["eye"] / np.float32(255)
        return Outcome(seen, bool(np.abs(self._way).max() < NEAR))

    def _observe(self) -> Observation:
        image = np.zeros((4, 6, 3), np.uint8)
        image[..., :2] = np.clip(128 + 100 * self._way, 0, 255).astype(np.uint8)
        return {"images": {"eye": image}, "instruction": "come home", "state": None}


def direction(observation: Observation) -> np.ndarray:
    """What the picture says, float32 [2]."""
    return (observation["images"]["eye"][0, 0, :2].astype(np.float32) - 128) / 100


def rows(number: int) -> list[dict[str, list[float]]]:
    """Directions, and what to do."""
    ways = np.random.default_rng(5).uniform(-1, 1, (number, 2))
    return [{"way": way.tolist(), "action": way.tolist()} for way in ways]


class Steering(ActingAdapter):
    """A linear layer from the direction of home to three equal actions."""

    def build(self) -> nn.Module:
        return nn.Linear(2, 2)

    def encode(self, row: Mapping[str, list[float]]) -> Sample:
        return Sample(fields={name: np.array(row[name], np.float32) for name in ("way", "action")})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        error = model(batch.fields["way"]) - batch.fields["action"]
        return LossSum(error.square().sum(), len(error))

    def act(self, model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        return model(*inputs)

    def policy(self, root: AdapterRoot, device: torch.device) -> Policy:
        assert isinstance(root, ActingRoot)

        def policy(observations: Sequence[Observation]) -> np.ndarray:
            ways = torch.from_numpy(np.stack([direction(seen) for seen in observations])).to(device)
            with torch.no_grad():
                actions = root.act(ways).cpu().numpy()
            return np.repeat(actions[:, None] / CHUNK, CHUNK, axis=1)

        return policy


class Still(Adapter):
    """A model that does not act."""

    build, encode, loss = Steering.build, Steering.encode, Steering.loss


class Unfinished(Environment):
    """An environment that lacks `step`."""

    def reset(self, seed: int) -> Observation:
        return {"images": {}, "instruction": "", "state": None}
