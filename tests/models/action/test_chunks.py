"""The actions of an episode from predicted chunks: executed one after another, or averaged over time."""

from __future__ import annotations

import numpy as np
import pytest

from shardtune.errors import ConfigError, ModelError
from shardtune.models.action.chunks import ActionChunks, ObservationHistory


def taken(chunks: ActionChunks, predictions: list[np.ndarray]) -> np.ndarray:
    """All actions of an episode in which the policy predicts these, one after another."""
    actions = []
    for predicted in predictions:
        assert chunks.empty
        chunks.add(predicted)
        while not chunks.empty:
            actions.append(chunks.take())
    return np.stack(actions)


def test_so_many_actions_of_each_chunk_are_taken() -> None:
    first, second = np.arange(6.0).reshape(3, 2), np.arange(6.0, 12.0).reshape(3, 2)
    assert (taken(ActionChunks(), [first, second]) == np.concatenate([first, second])).all()
    assert (taken(ActionChunks(2), [first, second]) == np.concatenate([first[:2], second[:2]])).all()


@pytest.mark.parametrize(("weight", "steps"), [(0.01, None), (0.5, 1), (-0.3, 1), (0.0, 2)])
def test_overlapping_predictions_are_averaged_by_age(weight: float, steps: int | None) -> None:
    """As the paper has it: for each time, all predictions for it, the oldest with the weight exp(0)."""
    every, size = steps or 1, 5
    predictions = [np.random.default_rng(seed).normal(size=(size, 3)) for seed in range(7)]
    chunks = ActionChunks(steps, weight)
    found = taken(chunks, predictions)
    assert found.dtype == np.float32
    assert len(found) == 7 * every
    for time, action in enumerate(found):
        begun = [number for number in range(7) if 0 <= time - number * every < size]
        weights = np.exp(-weight * np.arange(len(begun)))
        values = np.stack([predictions[number][time - number * every] for number in begun])
        np.testing.assert_allclose(action, (weights[:, None] * values).sum(0) / weights.sum(), rtol=1e-6)
    chunks.reset()
    assert (taken(chunks, predictions) == found).all(), "an episode depends on the one before"


def test_a_chunk_that_is_too_short_or_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval.action_steps is 4, and the model gives chunks of 3 actions"):
        ActionChunks(4).add(np.zeros((3, 2)))
    with pytest.raises(ModelError, match=r"actions of shape \[3\]"):
        ActionChunks().add(np.zeros(3))


def test_earlier_observations_stay_as_they_were():
    """Of a simulator, or a camera, that writes each frame into the same arrays."""
    image, state = np.zeros((1, 1, 3), np.uint8), np.zeros(1, np.float32)
    history, seen = ObservationHistory(3), []
    for number in range(4):
        image[:], state[:] = number, number
        earlier = history.see({"images": {"eye": image}, "instruction": "go", "state": state})["earlier"]
        seen.append([(int(one["images"]["eye"][0, 0, 0]), float(one["state"][0])) for one in earlier])
    assert seen == [[(0, 0.0), (0, 0.0)], [(0, 0.0), (0, 0.0)], [(0, 0.0), (1, 1.0)], [(1, 1.0), (2, 2.0)]]
