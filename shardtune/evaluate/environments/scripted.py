"""Demonstrations: recorded episodes of an environment with a scripted expert."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np

from shardtune.batch.seeds import derive_seed
from shardtune.data.robot.episode import Episode
from shardtune.errors import DataError
from shardtune.models.action.environment import Environment, Observation


class ScriptedEnvironment(Environment):
    """An environment with a scripted expert.

    Attributes:
        disturbance: standard deviation of the noise on the actions of demonstrations, in their units.
        disturbed: the share of actions with noise.
    """

    disturbance: float = 0.0
    disturbed: float = 0.0

    @abstractmethod
    def expert(self) -> np.ndarray:
        """The expert's next action, float32 [A], from the simulator's state."""


def demonstrations(environment: ScriptedEnvironment, episodes: int, seed: int = 0) -> Iterator[Episode]:
    """Episodes in which the expert succeeds.

    Noise is added to some of the actions that are executed, and the expert's own action is recorded: so the recordings
    contain corrections of the errors of an imperfect policy (Laskey et al., 2017, arXiv:1703.09327).

    Args:
        environment: to play in.
        episodes: number of episodes.
        seed: of the episodes and the noise; for any seed, the episodes differ from those of closed-loop evaluation.

    Raises:
        DataError: the expert fails more often than it succeeds.
    """
    random = np.random.default_rng(derive_seed(seed, "disturbances"))
    found = failed = 0
    while found < episodes:
        number = derive_seed(seed, "demonstration", found + failed) % 2**32
        episode = _played(environment, number, random)
        if episode is None:
            failed += 1
        else:
            found += 1
            yield episode
        if failed > 10 + found:
            raise DataError(
                f"the expert failed in {failed} of {failed + found} episodes",
                where=f"{type(environment).__name__}.expert",
                remedy="mend it, or lower disturbance and disturbed",
            )


def _played(environment: ScriptedEnvironment, seed: int, random: np.random.Generator) -> Episode | None:
    """One episode; None where the expert fails."""
    observations: list[Observation] = [environment.reset(seed)]
    actions: list[np.ndarray] = []
    for _ in range(environment.max_steps):
        actions.append(environment.expert())
        is_disturbed = random.random() < environment.disturbed
        noise = random.normal(0.0, environment.disturbance, actions[-1].shape) if is_disturbed else 0.0
        outcome = environment.step((actions[-1] + noise).astype(np.float32))
        if outcome.success:
            return _recorded(observations, actions)
        if outcome.done:
            return None
        observations.append(outcome.observation)
    return None


def _recorded(observations: list[Observation], actions: list[np.ndarray]) -> Episode:
    states = [observation["state"] for observation in observations]
    return Episode(
        {
            camera: np.stack([observation["images"][camera] for observation in observations])
            for camera in observations[0]["images"]
        },
        np.stack([state for state in states if state is not None]) if states[0] is not None else None,
        np.stack(actions),
        observations[0]["instruction"],
    )
