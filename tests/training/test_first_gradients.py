"""Parameters that the first step does not reach are named, once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shardtune import Adapter, Batch, LossSum, Sample
from shardtune.config import load_recipe
from shardtune.errors import ModelError
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.ranks import run_ranks


class Branches(nn.Module):
    """A layer that the loss depends on, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.spare(x)
        return self.used(x)


class Spare(Adapter):
    """A regression that leaves a layer out."""

    def build(self) -> nn.Module:
        return Branches()

    def encode(self, row: Mapping[str, float]) -> Sample:
        return Sample(fields={"x": np.array([row["x"]])})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        return LossSum(model(batch["x"]).square().sum(), len(batch.rows))


class Declared(Spare):
    """It says which parameters may have no gradient."""

    def may_be_idle(self, name: str) -> bool:
        return name in self.idle

    idle = ("spare.weight", "spare.bias")


class DeclaredInPart(Declared):
    idle = ("spare.bias",)


def worker(folder: str, adapter: str, report: Callable[[str], None] = lambda _: None, **actor: object) -> SFTWorker:
    """On rows of `folder`."""
    recipe = {
        "actor": {"model": {"adapter": f"{__file__}:{adapter}", "precision": "fp64"}, **actor},
        "data": {"train_data_paths": f"{folder}/rows.jsonl", "cache_dir": f"{folder}/cache", "num_workers": 0},
    }
    made = SFTWorker(load_recipe(recipe), report=report)
    made.setup()
    return made


def reported(folder: str, adapter: str = "Spare") -> tuple[list[str], list[dict[str, float]]]:
    """The lines about gradients, and the metrics, of two steps."""
    lines: list[str] = []
    made = worker(folder, adapter, lines.append, micro_batch_size=1, global_batch_size=4)
    metrics = [made.run_training(), made.run_training()]
    made.release()
    return [line for line in lines if "gradient" in line], metrics


class Tower(nn.Module):
    """Two blocks, which are units of their own on ranks, and a head, which is in none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(1, 1)) for _ in range(2)])
        self.head = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Balanced(Spare):
    """A loss with the slope for a weight in it, where gradients are recorded."""

    unit_classes = ("Sequential",)

    def build(self) -> nn.Module:
        return Tower()

    def weights_of(self, model: nn.Module) -> list[nn.Parameter]:
        return list(model.get_submodule("blocks").parameters())

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        total = model(batch["x"]).square().sum()
        if torch.is_grad_enabled():
            slopes = torch.autograd.grad(total, self.weights_of(model), retain_graph=True, allow_unused=True)
            assert all(slope is not None for slope in slopes)
        return LossSum(total, len(batch.rows))


class BalancedAtHead(Balanced):
    def weights_of(self, model: nn.Module) -> list[nn.Parameter]:
        return list(model.get_submodule("head").parameters())


def first_step(folder: str, adapter: str) -> str | float:
    """The loss of the first step, or why there is none."""
    made = worker(folder, adapter, micro_batch_size=2, global_batch_size=8)
    try:
        return made.run_training()["train/loss"]
    except ModelError as error:
        return str(error)
    finally:
        made.release()


def check(found: tuple[list[str], list[dict[str, float]]]) -> None:
    (line,), metrics = found
    assert line.startswith("no gradient in the first step for 2 of 4 trained parameters: spare.weight, spare.bias. ")
    for one in metrics:
        assert one["train/samples"] == 4.0
        assert one["perf/samples_per_second"] > 0
        assert not {"train/tokens", "perf/tokens_per_second"} & one.keys(), "the rows have no tokens"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"x": 1.0 + n}) + "\n" for n in range(8)))
    return str(tmp_path)


def test_parameters_without_a_gradient_are_named(folder: str) -> None:
    check(reported(folder))


def test_parameters_that_may_have_no_gradient_are_not_named(folder: str) -> None:
    assert reported(folder, "Declared")[0] == []
    (line,) = reported(folder, "DeclaredInPart")[0]
    assert line.startswith("no gradient in the first step for 1 of 4 trained parameters: spare.weight. ")


def test_parameters_without_a_gradient_are_named_on_ranks(folder: str) -> None:
    found: Sequence[tuple[list[str], list[dict[str, float]]]] = run_ranks(reported, 2, folder)
    check(found[0])
    assert found[1][0] == []


def test_a_gradient_of_a_part_of_a_weight_is_refused(folder: str) -> None:
    """With `allow_unused` autograd finds None there, which a loss takes for "no influence"."""
    alone = first_step(folder, "Balanced")
    assert isinstance(alone, float)
    for message in run_ranks(first_step, 2, folder, "Balanced"):
        assert "the loss differentiates by blocks.0.0.weight, blocks.0.0.bias, blocks.1.0.weight" in message
        assert "of which each rank has a part" in message
        assert "outside of all units" in message
    assert run_ranks(first_step, 2, folder, "BalancedAtHead") == pytest.approx([alone, alone], rel=1e-12)


class Gated(nn.Module):
    """Scales its input by a number drawn by Python or by torch."""

    def __init__(self, torchs: bool) -> None:
        super().__init__()
        self.linear, self.torchs = nn.Linear(1, 1), torchs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * (torch.rand((), dtype=x.dtype) if self.torchs else random.random()))


class DrawnInUnits(Spare):
    """Draws by Python's random in its units."""

    unit_classes = ("Gated",)
    torchs = False

    def build(self) -> nn.Module:
        return nn.Sequential(Gated(self.torchs), Gated(self.torchs))


class DrawnByTorch(DrawnInUnits):
    torchs = True


class DrawnBefore(DrawnByTorch):
    """Draws by numpy before its units, as SpecAugment does."""

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        return LossSum(model(batch["x"] * np.random.rand()).square().sum(), len(batch.rows))


@pytest.mark.parametrize("adapter", ["DrawnInUnits", "DrawnByTorch", "DrawnBefore"])
def test_units_that_draw_otherwise_when_computed_again_are_refused(folder: str, adapter: str) -> None:
    """Checkpointing restores the generators of torch alone."""
    sizes = {"micro_batch_size": 2, "global_batch_size": 4}
    plain = worker(folder, adapter, **sizes)
    losses = [plain.run_training()["train/loss"] for _ in range(2)]
    plain.release()
    saving = {"adapter": f"{__file__}:{adapter}", "precision": "fp64", "gradient_checkpointing": True}
    made = worker(folder, adapter, model=saving, **sizes)
    if adapter == "DrawnInUnits":
        with pytest.raises(ModelError, match="forward and backward pass draw numbers of numpy or of Python's random"):
            made.run_training()
    else:
        assert [made.run_training()["train/loss"] for _ in range(2)] == losses
    made.release()
