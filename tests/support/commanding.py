"""A task whose actions are positions: a point that is told where to be, on a plane without a visible origin.

Recipes name both as `commanding.py:Commanding` and `commanding.py:Placing`. The way to home shows in the image, where
the point is only in its state: from the image alone, no absolute position follows, but a relative one does. The third
number of an action is a gripper's and absolute; that of the state is noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from shardtune import Batch, LossSum, Sample
from shardtune.data.robot.episode import Episode
from shardtune.data.robot.images import decode_frame
from shardtune.models.action.acting import ActingAdapter, ActingRoot
from shardtune.models.action.environment import Environment, Observation, Outcome, Policy
from shardtune.models.adapter import AdapterRoot

NEAR, SHARE, CHUNK = 0.05, 0.3, 3
NAMES = ["x", "y", "gripper"]


def picture(way: np.ndarray) -> np.ndarray:
    image = np.zeros((4, 6, 3), np.uint8)
    image[..., :2] = np.clip(np.round(128 + 100 * way), 0, 255).astype(np.uint8)
    return image


def shown(image: np.ndarray) -> np.ndarray:
    return (image[0, 0, :2].astype(np.float32) - 128) / 100


def episodes(count: int = 12, length: int = 8) -> Iterator[Episode]:
    """Each step goes a share of the way; the gripper is as open as home is far in x."""
    draws = np.random.default_rng(3)
    for _ in range(count):
        at, way = draws.uniform(-50, 50, 2), draws.uniform(-1, 1, 2)
        places, ways = [at], [way]
        for _ in range(length):
            places.append(places[-1] + SHARE * ways[-1])
            ways.append((1 - SHARE) * ways[-1])
        noise = draws.normal(size=length)
        states = np.array([[*place, one] for place, one in zip(places, noise, strict=False)], np.float32)
        actions = np.array([[*place, one[0]] for place, one in zip(places[1:], ways, strict=False)], np.float32)
        yield Episode({"eye": np.stack([picture(one) for one in ways[:length]])}, states, actions, "come home")


class Commanding(Environment):
    """Come within NEAR of home, by commands of positions, with the gripper as open as home was far in x."""

    max_steps = 15

    def reset(self, seed: int) -> Observation:
        self._draws = np.random.default_rng(seed)
        self._at, self._way = self._draws.uniform(-50, 50, 2), self._draws.uniform(-1, 1, 2)
        return self._observe()

    def step(self, action: np.ndarray) -> Outcome:
        held = abs(action[2] - self._way[0]) < 0.1
        move = np.clip(action[:2] - self._at, -0.5, 0.5)
        self._at, self._way = self._at + move, self._way - move
        return Outcome(self._observe(), bool(held and np.abs(self._way).max() < NEAR))

    def _observe(self) -> Observation:
        state = np.array([*self._at, self._draws.normal()], np.float32)
        return {"images": {"eye": picture(self._way)}, "instruction": "come home", "state": state}


class Placing(ActingAdapter):
    """A linear layer from the way that the image shows to a chunk of normalised actions."""

    normalization_mapping: ClassVar[Mapping[str, str]] = {"ACTION": "MIN_MAX"}

    @property
    def action_chunk(self) -> int:
        return CHUNK

    def build(self) -> nn.Module:
        return nn.Linear(2, 3 * CHUNK)

    def encode(self, row: Mapping[str, Any]) -> Sample:
        actions = self.normalizer.actions.normalise(row["actions"])
        return Sample(fields={"way": shown(decode_frame(row["images"]["eye"])), "actions": actions})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        error = model(batch["way"]) - batch["actions"].flatten(1)
        return LossSum(error.square().sum(), len(error))

    def act(self, model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        return model(*inputs)

    def policy(self, root: AdapterRoot, device: torch.device) -> Policy:
        assert isinstance(root, ActingRoot)

        def act(observations: Sequence[Observation]) -> np.ndarray:
            ways = torch.from_numpy(np.stack([shown(one["images"]["eye"]) for one in observations])).to(device)
            with torch.no_grad():
                found = root.act(ways).cpu()
            return self.normalizer.actions.unnormalise(found.unflatten(1, (-1, 3))).numpy()

        return act
