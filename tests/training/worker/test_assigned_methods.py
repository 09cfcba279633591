"""A method that is assigned to a worker object is an error, in its constructor and in its set-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardtune import SFTWorker
from shardtune.errors import ConfigError
from shardtune.run.api import train
from tests.support.dist.training import recipe, save_model, save_rows


class InConstructor(SFTWorker):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.get_eval_model_output = lambda batch: {"loss": 0.0}


class InSetup(SFTWorker):
    def setup(self, *given: Any) -> None:
        super().setup(*given)
        self.get_train_model_output = self.other

    def other(self, batch: Any) -> Any:
        return super().get_train_model_output(batch)


@pytest.mark.parametrize("kind", [InConstructor, InSetup])
def test_a_method_assigned_to_the_object_is_refused(tmp_path: Path, kind: type[SFTWorker]) -> None:
    made = recipe(
        save_model("dense", tmp_path / "model"), save_rows(tmp_path / "rows.jsonl"), runner__max_steps=1,
        runner__logger__log_path=str(tmp_path / "runs"), actor__worker=f"{__file__}:{kind.__name__}",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"get_\w+_model_output is assigned to the In\w+ object"):
        train(made)
    assert not (tmp_path / "runs").exists() or not [*(tmp_path / "runs").rglob("metrics.jsonl")]
