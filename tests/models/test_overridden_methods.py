"""Overrides of each public method of the classes that users derive from are called, with the documented arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardtune
from shardtune import Adapter, Batch, LossSum, Prediction, Sample, WholeStepAdapter
from shardtune.config import load_recipe
from shardtune.errors import ConfigError
from shardtune.evaluate.closed_loop import ClosedLoop, play
from shardtune.evaluate.environments.find import EnvironmentSource
from shardtune.evaluate.environments.point2d import Point2d
from shardtune.evaluate.environments.scripted import ScriptedEnvironment, demonstrations
from shardtune.models import find_adapter
from shardtune.models.adapter_contract import UNCALLED_IN_WHOLE_STEPS
from shardtune.models.causal_lm import CausalLM
from shardtune.models.language_model import LanguageModel
from shardtune.parallel.ranks import Ranks
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.verify.adapter import verify_adapter
from tests.support.recorded import CALLS, misfits, public_methods, recorded
from tests.support.tiny_run import make_tiny, make_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
METRIC = """
def error(outputs, targets, weights):
    return (outputs - targets).abs().sum(), targets.numel()
"""


class Regressor(Adapter):
    """A linear regression with a parameter that has no gradient."""

    def build(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
        model.idle = nn.Parameter(torch.zeros(2))  # pyright: ignore[reportAttributeAccessIssue]
        return model

    def encode(self, row: Mapping[str, Any]) -> Sample:
        return Sample(fields={name: np.array(row[name], np.float32) for name in ("x", "y")})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        return LossSum(F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), float(len(batch["y"])))

    def predictions(self, model: nn.Module, batch: Batch) -> Iterator[Prediction]:
        yield Prediction(model(batch["x"]), batch["y"], torch.ones_like(batch["y"]))

    def predict_rows(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch["x"])

    def examples(self) -> Sequence[Mapping[str, Any]]:
        return [{"x": [n, 1 - n, n % 3], "y": n} for n in range(8)]

    def may_be_idle(self, name: str) -> bool:
        return name == "idle"

    @property
    def rows_share_forwards(self) -> bool:  # so that `rows_of_one_length` is of interest
        return False

    @property
    def rows_of_one_length(self) -> bool:
        return True


class Contrastive(WholeStepAdapter, Regressor):
    """A loss of all rows of a step."""

    def outputs(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {"guess": model(batch["x"])}

    def step_loss(self, outputs: Mapping[str, torch.Tensor]) -> LossSum:
        return LossSum(outputs["guess"].square().sum(), float(len(outputs["guess"])))


ELSEWHERE = {"take_encoding_settings", "augmented", "augments", "new_weights"}
"""Of processes that encode (models/action/test_normalizer.py), of augmentation (data/images/test_augmentation.py), and
of directories of transformers (models/tasks/test_tasks.py)."""
UNCALLED = (
    *UNCALLED_IN_WHOLE_STEPS,
    *ELSEWHERE,
    "predictions",
)  # the last is refused by the recipe's keys that need it
CALLED_IN_WHOLE_STEPS = [name for name in public_methods(WholeStepAdapter) if name not in UNCALLED]
RecordedRegressor = recorded(Regressor, Adapter, public_methods(Adapter))
RecordedContrastive = recorded(Contrastive, WholeStepAdapter, CALLED_IN_WHOLE_STEPS)


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


def recipe(folder: Path, adapter: str, **data: Any) -> dict[str, Any]:
    rows = [{"x": [n % 3, n % 5, -n % 4], "y": n % 4} for n in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(METRIC)
    make_tokenizer().save_pretrained(folder / "tokenizer")
    return {
        "runner": {"max_steps": 2, "logger": {"log_path": str(folder / "runs"), "logger_backends": ["jsonl"]}},
        "actor": {
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "model": {"adapter": f"{__file__}:{adapter}", "precision": "fp32"},
            "tokenizer": {"tokenizer_model": str(folder / "tokenizer")},
        },
        "data": {
            "train_data_paths": str(folder / "rows.jsonl"),
            "eval_data_paths": str(folder / "rows.jsonl"),
            "cache_dir": str(folder / "cache"),
            "num_workers": 0,
        },
        **data,
    }


def test_every_method_of_an_adapter_is_called(tmp_path: Path) -> None:
    run = shardtune.train(recipe(tmp_path, "RecordedRegressor", eval={"metrics": [f"{tmp_path}/mine.py:error"]}))
    in_training = {call.method for call in CALLS}
    assert len(run.predict([{"x": [1, 2, 3], "y": 0}])) == 1
    report = verify_adapter(f"{__file__}:RecordedRegressor", only=("gradient", "empty"), processes=False, report=print)
    assert not report.failures
    called = {call.method for call in CALLS}
    assert called == set(public_methods(Adapter)) - ELSEWHERE
    of_kit = {"examples", "filler"}  # and of ranks without rows
    assert called - in_training == {*of_kit, "predict_rows", "encode_input"}
    assert misfits(Adapter, CALLS) == []


def test_every_method_of_an_adapter_of_whole_steps_is_called(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="works on single targets"):
        shardtune.train(recipe(tmp_path, "RecordedContrastive", eval={"metrics": [f"{tmp_path}/mine.py:error"]}))
    run = shardtune.train(recipe(tmp_path, "RecordedContrastive"))
    assert len(run.predict([{"x": [1, 2, 3], "y": 0}])) == 1
    verify_adapter(f"{__file__}:RecordedContrastive", only=("gradient", "empty"), processes=False, report=print)
    assert {call.method for call in CALLS} == set(CALLED_IN_WHOLE_STEPS)
    assert misfits(WholeStepAdapter, CALLS) == []


@pytest.mark.parametrize("name", UNCALLED_IN_WHOLE_STEPS)
def test_a_method_that_whole_steps_do_not_call_is_refused(name: str) -> None:
    kind = recorded(Contrastive, WholeStepAdapter, [name])
    with pytest.raises(ConfigError, match=rf"RecordedContrastive.{name} is never called(?s:.*)step_loss"):
        find_adapter.check_adapter_class(kind, "the recipe")


@pytest.mark.lengthy
def test_every_method_of_a_language_model_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in vars(LanguageModel) if name in public_methods(LanguageModel)]
    monkeypatch.setattr(find_adapter, "CausalLM", recorded(CausalLM, LanguageModel, names))
    rows = {"data__eval_data_paths": str(tmp_path / "eval.jsonl")}
    generation = {"generate": True, "num_samples": 2, "max_new_tokens": 2}
    worker = SFTWorker(load_recipe(make_tiny(tmp_path, train_rows=6).recipe(eval=generation, **rows)), report=print)
    worker.task.check()
    worker.setup()
    worker.run_training()
    worker.run_eval()
    worker.release()
    assert {call.method for call in CALLS} == set(names)
    assert misfits(LanguageModel, CALLS) == []


def test_every_method_of_an_environment_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = public_methods(ScriptedEnvironment)
    kind = recorded(Point2d, ScriptedEnvironment, names)
    monkeypatch.setattr(EnvironmentSource, "kind", lambda self: kind)
    settings = ClosedLoop(EnvironmentSource("point2d", {"max_steps": 3}), 1, 0, None, 1, 1, "gif")
    play(
        settings,
        lambda seen: np.zeros((len(seen), 1, 2), np.float32),
        Ranks(0, 1, torch.device("cpu")),
        folder=tmp_path,
    )
    next(demonstrations(kind(), 1))
    assert {call.method for call in CALLS} == set(names)
    assert misfits(ScriptedEnvironment, CALLS) == []
