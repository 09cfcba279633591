"""A trained policy as one object: an observation in, the next action out."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shardtune.config.schema import EvalConfig
from shardtune.data.encoder import RowError
from shardtune.data.images.images import read_image
from shardtune.errors import ConfigError, ModelError
from shardtune.models.action.absolute import absolute_policy
from shardtune.models.action.acting import ActingAdapter
from shardtune.models.action.chunks import ActionChunks, ObservationHistory, check_finite
from shardtune.models.action.environment import Observation
from shardtune.models.action.vision_language_action import VisionLanguageAction
from shardtune.models.policies.flow_matching import FlowPolicy
from shardtune.models.policies.policy import Policy
from shardtune.run.caller_settings import recipe_settings
from shardtune.training.worker.adapter_task import root_of
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.base import FSDPSftWorker

OBSERVATION = "observation"
FORM = 'give {"images": {camera: uint8 [H, W, 3]}, "instruction": text, "state": float32 [S] or None}'


class TrainedPolicy:
    """A policy that acts: of a run (`run.policy()`) or of a directory (`load_policy`).

    ```python
    policy = shardtune.load_policy("runs/vla-flow")
    policy.reset()  # at the start of an episode
    while not done:
        action = policy.select_action({"images": {"top": image}, "state": state, "instruction": "push the cart"})
        ...  # float32 [A], in the units of the training data
    ```

    Args:
        worker: with the model.
        chunks: what is executed of a predicted chunk.

    Attributes:
        cameras: of the training data, where the model knows them.
        spare_cameras: how many of these an observation may lack.
        has_values: whether the model has values: a value head, or an adapter's own.
        unread: `state` and `instruction`, of an observation, where it is known that the model does not read them.
    """

    def __init__(self, worker: SFTWorker, chunks: ActionChunks) -> None:
        adapter = worker.adapter
        assert isinstance(adapter, ActingAdapter)
        worker.model.eval()
        self._worker = worker  # holds the weights
        self._predict = absolute_policy(adapter, root_of(worker.model), worker.device)
        self._valuation = adapter.values(root_of(worker.model), worker.device)
        self._chunks = chunks
        self.has_values = self._valuation is not None
        self._steps = adapter.observation_steps
        self._history = ObservationHistory(self._steps)
        self.cameras: tuple[str, ...] | None = None
        self.spare_cameras = 0
        reads_state = reads_instruction = True
        if isinstance(adapter, VisionLanguageAction):
            self.cameras = adapter.settings.cameras
            reads_state = adapter.settings.state == "text"
        elif isinstance(adapter, Policy):
            self.cameras, self.spare_cameras = adapter.cameras, adapter.spare_cameras
            reads_state, reads_instruction = bool(adapter.features.state), isinstance(adapter, FlowPolicy)
        read = {"state": reads_state or adapter.representation is not None, "instruction": reads_instruction}
        self.unread = tuple(part for part, is_read in read.items() if not is_read)

    def reset(self) -> None:
        """Begin an episode: forget earlier observations, and the actions that are left of the last prediction."""
        self._chunks.reset()
        self._history.reset()

    @recipe_settings()
    def select_action(self, observation: Mapping[str, Any]) -> np.ndarray:
        """The next action, float32 [A] in the units of the training data.

        The model is called if no action of the last prediction is left.

        Args:
            observation: `images` by the names of the training data's cameras: uint8 [H, W, 3], a path or an image of
                Pillow's; `instruction`; `state`, float32 [S], where the model takes one.

        Raises:
            ConfigError: the observation is of another form.
        """
        seen = self._history.see(checked_observation(observation))
        if self._chunks.empty:
            self._chunks.add(self._predicted([seen])[0])
        return self._chunks.take()

    @recipe_settings()
    def predict_action_chunk(self, observation: Mapping[str, Any]) -> np.ndarray:
        """The next C actions after an observation alone, float32 [C, A]; what `select_action` has left stays."""
        return self.predict_action_chunks([observation])[0]

    @recipe_settings()
    def predict_action_chunks(self, observations: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """The next C actions of each of several observations, float32 [observations, C, A], in one batch."""
        return self._predicted([ObservationHistory(self._steps).see(checked_observation(one)) for one in observations])

    @recipe_settings()
    def value(self, observation: Mapping[str, Any]) -> float:
        """The return that the model expects after an observation alone.

        Raises:
            ConfigError: the model has no values, or the observation is of another form.
        """
        return float(self.values([observation])[0])

    @recipe_settings()
    def values(self, observations: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """The returns that the model expects after each of several observations, float32 [observations]."""
        if self._valuation is None:
            raise ConfigError(
                "the policy has no values",
                where=type(self._worker.adapter).__name__,
                remedy="train it with model.add_value_head: true; an adapter of your own has them by its method values",
            )
        seen = [ObservationHistory(self._steps).see(checked_observation(one)) for one in observations]
        with _known_images(seen[0]):
            found = np.asarray(self._valuation(seen), np.float32)
        if found.shape != (len(seen),):
            raise ModelError(
                f"the policy gave values of shape {list(found.shape)} for {len(seen)} observations",
                where=f"{type(self._worker.adapter).__name__}.values",
                remedy=f"return [{len(seen)}]",
            )
        return found

    def _predicted(self, observations: Sequence[Observation]) -> np.ndarray:
        with _known_images(observations[0]):
            found = np.asarray(self._predict(observations), np.float32)
        if found.ndim != 3 or len(found) != len(observations):
            raise ModelError(
                f"the policy gave actions of shape {list(found.shape)} for {len(observations)} observations",
                where=f"{type(self._worker.adapter).__name__}.policy",
                remedy=f"return [{len(observations)}, steps of a chunk, dimensions]",
            )
        for number, chunk in enumerate(found):
            place = f", for observation {number} of {len(found)}" if len(found) > 1 else ""
            check_finite(chunk, place, type(self._worker.adapter).__name__)
        return found


@contextmanager
def _known_images(observation: Observation) -> Iterator[None]:
    """An adapter's KeyError for a camera that an observation does not show, as a message with its line of code."""
    try:
        yield
    except KeyError as error:
        images, key = observation["images"], error.args[0] if error.args else None
        if not isinstance(key, str) or key in images:
            raise
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise ModelError(
            f"the policy reads {key!r} ({Path(line.filename).name}:{line.lineno}), the observation has the cameras "
            f"{', '.join(images) or 'none'}",
            where=f"{OBSERVATION}['images']",
            remedy="name the cameras as the training data do, and show all that the policy reads",
        ) from error


def checked_observation(given: Mapping[str, Any]) -> Observation:
    """An observation in the form of an environment's.

    Raises:
        ConfigError: it has other keys, or values of another kind.
    """
    known = Observation.__required_keys__
    if not isinstance(given, Mapping) or not given.keys() <= known or not isinstance(given.get("images"), Mapping):
        has = f"has {', '.join(map(str, given)) or 'nothing'}" if isinstance(given, Mapping) else f"is {given!r:.60}"
        raise ConfigError(f"the observation {has}", where=OBSERVATION, remedy=FORM)
    images: dict[str, np.ndarray] = {}
    for camera, image in given["images"].items():
        try:
            images[camera] = np.asarray(read_image(image, Path.cwd()).read())
        except RowError as error:
            place = f"{OBSERVATION}['images']"
            raise ConfigError(f"camera {camera}: {error.reason}", where=place, remedy=FORM) from error
    state, instruction = given.get("state"), given.get("instruction", "")
    if not isinstance(instruction, str):
        raise ConfigError(f"the instruction is {instruction!r:.60}", where=f"{OBSERVATION}['instruction']", remedy=FORM)
    if state is not None:
        place = f"{OBSERVATION}['state']"
        try:
            state = np.asarray(state, np.float32)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the state is {state!r:.60}", where=place, remedy=FORM) from error
        if state.ndim != 1 or not np.isfinite(state).all():
            what = f"the state is {state.tolist()!r:.60}, not a vector of finite numbers"
            raise ConfigError(what, where=place, remedy=FORM)
    return {"images": images, "instruction": instruction, "state": state}


def acting_by(unnorm_key: str | None) -> tuple[str, ...]:
    """The override of a recipe by which its model acts with the statistics of a data set; None: none."""
    return () if unnorm_key is None else (f"model.unnorm_key={json.dumps(unnorm_key)}",)


def acting_policy(
    worker: FSDPSftWorker, config: EvalConfig, action_steps: int | None, temporal_ensembling: float | None
) -> TrainedPolicy:
    """The policy of a worker with weights.

    Args:
        worker: ready to evaluate.
        config: `eval` of its recipe, which applies where neither of the others is given.
        action_steps: actions between two predictions.
        temporal_ensembling: the exponent of its weights.

    Raises:
        ConfigError: the model does not act.
    """
    if not isinstance(worker, SFTWorker) or not isinstance(worker.adapter, ActingAdapter):
        kind = type(worker.adapter).__name__ if isinstance(worker, SFTWorker) else type(worker).__name__
        raise ConfigError(
            f"{kind} describes no model that acts",
            where="actor.model",
            remedy="train one with model.model_type: vision_language_action, or with an adapter that derives from "
            "shardtune.models.action.acting.ActingAdapter",
        )
    if action_steps is None and temporal_ensembling is None:
        action_steps, temporal_ensembling = config.action_steps, config.temporal_ensembling
    if action_steps is None and temporal_ensembling is None:
        action_steps, temporal_ensembling = worker.adapter.action_steps, worker.adapter.temporal_ensembling
    return TrainedPolicy(worker, ActionChunks(action_steps, temporal_ensembling))
