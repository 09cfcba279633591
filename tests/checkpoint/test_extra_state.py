"""`get_extra_state` and `set_extra_state` of a model are in checkpoints: a resumed run goes on as it would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shardtune import FSDPSftWorker
from shardtune.checkpoint.extra_state import extra_state, set_extra_state
from shardtune.config import load_recipe
from shardtune.errors import CheckpointError, ModelError
from tests.support.dist.ranks import run_ranks


class Counting(nn.Module):
    """Its output depends on how often it was computed in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.calls = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return self.linear(x) * (1 + 0.1 * self.calls)


class Returning(nn.Module):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> object:
        return self.value

    def set_extra_state(self, state: object) -> None:
        self.value = state


class Worker(FSDPSftWorker):
    def model_provider_func(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(Counting()).double()

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        rows: Any = [{"x": row.double()} for row in torch.arange(64).reshape(16, 4) % 5]
        return DataLoader(rows, batch_size=2), {"num_samples": 16}

    def get_train_model_output(self, batch: Any) -> torch.Tensor:
        return self.model(batch["x"]).square().mean()

    def get_eval_model_output(self, batch: Any) -> Any:
        return {"rows": (0.0, len(batch["x"]))}


def worker() -> Worker:
    actor = {"worker": f"{__file__}:Worker", "micro_batch_size": 2, "global_batch_size": 8}
    actor |= {"model": {"precision": "fp64"}, "optim": {"name": "SGD", "lr": 0.01, "weight_decay": 0.0}}
    runner = {"device": "cpu", "max_epochs": -1, "max_steps": 4, "logger": {"log_path": "runs"}}
    made = Worker(load_recipe({"actor": actor, "data": {"train_data_paths": "made"}, "runner": runner}))
    made.setup()
    return made


def losses(folder: str) -> tuple[list[float], list[float]]:
    """Of the last two of four steps: as they come, and of a worker that loads what was saved before them."""
    first = worker()
    for _ in range(2):
        first.run_training()
    first.save_checkpoint(folder, 2)
    straight = [first.run_training()["train/loss"] for _ in range(2)]
    first.release()
    second = worker()
    second.load_checkpoint(folder)
    return straight, [second.run_training()["train/loss"] for _ in range(2)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.lengthy)])
def test_a_resumed_run_has_it(ranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    for straight, resumed in run_ranks(losses, ranks, folder) if ranks > 1 else [losses(folder)]:
        assert straight == resumed
        assert straight[0] != straight[1]


def test_it_is_held_by_name() -> None:
    model = nn.ModuleDict({"one": Returning({"a": [1, 2.5, None, "x"]}), "none": Returning(None), "plain": nn.ReLU()})
    state = extra_state(model)
    assert state == {"one": {"a": [1, 2.5, None, "x"]}}
    other = nn.ModuleDict({"one": Returning(None)})
    set_extra_state(other, state)
    assert extra_state(other) == state
    with pytest.raises(CheckpointError, match="extra state of the module 'one', which the model has not"):
        set_extra_state(nn.ModuleDict({"one": nn.ReLU()}), state)


@pytest.mark.parametrize(
    "value", [torch.ones(2), {1: 2}, (1, 2), float("nan"), object()], ids=lambda value: type(value).__name__
)
def test_what_would_come_back_as_something_else_is_refused(value: object) -> None:
    with pytest.raises(
        ModelError, match=r"get_extra_state of one .Returning. returned a .* that is not the same as JSON"
    ):
        extra_state(nn.ModuleDict({"one": Returning(value)}))
