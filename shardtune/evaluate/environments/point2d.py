"""A task in numpy and Pillow only: move a point onto the disc of the named colour.

The image shows the table from above with the point in its middle. Discs of other colours lie there too, so that the
instruction is needed to choose the target.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

from shardtune.errors import ConfigError
from shardtune.evaluate.environments.scripted import ScriptedEnvironment
from shardtune.models.action.environment import Observation, Outcome

CAMERA = "top"
COLOURS = {"red": (215, 40, 40), "blue": (40, 70, 215), "green": (40, 160, 60), "yellow": (235, 200, 40)}
TABLE, OUTSIDE, POINT = (225, 222, 214), (60, 60, 66), (20, 20, 20)
STRIDE = 0.08
"""The largest movement of one action along each axis; the table is 1 wide."""
RADIUS = 0.12
"""Of the discs."""
NEAR = 0.06
"""The largest distance from a disc's centre that counts as being on it."""
HOLD = 2
"""Consecutive steps for which the point has to stay there."""
APART = 0.3
VIEW = 0.75
"""The part of the table that the image shows, from the point to each side."""
FINER = 4
"""Factor by which images are drawn larger and then reduced, for smooth edges."""


class Point2d(ScriptedEnvironment):
    """Move onto the disc of the named colour.

    Observations hold the image of the camera `top` and the point's place [2], from 0 to 1. Actions [2] are how far to
    move right and down, cut to STRIDE along each axis.

    Args:
        image_size: pixels of the image, which is square.
        discs: number of discs, 1 to 4, each of another colour.
        max_steps: actions after which an episode has failed.

    Raises:
        ConfigError: another number of discs.
    """

    disturbance = 0.04
    disturbed = 0.5

    def __init__(self, image_size: int = 48, discs: int = 2, max_steps: int = 30) -> None:
        if discs not in range(1, len(COLOURS) + 1):
            raise ConfigError(
                f"point2d has {discs!r} discs",
                where="eval.environment_options = discs",
                remedy=f"give 1 to {len(COLOURS)}",
            )
        self.max_steps = max_steps
        self._image_size, self._number = image_size, discs
        self._discs: dict[str, np.ndarray] = {}
        self._target, self._held = "", 0
        self._place = np.zeros(2)

    def reset(self, seed: int) -> Observation:
        random = np.random.default_rng(seed)
        names = [str(name) for name in random.permutation(list(COLOURS))[: self._number]]
        self._discs = {}
        while len(self._discs) < len(names):
            place = random.uniform(RADIUS, 1 - RADIUS, 2)
            if all(np.linalg.norm(place - other) > APART for other in self._discs.values()):
                self._discs[names[len(self._discs)]] = place
        self._target, self._held = names[0], 0
        self._place = random.uniform(0.2, 0.8, 2)
        return self._observe()

    def step(self, action: np.ndarray) -> Outcome:
        self._place = np.clip(self._place + np.clip(action, -STRIDE, STRIDE), 0, 1)
        near = np.linalg.norm(self._discs[self._target] - self._place) < NEAR
        self._held = self._held + 1 if near else 0
        success = self._held >= HOLD
        return Outcome(self._observe(), success, success)

    def expert(self) -> np.ndarray:
        return np.clip(0.7 * (self._discs[self._target] - self._place), -STRIDE, STRIDE).astype(np.float32)

    def render(self) -> np.ndarray:
        return self._picture(4 * self._image_size)

    def _observe(self) -> Observation:
        return {
            "images": {CAMERA: self._picture(self._image_size)},
            "instruction": f"move to the {self._target} disc",
            "state": self._place.astype(np.float32),
        }

    def _picture(self, size: int) -> np.ndarray:
        """The table from above around the point, uint8 [size, size, 3]."""
        pixels = size * FINER
        image = Image.new("RGB", (pixels, pixels), OUTSIDE)
        draw = ImageDraw.Draw(image)

        def box(low: np.ndarray, high: np.ndarray) -> tuple[float, ...]:
            corners = (np.concatenate([low, high]) - np.tile(self._place, 2) + VIEW) * pixels / (2 * VIEW)
            return tuple(corners.tolist())

        draw.rectangle(box(np.zeros(2), np.ones(2)), fill=TABLE)
        for name, place in self._discs.items():
            draw.ellipse(box(place - RADIUS, place + RADIUS), fill=COLOURS[name])
        draw.ellipse(box(self._place - RADIUS / 4, self._place + RADIUS / 4), fill=POINT)
        return np.asarray(image.reduce(FINER))
