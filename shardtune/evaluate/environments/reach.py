"""A task in MuJoCo (the `[sim]` extra): a robot hand over a table touches a ball, seen by a camera at its wrist.

The hand moves along three sliding joints. An action is a movement in metres along x, y and z, which position servos
follow in simulated time. The camera moves with the hand, so the ball's place in the image gives the direction to it.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from shardtune.errors import ConfigError
from shardtune.evaluate.environments.scripted import ScriptedEnvironment
from shardtune.models.action.environment import Observation, Outcome

CAMERA = "wrist"
COLOURS = {"red": "0.85 0.10 0.10 1", "blue": "0.10 0.20 0.85 1"}
STRIDE = 0.03
"""The largest movement of one action along each axis, in metres."""
NEAR = 0.02
"""The largest distance in metres between the hand's tip and the ball's centre that counts as touching it."""
HOLD = 2
"""Consecutive steps for which the tip has to stay there."""
REACH = 0.12
"""Balls and the hand at first lie in -REACH..REACH along x and y."""
APART = 0.08
BALL = 0.022
LOWEST, HIGHEST = 0.0, 0.30
START_HEIGHTS = (0.16, 0.26)
SUBSTEPS = 10
VIEW_SIZE = 192

MODEL = f"""
<mujoco model="reach">
  <option timestep="0.01" gravity="0 0 0"/>
  <visual>
    <global offwidth="{VIEW_SIZE * 4}" offheight="{VIEW_SIZE * 4}"/>
    <quality shadowsize="0" offsamples="0"/>
    <headlight ambient="0.5 0.5 0.5" diffuse="0.5 0.5 0.5" specular="0 0 0"/>
  </visual>
  <default>
    <geom contype="0" conaffinity="0"/>
    <joint type="slide" damping="2"/>
    <position kp="400" kv="40"/>
  </default>
  <worldbody>
    <geom name="table" type="box" size="0.6 0.6 0.01" pos="0 0 -0.01" rgba="0.85 0.83 0.78 1"/>
    <body name="bridge">
      <joint name="x" axis="1 0 0"/>
      <geom type="box" size="0.005 0.5 0.005" pos="0 0 0.45" rgba="0.5 0.5 0.55 1" mass="0.5"/>
      <body name="carriage">
        <joint name="y" axis="0 1 0"/>
        <geom type="box" size="0.015 0.015 0.015" pos="0 0 0.45" rgba="0.4 0.4 0.45 1" mass="0.5"/>
        <body name="hand">
          <joint name="z" axis="0 0 1"/>
          <geom type="capsule" fromto="0 0 0.006 0 0 0.06" size="0.006" rgba="0.2 0.2 0.2 1" mass="0.5"/>
          <geom type="capsule" fromto="0 0 0.105 0 0 0.45" size="0.008" rgba="0.3 0.3 0.3 1" mass="0.2"/>
          <camera name="{CAMERA}" pos="0 -0.05 0.10" euler="20 0 0" fovy="80"/>
        </body>
      </body>
    </body>
    {
    "".join(
        f'<body name="{name}" mocap="true"><geom type="sphere" size="{BALL}" rgba="{rgba}"/></body>'
        for name, rgba in COLOURS.items()
    )
}
    <camera name="view" pos="0 -0.42 0.36" xyaxes="1 0 0 0 0.62 0.785" fovy="50"/>
  </worldbody>
  <actuator><position joint="x"/><position joint="y"/><position joint="z"/></actuator>
</mujoco>
"""


class Reach(ScriptedEnvironment):
    """Touch the red or the blue ball.

    Observations hold the image of the camera `wrist` and the hand's position [3] in metres. Actions [3] are metres,
    cut to STRIDE along each axis.

    Args:
        image_size: pixels of the camera's image, which is square.
        balls: 1: only the target lies on the table; 2: both balls do, and the instruction names the target.
        max_steps: actions after which an episode has failed.

    Raises:
        ConfigError: MuJoCo is not installed, or cannot render on this machine.
    """

    disturbance = 0.012
    disturbed = 0.5

    def __init__(self, image_size: int = 48, balls: int = 1, max_steps: int = 40) -> None:
        if balls not in (1, 2):
            raise ConfigError(
                f"reach has {balls!r} balls", where="eval.environment_options = balls", remedy="give 1 or 2"
            )
        self.max_steps = max_steps
        self._mujoco = _import_mujoco()
        self._model = _model()
        self._data = self._mujoco.MjData(self._model)
        self._image_size, self._balls = image_size, balls
        self._target, self._held = "red", 0
        _renderer(image_size)

    def reset(self, seed: int) -> Observation:
        random = np.random.default_rng(seed)
        self._mujoco.mj_resetData(self._model, self._data)
        self._target, self._held = str(random.choice(list(COLOURS))), 0
        start = np.append(random.uniform(-REACH, REACH, 2), random.uniform(*START_HEIGHTS))
        self._data.qpos[:] = self._data.ctrl[:] = start
        places = [random.uniform(-REACH, REACH, 2)]
        while len(places) < 2:
            place = random.uniform(-REACH, REACH, 2)
            if np.linalg.norm(place - places[0]) > APART:
                places.append(place)
        others = [name for name in COLOURS if name != self._target]
        for name, place in zip([self._target, *others], places, strict=True):
            on_table = name == self._target or self._balls == 2
            self._data.mocap_pos[self._index(name)] = [*place, BALL] if on_table else [0, 0, -1]
        self._mujoco.mj_forward(self._model, self._data)
        return self._observe()

    def step(self, action: np.ndarray) -> Outcome:
        position = self._data.ctrl + np.clip(action, -STRIDE, STRIDE)
        self._data.ctrl[:] = np.clip(position, [-2 * REACH, -2 * REACH, LOWEST], [2 * REACH, 2 * REACH, HIGHEST])
        self._mujoco.mj_step(self._model, self._data, SUBSTEPS)
        self._mujoco.mj_forward(self._model, self._data)
        self._held = self._held + 1 if np.linalg.norm(self.to_target()) < NEAR else 0
        success = self._held >= HOLD
        return Outcome(self._observe(), success, success)

    def to_target(self) -> np.ndarray:
        """From the hand's tip to the target's centre, float64 [3] in metres."""
        return self._data.mocap_pos[self._index(self._target)] - self._data.qpos

    def expert(self) -> np.ndarray:
        """An action from the simulator's state, float32 [3]: towards the target, and down once above it."""
        way = self.to_target()
        way[2] += max(0.0, float(np.linalg.norm(way[:2])) - NEAR)
        return np.clip(0.6 * way, -STRIDE, STRIDE).astype(np.float32)

    def render(self) -> np.ndarray:
        return self._picture("view", VIEW_SIZE)

    def _observe(self) -> Observation:
        return {
            "images": {CAMERA: self._picture(CAMERA, self._image_size)},
            "instruction": f"touch the {self._target} ball",
            "state": self._data.qpos.astype(np.float32),
        }

    def _picture(self, camera: str, size: int) -> np.ndarray:
        renderer = _renderer(size)
        renderer.update_scene(self._data, camera=camera)
        return renderer.render().copy()

    def _index(self, name: str) -> int:
        return int(self._model.body_mocapid[self._model.body(name).id])


def _import_mujoco() -> ModuleType:
    """The package, set to render without a screen on Linux unless MUJOCO_GL is given.

    Raises:
        ConfigError: it is not installed, or finds no OpenGL.
    """
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        return importlib.import_module("mujoco")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the environment reach needs MuJoCo: {error}",
            where="eval.environment = reach",
            remedy="pip install 'shardtune[sim]', or use point2d, which needs nothing",
        ) from error
    except (AttributeError, ImportError, RuntimeError) as error:  # what is raised differs from one MUJOCO_GL to another
        raise _no_rendering(error) from error


def _no_rendering(error: BaseException) -> ConfigError:
    return ConfigError(
        f"MuJoCo cannot render on this machine (MUJOCO_GL={os.environ.get('MUJOCO_GL', '')}): {error}",
        where="eval.environment = reach",
        remedy="install Mesa's software rendering (Debian, Ubuntu: apt install libegl1 libgl1-mesa-dri, with "
        "MUJOCO_GL=egl; or libosmesa6 with MUJOCO_GL=osmesa), or use point2d, which needs no OpenGL",
    )


@lru_cache(maxsize=1)
def _model() -> Any:
    return _import_mujoco().MjModel.from_xml_string(MODEL)


_renderers: dict[int, Any] = {}  # by image size: their OpenGL contexts are shared


def _renderer(size: int) -> Any:
    if size not in _renderers:
        mujoco = _import_mujoco()
        try:
            _renderers[size] = mujoco.Renderer(_model(), size, size)
        except (AttributeError, ImportError, RuntimeError, mujoco.FatalError) as error:
            raise _no_rendering(error) from error
        if len(_renderers) == 1:  # registered after MuJoCo's own exit handlers, so it runs before them
            atexit.register(_close_renderers)
    return _renderers[size]


def _close_renderers() -> None:
    """Free the contexts while the libraries that made them are still loaded."""
    while _renderers:
        _renderers.popitem()[1].close()
