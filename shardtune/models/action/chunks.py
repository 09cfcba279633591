"""From predicted chunks to the actions that are executed: some of each chunk, or a mean over overlapping chunks."""

from __future__ import annotations

import numpy as np

from shardtune.errors import ConfigError, ModelError
from shardtune.models.action.environment import Observation


class ObservationHistory:
    """The observations of one episode, for a policy that sees several frames.

    Args:
        steps: frames that the policy sees: the present one and those before it.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.reset()

    def reset(self) -> None:
        """Forget the last episode."""
        self._seen: list[Observation] = []

    def see(self, observation: Observation) -> Observation:
        """The observation with those before it as `earlier`; at an episode's start the first one is repeated.

        Its arrays are copied where they are kept: a simulator or a camera may write the next frame into them.
        """
        if self._steps == 1:
            return observation
        images = {camera: np.array(image) for camera, image in observation["images"].items()}
        state = None if observation["state"] is None else np.array(observation["state"])
        kept: Observation = {**observation, "images": images, "state": state}
        known = self._seen or [kept] * (self._steps - 1)
        self._seen = [*known[1:], kept]
        return {**observation, "earlier": known}


class ActionChunks:
    """The actions of one episode, taken one by one from the chunks that a policy predicts.

    Without `temporal_ensembling` the first `action_steps` actions of a chunk are executed and the rest is dropped. With
    it, chunks overlap, and an action is the mean of all predictions for its time, weighted by `exp(-w i)`, where i
    counts the predictions from the oldest, which is 0 (Zhao et al., 2023, arXiv:2304.13705, "ACT").

    ```python
    chunks = ActionChunks(temporal_ensembling=0.01)  # a new one, or `reset()`, for each episode
    while not done:
        if chunks.empty:
            chunks.add(predict(observation))  # [C, A]
        observation, done = robot.step(chunks.take())
    ```

    Args:
        action_steps: actions between two predictions; None: all of a chunk, or 1 with temporal ensembling.
        temporal_ensembling: w, the exponent of the weights: above 0 older predictions weigh more, below 0 newer ones;
            None: no ensembling.
    """

    def __init__(self, action_steps: int | None = None, temporal_ensembling: float | None = None) -> None:
        ensembling = temporal_ensembling is not None
        self._steps = 1 if ensembling and action_steps is None else action_steps
        self._exponent = temporal_ensembling
        self.reset()

    def reset(self) -> None:
        """Forget the chunks of the last episode."""
        self._chunks: list[np.ndarray] = []  # float64 [rest, A]; the oldest first, each from the next action on
        self._left = 0

    @property
    def empty(self) -> bool:
        """Whether a chunk has to be added before the next action."""
        return self._left == 0

    def add(self, chunk: np.ndarray) -> None:
        """The policy's prediction from the current observation on.

        Args:
            chunk: [C, A].

        Raises:
            ModelError: it is no chunk.
            ConfigError: it has fewer than `action_steps` actions.
        """
        chunk = np.asarray(chunk, np.float64)
        if chunk.ndim != 2 or not len(chunk):
            raise ModelError(
                f"the policy gave actions of shape {list(chunk.shape)}", remedy="return [steps, dimensions]"
            )
        steps = len(chunk) if self._steps is None else self._steps
        if steps > len(chunk):
            raise too_many_steps(steps, len(chunk))
        self._chunks = [chunk] if self._exponent is None else [*self._chunks, chunk]
        self._left = steps

    def take(self) -> np.ndarray:
        """The next action, float32 [A]. Only after `add`, when `empty` is false."""
        predicted = np.stack([chunk[0] for chunk in self._chunks])
        weights = np.exp(-(self._exponent or 0.0) * np.arange(len(predicted)))
        self._chunks = [chunk[1:] for chunk in self._chunks if len(chunk) > 1]
        self._left -= 1
        return (weights @ predicted / weights.sum()).astype(np.float32)


def too_many_steps(steps: int, chunk: int) -> ConfigError:
    """The error for more actions between two predictions than a chunk has."""
    return ConfigError(
        f"eval.action_steps is {steps}, and the model gives chunks of {chunk} actions",
        where="eval.action_steps",
        remedy=f"set it to {chunk} or less",
    )


def check_finite(chunk: np.ndarray, place: str, where: str) -> None:
    """Refuse a chunk that is not all numbers, before an environment or a robot gets it.

    Args:
        chunk: [C, A], as a policy predicted it.
        place: of the observation, as the end of a sentence; may be empty.
        where: of the policy, for the error.

    Raises:
        ModelError: a value is NaN or infinite.
    """
    wrong = np.argwhere(~np.isfinite(chunk))
    if len(wrong):
        step, dimension = wrong[0].tolist()
        raise ModelError(
            f"the policy gave {chunk[step, dimension]} for dimension {dimension} in step {step} of a chunk{place}",
            where=where,
            remedy="look at its weights and at the statistics that it is normalised by; take an earlier checkpoint, or "
            "train with a lower learning rate",
        )
