"""Demonstrations: an environment whose task a script can do, played and recorded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np

from shardtune.data.loader.order import derive_seed
from shardtune.data.robot.episode import Episode
from shardtune.errors import DataError
from shardtune.models.action.environment import Environment, Observation


class ScriptedEnvironment(Environment):
    """An environment that knows what an expert would do.

    Attributes:
        disturbance: standard deviation of what is added to the actions of demonstrations, in their units.
        disturbed: the share of actions to which it is added.
    """

    disturbance: float = 0.0
    disturbed: float = 0.0

    @abstractmethod
    def expert(self) -> np.ndarray:
        """The expert's next action, float32 [A], from what the simulator knows."""


def demonstrations(environment: ScriptedEnvironment, episodes: int, seed: int = 0) -> Iterator[Episode]:
    """Episodes that the expert succeeds in.

    Some actions are disturbed before they are done, and recorded as the expert meant them: so the recordings hold what
    to do where a policy that is not perfect ends up (Laskey et al., 2017, arXiv:1703.09327).

    Args:
        environment: is played in.
        episodes: how many.
        seed: from which everything follows; other episodes than those of closed-loop evaluation, whatever it is.

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
    seen: list[Observation] = [environment.reset(seed)]
    actions: list[np.ndarray] = []
    for _ in range(environment.max_steps):
        actions.append(environment.expert())
        is_disturbed = random.random() < environment.disturbed
        noise = random.normal(0.0, environment.disturbance, actions[-1].shape) if is_disturbed else 0.0
        outcome = environment.step((actions[-1] + noise).astype(np.float32))
        if outcome.success:
            return _recorded(seen, actions)
        if outcome.done:
            return None
        seen.append(outcome.observation)
    return None


def _recorded(seen: list[Observation], actions: list[np.ndarray]) -> Episode:
    states = [observation["state"] for observation in seen]
    return Episode(
        {camera: np.stack([observation["images"][camera] for observation in seen]) for camera in seen[0]["images"]},
        np.stack([state for state in states if state is not None]) if states[0] is not None else None,
        np.stack(actions),
        seen[0]["instruction"],
    )
