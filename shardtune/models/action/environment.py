"""The interface of simulators for closed-loop evaluation; the user's file contains a class that derives from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict

import numpy as np


class _Required(TypedDict):
    images: dict[str, np.ndarray]
    instruction: str
    state: np.ndarray | None


class Observation(_Required, total=False):
    """The input of a policy at each step: a plain dict.

    Attributes:
        images: of each camera, by its name in the training data, uint8 [H, W, 3] (RGB).
        instruction: the task in words.
        state: float32 [S], or None where the robot's own state is not observed.
        earlier: the observations before this one, the oldest first, where the policy sees several frames; an
            environment leaves it out (`ObservationHistory` adds it).
    """

    earlier: Sequence[Observation]


Policy = Callable[[Sequence[Observation]], np.ndarray]
"""Observations to actions [observations, C, A]: the next C actions of each, in the environment's units."""


Valuation = Callable[[Sequence[Observation]], np.ndarray]
"""Observations to values, float32 [observations]: the return that a policy expects after each."""


class Outcome(NamedTuple):
    """The result of an action.

    Attributes:
        observation: after it.
        success: the task is done; the episode ends and counts as a success.
        done: the episode is over, with or without success.
    """

    observation: Observation
    success: bool
    done: bool = False


class Environment(ABC):
    """One robot (or game) in one simulator; a process may hold several.

    Only `reset` and `step` have to be implemented. All random draws of an episode come from the seed that `reset` is
    given, so that an episode is reproducible.

    Attributes:
        max_steps: actions after which an episode ends as a failure.
        frames_per_second: of its videos, and of demonstrations recorded from it.
    """

    max_steps: int = 100
    frames_per_second: int = 10

    @abstractmethod
    def reset(self, seed: int) -> Observation:
        """Begin an episode, the same one for the same seed (a number from 0 to 2**32 - 1)."""

    @abstractmethod
    def step(self, action: np.ndarray) -> Outcome:
        """Execute an action, float32 [A] in the units of the training data's actions."""

    def render(self) -> np.ndarray | None:
        """The scene for a video, uint8 [H, W, 3]; None: the first camera of the observation is shown."""
        return None

    def close(self) -> None:  # noqa: B027 (may stay empty)
        """Release the simulator's resources; called once, after the last episode."""
