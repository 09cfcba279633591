"""`shardtune act`: which images a policy asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from shardtune.cli.commands import app
from shardtune.errors import ConfigError


def test_cameras_that_a_policy_can_do_without_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def predict(observation: Any) -> np.ndarray:
        seen.append(observation["images"])
        return np.zeros((1, 2))

    policy = SimpleNamespace(
        cameras=("top", "wrist"), spare_cameras=1, unread=(), has_values=False, predict_action_chunk=predict
    )
    monkeypatch.setattr("shardtune.run.policy.load_policy", lambda *_, **__: policy)

    def act(*cameras: str) -> None:
        words = [word for camera in cameras for word in ("--image", f"{camera}=a.png")]
        assert CliRunner().invoke(app, ["act", "final", *words], catch_exceptions=False).exit_code == 0

    act("top", "wrist")
    act("wrist")
    assert seen == [{"top": "a.png", "wrist": "a.png"}, {"wrist": "a.png"}]
    for wrong in ((), ("front", "wrist"), ("top", "wrist", "empty_camera_0")):
        with pytest.raises(ConfigError, match="the model was trained with top, wrist"):
            act(*wrong)
    policy.spare_cameras = 0
    with pytest.raises(ConfigError, match="the images are of wrist, the model was trained with top, wrist"):
        act("wrist")
