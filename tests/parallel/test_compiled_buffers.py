"""Buffers that a compiled forward changes in place are refused before the first update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from shardtune.errors import ModelError
from shardtune.parallel.compiled_buffers import CompiledBuffers
from shardtune.run.api import train
from tests.support.dist.ranks import run_ranks

HOW = {"in place": "self.count += 1", "a new tensor": "self.count = self.count + 1", "not": "pass"}
ADAPTER = """
import numpy as np
import torch
from torch import nn
from shardtune import Adapter, LossSum, Sample


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        if self.training:
            HOW
        return self.inner(x) * self.count


class Own(Adapter):
    unit_classes = ("Block",)

    def build(self):
        return nn.Sequential(nn.Linear(4, 4), Block(), Block())

    def encode(self, row):
        return Sample(fields={"x": np.array(row["x"], np.float32)})

    def loss(self, model, batch):
        x = batch["x"]
        return LossSum(model(x.to(model[0].weight.dtype)).square().sum(), len(x))

    def weights(self, sample):
        return {"loss": 1}
"""


class Norm(nn.BatchNorm1d):
    """A norm of the user's."""


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.still, self.spectral = Norm(4), nn.BatchNorm1d(4), spectral_norm(nn.Linear(4, 4))
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("sum", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sum = self.sum + 1
        return self.spectral(self.still(self.norm(x))) * self.count


def test_own_buffers_of_compiled_modules_are_watched_alone() -> None:
    model = nn.Sequential(Watched(), Watched())
    model[0].compile(backend="eager")
    buffers = CompiledBuffers(model)
    assert [name for *_, name in buffers.owners] == ["0.count", "0.sum"]
    before = buffers.versions()
    model(torch.randn(3, 4)).sum().backward()
    buffers.refuse_changed(before)  # what torch's own modules change, and what is replaced, is right
    model[0].get_buffer("count").add_(1)
    with pytest.raises(ModelError, match=r"changes the buffer 0.count of (?s:.*)self.count = self.count \+ 1"):
        buffers.refuse_changed(before)


def test_buffers_may_be_emptied_removed_or_made_in_inference_mode() -> None:
    model = Watched()
    model.compile(backend="eager")
    buffers = CompiledBuffers(model)
    model.register_buffer("count", None)
    del model.sum
    buffers.refuse_changed(buffers.versions())
    with torch.inference_mode():
        model.count = torch.ones(())
    before = buffers.versions()
    model.register_buffer("sum", torch.ones(4))
    buffers.refuse_changed(before)


def trained(folder: Path, how: str, compiles: bool, ranks: int) -> str:
    """The error, or the last line of the log."""
    file = folder / f"own{len(how)}.py"
    run = folder / f"{len(how)}-{compiles}-{ranks}"
    made: dict[str, Any] = {
        "runner": {"max_steps": 2, "max_epochs": -1, "device": "cpu", "logger": {"log_path": str(run)}},
        "actor": {
            "micro_batch_size": 2, "global_batch_size": 8, "optim": {"lr": 0.1},
            "model": {"adapter": f"{file}:Own", "precision": "fp64", "compile": compiles},
        },
        "data": {"train_data_paths": str(folder / "rows.jsonl"), "cache_dir": str(folder / "cache"), "num_workers": 0},
    }  # fmt: skip
    with torch.compiler.set_stance(force_backend="eager"):
        try:
            train(made)
        except ModelError as error:
            return str(error)
    (metrics,) = run.rglob("metrics.jsonl")
    return metrics.read_text().splitlines()[1]


def loss(line: str) -> float:
    return json.loads(line)["train/loss"]


@pytest.mark.lengthy
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_ends_before_the_update(tmp_path: Path, ranks: int) -> None:
    rows = [{"x": torch.randn(4, generator=torch.Generator().manual_seed(number)).tolist()} for number in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for how in HOW.values():
        (tmp_path / f"own{len(how)}.py").write_text(ADAPTER.replace("HOW", how))

    def run(how: str, compiles: bool) -> str:
        given = (tmp_path, HOW[how], compiles, ranks)
        return trained(*given) if ranks == 1 else run_ranks(trained, 2, *given)[0]

    assert "of a compiled module in place" in run("in place", True)
    if ranks == 1:
        assert loss(run("in place", False)) == pytest.approx(loss(run("a new tensor", True)), abs=1e-12)
    else:
        assert loss(run("not", True)) == pytest.approx(loss(run("not", False)), abs=1e-12)
