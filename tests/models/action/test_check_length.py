"""`action_token_len` is compared with the statistics of any model, whatever its class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardtune
from shardtune.errors import ConfigError
from shardtune.models.action.check_length import check_stored_length, stored_statistics
from tests.support.registry import nothing_registered

SEVEN = {"action": {"q01": [0.0] * 7, "q99": [1.0] * 7, "mask": [True] * 7}}


class Policy(nn.Linear):
    def get_action_stats(self, unnorm_key: str) -> Any:
        return {"mine": SEVEN["action"]}[unnorm_key]


@pytest.mark.parametrize("source", ["method", "config.json", "dataset_statistics.json"])
def test_a_length_that_is_not_the_models(tmp_path: Path, source: str) -> None:
    if source != "method":
        content = {"mine": SEVEN, "other": {"action": {"q01": [0.0]}}}
        (tmp_path / source).write_text(json.dumps({"norm_stats": content} if source == "config.json" else content))
    made: list[Any] = []
    with nothing_registered():

        @shardtune.register_model("policy")
        def policy(cfg: Any) -> nn.Module:
            made.append(cfg.action_token_len)
            return Policy(2, 2) if source == "method" else nn.Linear(2, 2)

        given = {"model_type": "policy", "model_path": str(tmp_path), "unnorm_key": "mine"}
        assert isinstance(shardtune.get_model({**given, "action_token_len": 7}), nn.Linear)
        with pytest.raises(ConfigError, match="action_token_len is 6, the actions of mine have 7 dimensions"):
            shardtune.get_model({**given, "action_token_len": 6})
    assert made == ([7, 6] if source == "method" else [7])


def test_what_is_not_known_is_not_compared(tmp_path: Path) -> None:
    for config in ({}, {"unnorm_key": "mine"}, {"action_token_len": 6}, {"action_token_len": 6, "unnorm_key": "mine"}):
        check_stored_length(shardtune.config.ModelConfig(model_path=str(tmp_path), **config))
    (tmp_path / "config.json").write_text("{")
    assert stored_statistics(str(tmp_path)) == {}
