"""A small data set of a robot that moves towards the bright side of its camera's image."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardtune.data.robot.episode import Episode
from shardtune.data.robot.lerobot_writer import write_lerobot
from shardtune.models.action.environment import Environment, Observation, Outcome

DIMENSIONS = 3
NAMES = ["x", "y", "gripper"]
OPTIONS: dict[str, dict[str, Any]] = {
    "act": {
        "chunk_size": 3, "n_action_steps": 2, "dim_model": 16, "n_heads": 2, "dim_feedforward": 24,
        "n_encoder_layers": 1, "n_vae_encoder_layers": 1, "latent_dim": 4,
    },
    "diffusion": {
        "horizon": 4, "n_action_steps": 2, "drop_n_last_frames": 0, "down_dims": [8, 16], "n_groups": 2,
        "diffusion_step_embed_dim": 8, "crop_shape": [24, 24], "num_train_timesteps": 4,
    },
}  # fmt: skip
"""Of tiny policies."""


def frame(value: float) -> np.ndarray:
    """An image whose brightness tells `value`, in [-1, 1]."""
    level = int(127.5 + 120 * value)
    return np.full((28, 28, 3), level, np.uint8)


def episodes(count: int, seed: int = 0, longest: int = 6, *, rewards: bool = False) -> Iterator[Episode]:
    draws = np.random.default_rng(seed)
    for number in range(count):
        size = int(draws.integers(2, longest + 1))
        values = draws.uniform(-1, 1, size)
        actions = np.stack([values * 0.05, -2 * values, (values > 0) * 1.0], 1).astype(np.float32)
        yield Episode(
            {"wrist": np.stack([frame(value) for value in values])},
            np.stack([values, values**2], 1).astype(np.float32),
            actions,
            f"Follow the light {number % 2}",
            values.astype(np.float32) if rewards else None,
        )


def save_episodes(folder: Path, count: int = 12, seed: int = 0, *, rewards: bool = False) -> Path:
    return write_lerobot(folder, episodes(count, seed, rewards=rewards), fps=10, action_names=NAMES)


class Dark(Environment):
    """Observations as in these data; nothing succeeds."""

    def __init__(self, camera: str = "wrist") -> None:
        self._camera = camera

    def reset(self, seed: int) -> Observation:
        return {"images": {self._camera: frame(-1)}, "instruction": "Follow", "state": np.zeros(2, np.float32)}

    def step(self, action: np.ndarray) -> Outcome:
        return Outcome(self.reset(0), success=False)
