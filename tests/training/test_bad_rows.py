"""A row whose loss or gradient is not finite is named, alone, and nothing moves; so are weights; on 1 and 2 ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shardtune import Adapter, Batch, LossSum, Sample
from shardtune.errors import CheckpointError
from shardtune.parallel.weights import local
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.chosen import slow_except
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import quiet, whole
from tests.training.worker import test_base as own

ROWS = 16
KINDS = ("nan", "gradient", "loss")


class Fragile(Adapter):
    """A square root of what a row holds: of 0 its gradient is infinite; a row of "loss" adds infinity without one."""

    def build(self) -> nn.Module:
        return nn.Linear(1, 2)

    def encode(self, row: Mapping[str, Any]) -> Sample:
        return Sample(fields={"x": np.array([row["x"]], np.float32), "inf": np.array([row["inf"]], np.float32)})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        out = model(torch.ones_like(batch["x"])) * batch["x"]
        rooted = out.square().sum(1).sqrt().sum()
        return LossSum(rooted + torch.where(batch["inf"] > 0, torch.inf, 0.0).sum(), float(len(out)))


class Steep(Fragile):
    """In fp16 the gradient of every row is finite at a scale below 1 alone; that of the bad one never is."""

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        found = super().loss(model, batch)
        return LossSum(found.total * 2.0**22, found.weight)


class WithNorm(Fragile):
    """Its running statistics are those of finite steps alone; its rows depend on one another.

    The norm gives zero for rows that are all alike, whose root has no gradient: so there is a bias after it.
    """

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))


def row(number: int, kind: str) -> dict[str, Any]:
    bad = number == 5
    return {
        "x": {"nan": float("nan"), "gradient": 0.0}.get(kind, 1.0) if bad else 1.0,
        "inf": int(bad and kind == "loss"),
    }


def steps(folder: str, kinds: tuple[str, ...], name: str, precision: str) -> dict[str, Any]:
    """Of each kind: what was said, whether the first step moved anything, and the rows of a bad step."""
    told: dict[str, Any] = {}
    for kind in kinds:
        rows = Path(folder) / f"{kind}.jsonl"
        recipe = {
            "actor": {
                "model": {"adapter": f"{__file__}:{name}", "from_scratch": True, "precision": precision},
                "optim": {"lr": 0.1, "lr_scheduler": "constant"},
                "micro_batch_size": 2,
                "global_batch_size": 8,
            },
            "data": {"train_data_paths": str(rows), "cache_dir": f"{folder}/cache", "shuffle": False, "num_workers": 0},
            "runner": {"device": "cpu", "max_epochs": 1},
        }
        worker = SFTWorker(recipe, report=quiet)  # pyright: ignore[reportArgumentType]
        worker.setup()
        before = {name: whole(tensor).clone() for name, tensor in worker.weights.tensors().items()}
        metrics = worker.run_training()
        after = {name: whole(tensor) for name, tensor in worker.weights.tensors().items()}
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        told[kind] = (worker.position.skipped, moved, worker.step, metrics.get("train/loss_scale"))
        worker.run_training()
        told[kind] += (worker.step,)
        weights = {name: local(tensor.detach()) for name, tensor in worker.weights.parameters.items()}
        if worker.ranks.rank == worker.ranks.world_size - 1:
            weights["weight" if "weight" in weights else "0.weight"][-1] = torch.nan
        told[f"weights {kind}"] = [str(one) for one in worker.state.finite.find()]
        worker.save_checkpoint(Path(folder) / f"{kind}-{worker.ranks.world_size}", worker.step)
        with pytest.raises(CheckpointError, match="weight holds NaN"):
            worker.load_checkpoint(Path(folder) / f"{kind}-{worker.ranks.world_size}")
        worker.release()
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rows")
    for kind in KINDS:
        text = "".join(json.dumps(row(number, kind)) + "\n" for number in range(ROWS))
        (made / f"{kind}.jsonl").write_text(text)
    return made


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_one_bad_row_of_a_step_is_named(folder: Path, precision: str) -> None:
    _expect(steps(str(folder), KINDS, "Fragile", precision), folder, KINDS)


@pytest.mark.parametrize("precision", slow_except(["fp32", "fp16"], "fp32"))
def test_the_rank_that_has_it_is_found(folder: Path, precision: str) -> None:
    told = run_ranks(steps, 2, str(folder), KINDS, "Fragile", precision)
    assert told[0] == told[1]
    _expect(told[0], folder, KINDS)


def test_in_fp16_rows_that_a_smaller_scale_helps_are_not_named(folder: Path) -> None:
    told = steps(str(folder), KINDS, "Steep", "fp16")
    for kind in KINDS:
        assert told[kind][0].endswith(f" for {folder / kind}.jsonl:6; the whole step is passed over")
        assert told[kind][1] == []


def test_running_statistics_do_not_move_in_a_step_that_is_passed_over(folder: Path) -> None:
    said, moved, step, _, after = steps(str(folder), ("nan",), "WithNorm", "fp32")["nan"]
    assert (moved, step, after) == ([], 0, 1)
    assert said.startswith("the gradient was not finite for ")
    assert {int(name.rpartition(":")[2]) for name in said.partition(" for ")[2].partition(";")[0].split(", ")} >= {6}


SPIKE = {17: 900.0, 18: 800.0, 16: 700.0, 19: 699.0, 23: 5.0}
"""Rows of the third step: on one rank the micro-batch of rows 19 and 23 adds more to its loss than that of row 16."""


def of_a_spike(folder: str) -> str:
    """What is said of the third step."""
    rows = Path(folder) / "spike.jsonl"
    recipe = {
        "actor": {
            "model": {"adapter": f"{__file__}:Fragile", "from_scratch": True, "precision": "fp64"},
            "optim": {"lr": 1e-9, "lr_scheduler": "constant"},
            "micro_batch_size": 2,
            "global_batch_size": 8,
        },
        "data": {"train_data_paths": str(rows), "cache_dir": f"{folder}/cache", "shuffle": False, "num_workers": 0},
        "runner": {"device": "cpu", "on_spike": "skip", "spike": {"warmup_steps": 2}},
    }
    worker = SFTWorker(recipe, report=quiet)  # pyright: ignore[reportArgumentType]
    worker.setup()
    for _ in range(3):
        worker.run_training()
    said = worker.position.skipped
    worker.release()
    return said


def test_the_rows_of_a_spike_are_those_that_add_most_in_any_micro_batch(tmp_path: Path) -> None:
    lines = (json.dumps({"x": SPIKE.get(number, 1.0), "inf": 0}) + "\n" for number in range(24))
    (tmp_path / "spike.jsonl").write_text("".join(lines))
    for said in (of_a_spike(str(tmp_path)), *run_ranks(of_a_spike, 2, str(tmp_path))):
        assert re.findall(r"spike\.jsonl:(\d+) \(loss", said) == ["18", "19", "17"], said  # lines are counted from 1


class Poisoned(own.Task):
    """Its loader gives no numbers of rows; row 5 is in the third of its batches of two."""

    form = "terms"

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        rows: Any = own.data()
        rows[5]["value"] = torch.tensor(torch.nan, dtype=torch.float64)
        return DataLoader(rows, batch_size=own.MICRO), {"num_samples": own.ROWS}


def test_of_a_loader_of_the_users_the_batch_is_named() -> None:
    worker = Poisoned(own.recipe())
    worker.setup()
    worker.run_training()
    named = "for micro-batch 3 of rank 0 among those after 0 of epoch 0; the whole step is passed over"
    assert worker.position.skipped == f"the gradient was not finite {named}"


def _expect(told: Mapping[str, Any], folder: Path, kinds: Sequence[str]) -> None:
    for kind in kinds:
        assert told[f"weights {kind}"] == ["weight holds NaN"]
        said, moved, step, scale, after = told[kind]
        what = "loss" if kind == "loss" else "gradient"
        scales = " at any loss scale of fp16" if scale and kind == "gradient" else ""
        assert said == f"the {what} was not finite{scales} for {folder / kind}.jsonl:6; the whole step is passed over"
        assert (moved, step, after) == ([], 0, 1)
        assert scale in (None, 2.0**16)
