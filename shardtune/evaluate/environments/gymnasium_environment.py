"""Environments of gymnasium as they are: their observations and successes by a mapping that the recipe may change."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from shardtune.errors import ConfigError
from shardtune.models.action.environment import Environment, Observation, Outcome

PREFIX = "gymnasium:"
OPTIONS = "eval.environment_options"
RENDERED = "render"
STATES = ("agent_pos", "state", "observation.state", "proprio")
INSTRUCTIONS = ("instruction", "task", "language_instruction", "task_description")
SUCCESSES = ("is_success", "success")


class GymnasiumOptions(BaseModel):
    """The options of `eval.environment_options` that say what an environment's values mean; others are its own.

    Attributes:
        cameras: camera -> the name of its images in the observation, with dots (`pixels.top`), or `render`: what
            `render()` gives. By default all images in the observation, by the last part of their names; without any
            one camera, `image`, of `render()`.
        state: names in the observation, joined in this order. By default the first of `agent_pos`, `state`,
            `observation.state`, `proprio`; of an observation that is a vector, that.
        instruction: the task in words. By default `instruction`, `task`, `language_instruction` or `task_description`
            in the observation, in `info` or as an attribute of the environment.
        success_reward: an action with at least this reward is a success. By default `is_success` or `success` in
            `info`.
        max_steps: actions after which an episode fails; by default the environment's own limit.
        frames_per_second: of videos; by default the environment's `render_fps`.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    cameras: dict[str, str] | None = None
    state: list[str] | None = None
    instruction: str | None = None
    success_reward: float | None = None
    max_steps: int | None = None
    frames_per_second: int | None = None


class GymnasiumEnvironment(Environment):
    """An environment of gymnasium, or a vector environment with one.

    Args:
        made: it.
        options: what its values mean.
    """

    def __init__(self, made: Any, options: GymnasiumOptions) -> None:
        self._made, self._options, self._steps = made, options, 0
        self._vector = _derives(type(made), "VectorEnv")
        if self._vector and made.num_envs != 1:
            raise _fault(
                f"the vector environment holds {made.num_envs} environments",
                "let it hold one (num_envs: 1); eval.episodes_at_once says how many are played side by side",
            )
        spec, rate = made.spec, (made.metadata or {}).get("render_fps")
        limit = None if spec is None else spec.max_episode_steps
        self.max_steps = options.max_steps or limit or Environment.max_steps
        self.frames_per_second = options.frames_per_second or int(rate or Environment.frames_per_second)
        self._space = made.single_action_space if self._vector else made.action_space
        if self._space.shape is None or not np.issubdtype(self._space.dtype, np.floating):
            raise _fault(f"the actions are {self._space}, not a Box of numbers", "choose an environment of a robot")

    def reset(self, seed: int) -> Observation:
        self._steps = 0
        observation, info = self._made.reset(seed=seed)
        return self._observation(observation, info)

    def step(self, action: np.ndarray) -> Outcome:
        shaped = np.asarray(action, self._space.dtype).reshape(self._space.shape)
        given = self._made.step(shaped[None] if self._vector else shaped)
        observation, reward, terminated, truncated, info = given
        self._steps += 1
        ended = bool(np.all(terminated)) or bool(np.all(truncated))
        if ended and self._vector:
            observation, info = _last_of_episode(observation, info)
        last = ended or self._steps >= self.max_steps
        success = self._success(float(np.ravel(reward)[0]), info, last=last)
        return Outcome(self._observation(observation, info), success, ended)

    def render(self) -> np.ndarray | None:
        if self._made.render_mode not in ("rgb_array", "rgb_array_list"):
            return None
        found = self._made.render()
        return np.asarray(found[-1] if isinstance(found, Sequence) else found)

    def close(self) -> None:
        self._made.close()

    def _observation(self, observation: Any, info: Mapping[str, Any]) -> Observation:
        found = dict(_leaves(observation, vector=self._vector))
        return {
            "images": self._images(found),
            "instruction": self._instruction(found, info),
            "state": self._state(found),
        }

    def _images(self, found: Mapping[str, Any]) -> dict[str, np.ndarray]:
        cameras = self._options.cameras
        if cameras is None:
            names = [name for name, value in found.items() if _is_image(value)]
            cameras = {name.rpartition(".")[2] or "image": name for name in names} or {"image": RENDERED}
        images = {}
        for camera, name in cameras.items():
            image = self.render() if name == RENDERED else found.get(name)
            if image is None:
                what = "gives no picture (render_mode: rgb_array)" if name == RENDERED else "is not in the observation"
                raise _fault(f"{name}, the camera {camera!r}, {what}", f"it has {', '.join(found) or 'one value'}")
            images[camera] = np.ascontiguousarray(image)
        return images

    def _state(self, found: Mapping[str, Any]) -> np.ndarray | None:
        names = self._options.state
        if names is None:
            names = [name for name in ("", *STATES) if name in found and not _is_image(found[name])][:1]
        missing = [name for name in names if name not in found]
        if missing:
            raise _fault(f"the state {missing[0]!r} is not in the observation", f"it has {', '.join(found)}")
        return np.concatenate([np.ravel(found[name]) for name in names]).astype(np.float32) if names else None

    def _instruction(self, found: Mapping[str, Any], info: Mapping[str, Any]) -> str:
        if self._options.instruction is not None:
            return self._options.instruction
        for values in (found, info, vars(self._made.unwrapped)):
            for name in INSTRUCTIONS:
                text = np.ravel(values[name])[0] if self._vector and name in values else values.get(name)
                if isinstance(text, str) and text.strip():
                    return str(text)
        raise _fault("the environment gives no instruction", f"write it: {OPTIONS}.instruction")

    def _success(self, reward: float, info: Mapping[str, Any], *, last: bool) -> bool:
        if self._options.success_reward is not None:
            return reward >= self._options.success_reward
        for name in SUCCESSES:
            if name in info:
                return bool(np.ravel(info[name])[0])
        if last:
            raise _fault(
                "an episode ended, and its info has neither is_success nor success",
                f"set {OPTIONS}.success_reward: the reward from which on an action is a success",
            )
        return False


def _last_of_episode(observation: Any, info: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """What an ended episode shows last: a vector environment that begins the next one in the same step
    (`AutoresetMode.SAME_STEP`) has it in `info`, beside the next one's observation and info."""
    if "final_obs" not in info:
        return observation, info
    return _batched(info["final_obs"][0]), info["final_info"]


def _batched(value: Any) -> Any:
    """The observation of one environment in the form of a vector environment's."""
    if isinstance(value, Mapping):
        return {name: _batched(inner) for name, inner in value.items()}
    return [value]


def is_gymnasium(kind: object) -> bool:
    """Whether a class derives from gymnasium's `Env` or `VectorEnv`; gymnasium itself is not needed."""
    return inspect.isclass(kind) and (_derives(kind, "Env") or _derives(kind, "VectorEnv"))


def _derives(kind: type, name: str) -> bool:
    return any(base.__name__ == name and base.__module__.partition(".")[0] == "gymnasium" for base in kind.__mro__)


def make_gymnasium(spec: str, kind: Callable[..., Any] | None, options: Mapping[str, object]) -> GymnasiumEnvironment:
    """An environment by its id, or by its class.

    Args:
        spec: as the recipe has it, `gymnasium:ID` where `kind` is None.
        kind: the class.
        options: `eval.environment_options`.

    Raises:
        ConfigError: gymnasium is not installed, there is no such id, an option has a wrong type, or the values of the
            environment have no meaning here.
    """
    own = {name: value for name, value in options.items() if name in GymnasiumOptions.model_fields}
    rest = {name: value for name, value in options.items() if name not in own}
    try:
        meaning = GymnasiumOptions.model_validate(own)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"{first['loc'][0]}: {first['msg']}", where=OPTIONS, remedy="see docs/closed-loop.md"
        ) from None
    try:
        import gymnasium
    except ImportError as error:
        raise _fault("gymnasium is not installed", "pip install 'shardtune[gymnasium]'") from error
    try:
        made = (
            gymnasium.make(spec.removeprefix(PREFIX), **{"render_mode": "rgb_array", **rest})
            if kind is None
            else (kind(**rest))
        )
    except Exception as error:  # an environment may raise anything
        raise ConfigError(
            f"the environment cannot be made: {type(error).__name__}: {error}",
            where=f"eval.environment: {spec}",
            remedy=f"check its id or class, and {OPTIONS}",
        ) from error
    return GymnasiumEnvironment(made, meaning)


def _leaves(value: Any, *, vector: bool, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values of an observation by their names, joined by dots; one that is no dict has the name ""."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, vector=vector, name=f"{name}.{key}" if name else str(key))
    else:
        yield name, value[0] if vector else value


def _is_image(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3


def _fault(what: str, remedy: str) -> ConfigError:
    return ConfigError(what, where="eval.environment", remedy=remedy)
