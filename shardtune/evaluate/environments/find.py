"""The environment that a recipe names; faults in its code become errors that name it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardtune.config.user_code import load_function, named_errors
from shardtune.errors import ConfigError
from shardtune.evaluate.environments.gymnasium_environment import PREFIX, is_gymnasium, make_gymnasium
from shardtune.models.action.environment import Environment, Observation, Outcome

KEY = "eval.environment"
OPTIONS = "eval.environment_options"
BUILT_IN = {"reach": "reach:Reach", "point2d": "point2d:Point2d"}
"""From the name in a recipe to module and class in this package."""
PAGE = "docs/closed-loop.md shows one"


@dataclass(frozen=True, slots=True)
class EnvironmentSource:
    """The class of an environment and its arguments, from a recipe.

    Attributes:
        spec: a built-in name, gymnasium:ID, package.module:Class or file.py:Class.
        options: the arguments of the class.
    """

    spec: str
    options: Mapping[str, object]

    @property
    def name(self) -> str:
        return self.spec.rpartition(":")[2]

    def kind(self) -> type[Environment]:
        """The class.

        Raises:
            ConfigError: the file has no such class, or it is no environment.
        """
        if self.spec in BUILT_IN:
            module, _, name = BUILT_IN[self.spec].partition(":")
            return vars(importlib.import_module(f"{__package__}.{module}"))[name]
        found = self._named()
        if not (inspect.isclass(found) and issubclass(found, Environment)):
            raise ConfigError(
                f"{self.name} is no environment",
                where=f"{KEY}: {self.spec}",
                remedy="derive it from shardtune.models.action.environment.Environment; " + PAGE,
            )
        lacking = sorted(found.__abstractmethods__)
        if lacking:
            raise ConfigError(
                f"the environment {self.name} lacks {', '.join(lacking)}",
                where=f"{KEY}: {self.spec}",
                remedy="write it; " + PAGE,
            )
        return found

    def _named(self) -> object:
        """What the recipe names, in a file or in an installed package."""
        module, _, name = self.spec.rpartition(":")
        if module.endswith(".py"):
            return load_function(self.spec, KEY)
        try:
            return vars(importlib.import_module(module))[name]
        except (ImportError, KeyError) as error:
            raise ConfigError(
                f"{module} has no class {name!r}"
                if isinstance(error, KeyError)
                else f"{module} cannot be imported: {error}",
                where=f"{KEY}: {self.spec}",
                remedy="name a class of an installed package, or file.py:Class",
            ) from error

    def make(self) -> Environment:
        """A new environment.

        Raises:
            ConfigError: the class takes other options, or fails.
        """
        if self.spec.startswith(PREFIX):
            return make_gymnasium(self.spec, None, self.options)
        if self.spec not in BUILT_IN:
            named = self._named()
            if inspect.isclass(named) and is_gymnasium(named):
                return make_gymnasium(self.spec, named, self.options)
        kind = self.kind()
        try:
            inspect.signature(kind).bind(**self.options)
        except TypeError as error:
            known = ", ".join(inspect.signature(kind).parameters) or "none"
            raise ConfigError(
                f"{self.name} takes other options: {error}", where=OPTIONS, remedy=f"it has {known}"
            ) from None
        with named_errors(self.spec, KEY, "__init__"):
            made = kind(**self.options)
        for name, value in (("max_steps", made.max_steps), ("frames_per_second", made.frames_per_second)):
            if type(value) is not int or value < 1:
                raise _fault(f"{self.name}.{name} is {value!r}", "give a whole number, 1 or more")
        return made


def checked_reset(environment: Environment, source: EnvironmentSource, episode: int, seed: int) -> Observation:
    """The first observation of an episode.

    Raises:
        ConfigError: `reset` failed, or did not return an `Observation`.
    """
    place = f"episode {episode}, seed {seed}"
    with named_errors(source.spec, KEY, f"reset ({place})"):
        observation = environment.reset(seed)
    _check_observation(observation, f"{source.name}.reset ({place})")
    return observation


def checked_step(environment: Environment, source: EnvironmentSource, action: np.ndarray, place: str) -> Outcome:
    """The outcome of an action.

    Args:
        environment: in the middle of an episode.
        source: of the environment.
        action: float32 [A].
        place: the episode, its seed and the action's number, for messages.

    Raises:
        ConfigError: `step` failed, or did not return an `Outcome`.
    """
    with named_errors(source.spec, KEY, f"step ({place})"):
        outcome = environment.step(action)
    where = f"{source.name}.step ({place})"
    if not isinstance(outcome, Outcome):
        what = f"{where} returned a {type(outcome).__name__}, not an Outcome"
        raise _fault(what, "return Outcome(observation, success, done)")
    for name, value in (("success", outcome.success), ("done", outcome.done)):
        if not isinstance(value, bool | np.bool_):
            raise _fault(f"{where} returned {name} = {value!r}, not True or False", "make it a bool")
    _check_observation(outcome.observation, where)
    return Outcome(outcome.observation, bool(outcome.success), bool(outcome.done))


def checked_render(environment: Environment, source: EnvironmentSource, place: str) -> np.ndarray | None:
    """The picture of an environment for a video; None: it has none of its own.

    Raises:
        ConfigError: `render` failed.
    """
    with named_errors(source.spec, KEY, f"render ({place})"):
        return environment.render()


def close_all(environments: Sequence[Environment], source: EnvironmentSource) -> None:
    """Close environments, each of them also where the `close` of another fails.

    Raises:
        ConfigError: one failed, and nothing else is being raised, which would be hidden.
    """
    failed: ConfigError | None = None
    is_raising = sys.exc_info()[1] is not None
    for environment in environments:
        try:
            with named_errors(source.spec, KEY, "close"):
                environment.close()
        except ConfigError as error:
            failed = failed or error
    if failed is not None and not is_raising:
        raise failed


def _check_observation(observation: object, where: str) -> None:
    """Refuse anything that is no `Observation`."""
    expected = set(Observation.__required_keys__)
    if not isinstance(observation, Mapping) or set(observation) != expected:
        what = (
            f"a dict of {', '.join(map(str, observation))}" if isinstance(observation, Mapping) else repr(observation)
        )
        raise _fault(f"{where} returned {what} as its observation", "return a dict of images, instruction and state")
    images, state, instruction = observation["images"], observation["state"], observation["instruction"]
    if not isinstance(images, Mapping) or not images:
        raise _fault(f"{where} returned no images", "images is a dict, camera to uint8 [H, W, 3]")
    for camera, image in images.items():
        fine = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
        if not fine:
            what = f"{where} returned {_kind(image)} as the image of {camera!r}"
            raise _fault(what, "give uint8 [H, W, 3] with values from 0 to 255")
    if not isinstance(instruction, str) or not instruction.strip():
        raise _fault(f"{where} returned {instruction!r} as the instruction", "say in words what is to be done")
    if state is None:
        return
    if not isinstance(state, np.ndarray) or state.dtype != np.float32 or state.ndim != 1:
        raise _fault(f"{where} returned {_kind(state)} as the state", "give float32 [S], or None")
    if not np.isfinite(state).all():
        raise _fault(f"{where} returned the state {state.tolist()}", "give finite numbers")


def _kind(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def _fault(what: str, remedy: str) -> ConfigError:
    return ConfigError(what, where=KEY, remedy=f"{remedy}; {PAGE}")
