"""The simulators that come along: the same episode for the same seed, experts that succeed, and their recordings."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardtune.data.robot.lerobot_writer import write_lerobot
from shardtune.errors import ConfigError, DataError
from shardtune.evaluate.environments.find import BUILT_IN, EnvironmentSource
from shardtune.evaluate.environments.scripted import ScriptedEnvironment, demonstrations
from shardtune.models.action.environment import Observation

DIMENSIONS = {"reach": 3, "point2d": 2}


@pytest.fixture(params=sorted(BUILT_IN))
def source(request: pytest.FixtureRequest) -> EnvironmentSource:
    """Each of them; MuJoCo's is left out where it cannot render, which is said."""
    found = EnvironmentSource(request.param, {})
    try:
        found.make().close()
    except ConfigError as error:
        pytest.skip(error.what)
    return found


def made(source: EnvironmentSource, **options: Any) -> ScriptedEnvironment:
    environment = EnvironmentSource(source.spec, options).make()
    assert isinstance(environment, ScriptedEnvironment)
    return environment


def same(one: Observation, other: Observation) -> bool:
    pairs = [(one["images"][camera], other["images"][camera]) for camera in one["images"]]
    assert one["state"] is not None
    assert other["state"] is not None
    return (
        all(np.array_equal(*pair) for pair in pairs)
        and np.array_equal(one["state"], other["state"])
        and one["instruction"] == other["instruction"]
    )


def test_an_episode_follows_from_its_seed(source: EnvironmentSource) -> None:
    first, second = made(source), made(source)
    second.reset(1)
    second.step(second.expert())
    assert not same(first.reset(1), first.reset(2))
    assert same(first.reset(7), second.reset(7))
    for _ in range(3):  # beside each other, as one rank plays them
        action = first.expert()
        assert np.array_equal(action, second.expert())
        one, other = first.step(action), second.step(action)
        assert same(one.observation, other.observation)


def successes(environment: ScriptedEnvironment, *, by_expert: bool) -> int:
    """Of 20 episodes."""
    found = 0
    for seed in range(20):
        environment.reset(seed)
        for _ in range(environment.max_steps):
            action = environment.expert()
            outcome = environment.step(action if by_expert else np.zeros_like(action))
            if outcome.done:
                found += outcome.success
                break
    return found


@pytest.mark.lengthy
def test_the_expert_succeeds_and_standing_still_does_not(source: EnvironmentSource) -> None:
    assert successes(made(source), by_expert=True) == 20
    assert successes(made(source), by_expert=False) <= 2


def pixels_in_the_middle(image: np.ndarray) -> dict[str, int]:
    """How many pixels have which colour."""
    size = len(image)
    red, green, blue = image[3 * size // 8 : 5 * size // 8, 3 * size // 8 : 5 * size // 8].reshape(-1, 3).T
    found = {
        "red": (red > 150) & (green < 90),
        "blue": (blue > 150) & (red < 90),
        "green": (green > 120) & (red < 90),
        "yellow": (red > 180) & (green > 150) & (blue < 110),
    }
    return {name: int(pixels.sum()) for name, pixels in found.items()}


@pytest.mark.parametrize(("spec", "options"), [("reach", {"balls": 2}), ("point2d", {"discs": 2})])
def test_the_instruction_says_where_to_go(spec: str, options: dict[str, int]) -> None:
    """The place that the expert goes to is of the colour that the instruction names."""
    try:
        environment = made(EnvironmentSource(spec, {}), **options)
    except ConfigError as error:
        pytest.skip(error.what)
    named = set()
    for seed in range(12):
        observation = environment.reset(seed)
        while not (outcome := environment.step(environment.expert())).done:
            pass
        (image,) = outcome.observation["images"].values()
        counted = pixels_in_the_middle(image.astype(int))
        reached = max(counted, key=lambda name: counted[name])
        assert reached in observation["instruction"].split()
        named.add(reached)
    assert len(named) >= 2


def test_demonstrations_are_written_as_a_data_set(source: EnvironmentSource, tmp_path: Path) -> None:
    environment = made(source, image_size=24)
    episodes = list(demonstrations(environment, 5, seed=1))
    assert len(episodes) == 5
    assert all(episode.actions.shape[1] == DIMENSIONS[source.spec] for episode in episodes)
    again = list(demonstrations(environment, 5, seed=1))
    assert all(np.array_equal(one.actions, other.actions) for one, other in zip(episodes, again, strict=True))
    assert not np.array_equal(next(iter(demonstrations(environment, 1, seed=2))).actions, episodes[0].actions)
    folder = write_lerobot(tmp_path / "demonstrations", episodes, fps=environment.frames_per_second)
    assert (folder / "meta" / "info.json").exists()


def test_an_expert_that_fails_is_said(source: EnvironmentSource) -> None:
    environment = made(source, max_steps=1)
    with pytest.raises(DataError, match="the expert failed in 11 of 11 episodes"):
        list(demonstrations(environment, 1))


def test_reach_without_mujoco_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardtune.evaluate.environments import reach

    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    reach._model.cache_clear()
    with pytest.raises(ConfigError) as error:
        reach.Reach()
    assert "shardtune[sim]" in str(error.value.remedy)
    reach._model.cache_clear()


@pytest.mark.slow
def test_reach_without_opengl_says_what_to_install() -> None:
    import os
    import subprocess
    import sys

    pytest.importorskip("mujoco")
    script = "from shardtune.evaluate.environments.reach import Reach; Reach()"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "MUJOCO_GL": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "MuJoCo cannot render on this machine (MUJOCO_GL=off)" in ended.stderr
    assert "libegl1" in ended.stderr
