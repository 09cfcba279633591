"""In half precision several ranks compute with the numbers of one: nothing that a model or a batch holds is rounded on
ranks alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from shardtune import Adapter, FSDPSftWorker, LossSum, Sample
from shardtune.config import load_recipe
from shardtune.parallel import fsdp2
from shardtune.run.choose_worker import make_worker
from shardtune.training.worker.reported import training_method
from shardtune.training.worker.run_context import silent
from shardtune.verify.claims.rounding import RoundedRuns
from shardtune.verify.result import Failed
from tests.support.dist.ranks import run_ranks

WIDTH, ROWS, MICRO = 8, 16, 2
BACKENDS = ("fsdp", "fsdp1", "ddp")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        return x * turn + self.linear(self.norm(x))


class Net(nn.Module):
    """A buffer in fp32 makes what goes from block to block fp32, and each block gets a table in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.register_buffer("place", torch.linspace(-1, 1, WIDTH) / 3)
        self.register_buffer("turn", torch.linspace(0, 3, WIDTH).cos())

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = self.stem(x) + self.get_buffer("place")
        for block in self.blocks:
            x = block(x, self.get_buffer("turn"))
        found = self.head(x)[:, 0]
        return found if y is None else (found - y).square().mean()


def numbers() -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [{"x": [draw.uniform(-1, 1) for _ in range(3)], "y": draw.uniform(0, 3)} for _ in range(ROWS)]


def batches(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in ("x", "y")}


class Worker(FSDPSftWorker):
    """Of a user's: targets go through the model."""

    def model_provider_func(self) -> Any:
        return Net()

    def build_dataloader(self, data_paths: Any, eval_dataset: bool = False) -> Any:
        rows: Any = numbers()
        return DataLoader(rows, batch_size=MICRO, collate_fn=batches), {"num_samples": ROWS}

    def get_train_model_output(self, batch: Any) -> Any:
        with self.amp_context:
            return self.model(**batch)

    def get_eval_model_output(self, batch: Any) -> Any:
        return {"loss": (float(self.model(**batch)), 1)}


class Scaling(Worker):
    """Updates the weights itself, and scales its loss by a factor with which the first gradients are not finite."""

    def model_provider_func(self) -> Any:
        net = Net()
        net.register_parameter("gain", nn.Parameter(torch.tensor(1.0)))  # one number, which ranks hold whole
        return net

    def run_training(self) -> dict[str, float]:
        if not hasattr(self, "scaler"):
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-12)
        gain = self.model.get_parameter("gain")
        for _ in range(4 // self.ranks.world_size):
            self.scaler.scale(self.model(**next(self.data_iter)) / 4 + 0.0 * gain).backward()
        self.scaler.unscale_(self.optimizer)
        norm = self.clip_grad_norm_(1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return {"norm": norm, "scale": self.scaler.get_scale()}


class Model(Adapter):
    def build(self) -> nn.Module:
        return Net()

    def encode(self, row: Any) -> Sample:
        return Sample(fields={"x": np.array(row["x"], np.float32), "y": np.array(row["y"], np.float32)})

    def loss(self, model: nn.Module, batch: Any) -> LossSum:
        return LossSum((model(batch["x"]) - batch["y"]).square().sum(), len(batch["y"]))

    def weights(self, sample: Sample) -> dict[str, float]:
        return {"loss": 1.0}


def trained(kind: str, precision: str, backend: str, folder: str) -> list[tuple[float, float]]:
    """Losses and norms of two steps, each of two micro-batches on two ranks, or four on one."""
    model: dict[str, Any] = {"precision": precision}
    values: dict[str, Any] = {
        "global_batch_size": 4 * MICRO,
        "micro_batch_size": MICRO,
        "model": model,
        "optim": {"lr": 0.01},
        "training_backend": backend,
        "data": {"train_data_paths": f"{folder}/rows.jsonl", "cache_dir": f"{folder}/cache"},
        "runner": {"max_steps": 2},
    }
    if kind == "adapter":
        model["adapter"] = f"{__file__}:Model"
    else:
        values["worker"] = f"{__file__}:Worker"
    worker = make_worker(load_recipe(values), report=silent)
    worker.setup()
    found = [training_method(worker)() for _ in range(2)]
    return [(step["train/loss"], step["train/grad_norm"]) for step in found]


Logs = dict[tuple[str, str, str], list[tuple[float, float]]]


def trained_by(kinds: Sequence[tuple[str, str]], folder: str, backends: Sequence[str]) -> Logs:
    return {(*kind, backend): trained(*kind, backend, folder) for kind in kinds for backend in backends}


def right_and_rounded(kinds: Sequence[tuple[str, str]], folder: str, backends: Sequence[str]) -> tuple[Logs, Logs]:
    """What is logged; and of the first two kinds if FSDP2 rounds whatever goes into the model and its units."""

    def rounding(module: nn.Module, *, mp_policy: MixedPrecisionPolicy, **settings: Any) -> Any:
        return fully_shard(module, mp_policy=replace(mp_policy, cast_forward_inputs=True), **settings)

    right = trained_by(kinds, folder, backends)
    with patch.object(fsdp2, "fully_shard", rounding):
        return right, trained_by(kinds[:2], folder, ["fsdp"])


KINDS = [("worker", "bf16"), ("adapter", "bf16"), ("adapter", "fp16")]


def test_ranks_have_the_losses_of_one(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbers()))
    one = trained_by(KINDS, str(tmp_path), ["fsdp"])
    two = run_ranks(right_and_rounded, 2, KINDS, str(tmp_path), BACKENDS)
    assert two[0] == two[1]
    right, rounded = two[0]
    for (kind, precision, backend), found in right.items():
        alone = one[kind, precision, "fsdp"]
        assert found[0] == pytest.approx(alone[0], rel=1e-6), (kind, precision, backend)
        assert "the first step row by row" in RoundedRuns(precision, alone, alone, found, found, True).check()
    for (kind, precision, _), found in rounded.items():
        alone = one[kind, precision, "fsdp"]
        with pytest.raises(Failed, match=f"in {precision} several ranks part from one process in step 1"):
            RoundedRuns(precision, alone, alone, found, found, True).check()


class ScalingTwice(Scaling):
    """Goes on with the next rows where an update was skipped."""

    def run_training(self) -> dict[str, float]:
        skipped = super().run_training()
        return {f"{name}_of_skipped": value for name, value in skipped.items()} | super().run_training()


def scaled(folder: str, backend: str) -> tuple[list[float], list[float], list[str]]:
    """Scales and norms of two steps, the first skipped, and what was reported."""
    values: dict[str, Any] = {
        "global_batch_size": 4 * MICRO,
        "micro_batch_size": MICRO,
        "model": {"precision": "fp16"},
        "training_backend": backend,
        "data": {"train_data_paths": f"{folder}/rows.jsonl"},
        "runner": {"max_steps": 2},
        "worker": f"{__file__}:Scaling",
    }
    said: list[str] = []
    worker = make_worker(load_recipe(values), report=said.append)
    worker.setup()
    steps = [training_method(worker)() for _ in range(2)]
    return [step["train/scale"] for step in steps], [step["train/norm"] for step in steps], said


def test_a_step_that_a_workers_gradient_scaler_skips_is_a_step(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbers()))
    one = scaled(str(tmp_path), "fsdp")
    two = run_ranks(scaled, 2, str(tmp_path), "fsdp")
    for scales, norms, said in (one, *two):
        assert scales == [4096, 4096]
        assert not np.isfinite(norms[0])
        assert norms[1] == pytest.approx(one[1][1], rel=5e-3)
        assert not any("is not scaled" in line for line in said)


def test_after_a_skipped_update_a_worker_clips_once_more(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbers()))
    values = {
        "global_batch_size": 4 * MICRO,
        "micro_batch_size": MICRO,
        "model": {"precision": "fp16"},
        "data": {"train_data_paths": f"{tmp_path}/rows.jsonl"},
        "runner": {"max_steps": 1},
        "worker": f"{__file__}:ScalingTwice",
    }
    worker = make_worker(load_recipe(values), report=lambda line: None)
    worker.setup()
    found = training_method(worker)()
    assert not np.isfinite(found["train/norm_of_skipped"])
    assert np.isfinite(found["train/norm"])
