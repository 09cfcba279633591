"""Environments of gymnasium, as they are: their values, what is said of them in the recipe, and what is refused."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from shardtune.config import load_recipe
from shardtune.config.own_code import named_code
from shardtune.config.values import EnvironmentName
from shardtune.errors import ConfigError
from shardtune.evaluate.closed_loop import ClosedLoop, play
from shardtune.evaluate.environments.find import EnvironmentSource
from tests.parallel.test_fsdp2 import group

gymnasium = pytest.importorskip("gymnasium", reason="the environments are gymnasium's")
HERE = "tests.evaluate.environments.test_gymnasium_environment"


class Rail(gymnasium.Env):
    """A cart to be moved to 0; success is in `info` or in the reward."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 7}

    def __init__(self, told: bool = True, speed: float = 1.0, render_mode: str = "rgb_array") -> None:
        self.render_mode = render_mode
        self.action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        self.observation_space = gymnasium.spaces.Dict(
            {
                "pixels": gymnasium.spaces.Dict({"top": gymnasium.spaces.Box(0, 255, (4, 6, 3), np.uint8)}),
                "agent_pos": gymnasium.spaces.Box(-9, 9, (1,), np.float64),
            }
        )
        self.task, self._told, self._speed = "go to the mark", told, speed

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._place = float(self.np_random.uniform(1, 3))
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action.shape == (1,)
        self._place += float(action[0]) * self._speed
        near = abs(self._place) < 0.6
        return self._seen(), float(near), near, False, {"is_success": near} if self._told else {}

    def render(self) -> np.ndarray:
        return np.full((8, 8, 3), 9, np.uint8)

    def _seen(self) -> dict[str, Any]:
        return {"pixels": {"top": np.full((4, 6, 3), 5, np.uint8)}, "agent_pos": np.array([self._place])}


class Rails(gymnasium.vector.SyncVectorEnv):
    """The same as a vector environment."""

    def __init__(self, num_envs: int) -> None:
        super().__init__([Rail] * num_envs)


class Restarting(gymnasium.vector.SyncVectorEnv):
    """A vector environment that begins the next episode in the step that ends one, as LeRobot makes them."""

    def __init__(self) -> None:
        super().__init__([Told], autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)


class Told(Rail):
    """Its `info` says of a new episode, too, that it is no success yet."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        seen, info = super().reset(seed=seed, options=options)
        return seen, {**info, "is_success": False}


def back(observations: Any) -> np.ndarray:
    """A step towards the mark."""
    return np.stack([-np.clip(seen["state"], -1, 1)[None] for seen in observations])


def played(spec: str, **options: Any) -> list[tuple[int, bool, int, str]]:
    loop = ClosedLoop(EnvironmentSource(spec, options), 4, 0, None, 2, 0, "gif")
    loop.check()
    episodes = play(loop, back, group()).episodes
    return [(one.seed, one.success, one.steps, one.instruction) for one in episodes]


def test_the_same_episodes_in_every_form() -> None:
    found = played(f"{HERE}:Rail")
    assert [success for _, success, *_ in found] == [True] * 4
    assert len({steps for *_, steps, _ in found}) > 1
    assert {task for *_, task in found} == {"go to the mark"}
    assert played(f"{HERE}:Rail", told=False, success_reward=1.0) == found
    assert played(f"{HERE}:Rails", num_envs=1, instruction="go to the mark") == found
    assert played(f"{HERE}:Restarting", instruction="go to the mark") == found
    gymnasium.register("Rail-v0", f"{HERE}:Rail", max_episode_steps=2)
    short = played("gymnasium:Rail-v0", instruction="go", speed=0.1)
    assert [(success, steps) for _, success, steps, _ in short] == [(False, 2)] * 4


def test_the_last_observation_of_an_episode_is_its_own() -> None:
    made = EnvironmentSource(f"{HERE}:Restarting", {"instruction": "go"}).make()
    near = made.reset(0)["state"]
    while not (outcome := made.step(np.full(1, -0.5, np.float32))).done:
        pass
    assert outcome.success
    assert abs(float(outcome.observation["state"][0])) < 0.6 < float(near[0])
    assert outcome.observation["images"]["top"].shape == (4, 6, 3)


def test_the_values_of_an_observation() -> None:
    made = EnvironmentSource(f"{HERE}:Rail", {}).make()
    seen = made.reset(0)
    assert (list(seen["images"]), seen["state"].dtype, made.frames_per_second) == (["top"], np.float32, 7)
    named = {"cameras": {"eye": "pixels.top", "side": "render"}, "state": ["agent_pos", "agent_pos"]}
    seen = EnvironmentSource(f"{HERE}:Rail", named).make().reset(0)
    assert {camera: image.shape for camera, image in seen["images"].items()} == {"eye": (4, 6, 3), "side": (8, 8, 3)}
    assert seen["state"].shape == (2,)
    cart = EnvironmentSource("gymnasium:Pendulum-v1", {"render_mode": None, "instruction": "balance"})
    with pytest.raises(ConfigError, match="render, the camera 'image', gives no picture"):
        cart.make().reset(0)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (f"{HERE}:Rail", {"told": False}, "neither is_success nor success"),
        (
            f"{HERE}:Rail",
            {"cameras": {"top": "pixels.left"}},
            "pixels.left, the camera 'top', is not in the observation",
        ),
        (f"{HERE}:Rail", {"state": ["joints"]}, "the state 'joints' is not in the observation"),
        (f"{HERE}:Rail", {"success_reward": "high"}, "success_reward: Input should be a valid number"),
        (f"{HERE}:Rails", {"num_envs": 2}, "holds 2 environments"),
        (f"{HERE}:Raill", {}, "has no class 'Raill'"),
        ("gymnasium:No-v0", {}, "the environment cannot be made"),
        ("gymnasium:CartPole-v1", {"render_mode": None}, r"the actions are Discrete\(2\)"),
    ],
)
def test_what_has_no_meaning_is_refused(spec: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        played(spec, **options)


def test_names_of_environments() -> None:
    from pydantic import TypeAdapter, ValidationError

    values: dict[str, Any] = {"model": {"adapter": "robot.py:Policy"}, "data": {"train_data_paths": "rows.jsonl"}}
    values["eval"] = {"environment": "gymnasium:sims:Bench-v0"}
    named = named_code(load_recipe(values, files_must_exist=False))
    assert named.get("gymnasium:sims:Bench-v0") == "eval.environment", "it is executed without consent"
    name = TypeAdapter(EnvironmentName)
    for good in ("reach", "gymnasium:gym_aloha/AlohaInsertion-v0", "my_robot.sim:Bench", "robot.py:Bench"):
        assert name.validate_python(good) == good
    for wrong in ("reech", "gymnasium:", "my_robot"):
        with pytest.raises(ValidationError):
            name.validate_python(wrong)
