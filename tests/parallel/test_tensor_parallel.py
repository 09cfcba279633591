"""Ranks that share matrices: which layouts a model can have, and a plain module with a plan of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardtune.config import load_recipe
from shardtune.errors import ParallelError
from shardtune.parallel.tensor_parallel import Heads, check_heads, without_experts
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.parity import EXACT, distance
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import run_recipe, run_recipes

ADAPTER = """
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from shardtune import Adapter, LossSum, Sample


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).flatten()


class Shared(Adapter):
    tensor_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def build(self):
        return Net()

    def encode(self, row):
        return Sample(fields={"x": np.array(row["x"], np.float64), "y": np.array(row["y"], np.float64)})

    def loss(self, model, batch):
        return LossSum(F.mse_loss(model(batch["x"]).to(batch["y"]), batch["y"], reduction="sum"), len(batch["x"]))


class Scaled(Shared):
    def build(self):
        net = Net()  # each rank multiplies its own features by a number that all of them hold
        for block in net.blocks:
            block.scale = nn.Parameter(torch.ones(1))
            block.up.register_forward_hook(lambda _, inputs, out, block=block: out * block.scale)
        return net


class Ranked(Shared):
    def build(self):
        net = Net()  # statistics of a rank's features, the same on all ranks if these have the same ones
        for block in net.blocks:
            block.up.register_forward_hook(lambda _, inputs, out: out / out.norm(dim=-1, keepdim=True))
        return net


class Outside(Shared):
    tensor_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "first": "colwise", "last": "rowwise"}
    between = staticmethod(torch.relu)

    def build(self):
        net = Net()
        net.first, net.last = nn.Linear(6, 10), nn.Linear(10, 6)
        net.register_forward_pre_hook(lambda net, given: (net.last(type(self).between(net.first(given[0]))),))
        return net


class RankedOutside(Outside):
    between = staticmethod(lambda x: x.softmax(-1))


class Unplanned(Shared):
    tensor_plan = {}


class Misnamed(Shared):
    tensor_plan = {"layers.*.up": "colwise"}


class HalfNamed(Shared):
    tensor_plan = {"blocks.*.up": "colwise", "blocks.*.dwn": "rowwise"}


class Numbered(Shared):
    tensor_plan = {"blocks.0.up": "colwise", "blocks.*.down": "rowwise"}


class Misstyled(Shared):
    tensor_plan = {"blocks.*.up": "columns"}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tensor")
    (made / "net.py").write_text(ADAPTER)
    draw = torch.Generator().manual_seed(0)
    rows = [{"x": torch.randn(6, generator=draw).tolist(), "y": float(number % 3)} for number in range(13)]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def recipe(folder: Path, name: str = "Shared", **sizes: int) -> dict[str, Any]:
    return {
        "runner": {"max_steps": 4, "max_epochs": -1, "device": "cpu"},
        "actor": {
            "micro_batch_size": 2,
            "global_batch_size": 5,
            "model": {"adapter": f"{folder / 'net.py'}:{name}", "precision": "fp64"},
            "optim": {"lr": 1e-2, "clip_grad": 0.5},
            "parallel": sizes,
        },
        "data": {"train_data_paths": str(folder / "rows.jsonl"), "num_workers": 0, "cache_dir": str(folder / "cache")},
    }


def test_a_plain_module_with_a_plan_is_shared_exactly(folder: Path) -> None:
    """With two blocks of a feature dimension that ten columns on four ranks do not divide evenly."""
    alone = run_recipe(recipe(folder))
    layouts = [recipe(folder, tensor=4), recipe(folder, tensor=2, data_replicate=2)]
    narrow = recipe(folder, "Outside", tensor=2)
    narrow["actor"]["model"]["precision"] = "bf16"
    *traces, rounded = run_ranks(run_recipes, 4, [*layouts, narrow], fresh=True)[0]
    for trace in traces:
        apart = distance(trace, alone)
        assert max(apart.loss, apart.norm, apart.gradient, apart.weight) < EXACT, apart
    assert not [note for trace in (*traces, rounded) for note in trace.notes if "compared" in note]


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ParallelError) as refused:
        run_recipe(values)
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Scaled", "every tensor rank holds blocks.0.scale whole, and computes another gradient of it"),
        ("Ranked", "blocks.0: 2 tensor ranks with parts of it compute what differs from what the whole one does"),
        (
            "RankedOutside",
            "Net: 2 tensor ranks with parts of it compute what differs from what the whole one does",
        ),
        ("Unplanned", "Net declares no plan for tensor parallelism"),
        ("Misnamed", "tensor_plan names layers.*.up, which is no module or parameter of Net"),
        ("HalfNamed", "tensor_plan names blocks.*.dwn, which is no module or parameter of Net"),
        ("Numbered", "did you mean blocks.*.up? Numbers of layers are written as *"),
        ("Misstyled", "has the style columns, which is not known"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(folder: Path, name: str, message: str) -> None:
    assert message in run_ranks(refusal, 2, recipe(folder, name, tensor=2))[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("HalfNamed", r"did you mean blocks\.\*\.down"),
        ("Unplanned", r"no plan for tensor parallelism[\s\S]*set .*parallel\.tensor: 1; FSDP shares the weights"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_ranks_start(folder: Path, name: str, message: str) -> None:
    values = recipe(folder, name, tensor=2)
    worker = SFTWorker(load_recipe({**values, "runner": {**values["runner"], "nproc_per_node": 2}}), report=print)
    with pytest.raises(ParallelError, match=message):
        worker.task.check()


@pytest.mark.parametrize(
    ("heads", "tensor", "sequence", "nearest"),
    [
        (Heads(8, 2, 4), 3, 1, "tensor 2, sequence 1"),
        (Heads(12, 4, 4), 6, 1, "tensor 4, sequence 1"),
        (Heads(4, 4, 4), 2, 4, "tensor 2, sequence 2"),
        (Heads(6, 6, 4), 1, 4, "tensor 1, sequence 3"),
    ],
)
def test_heads_that_do_not_divide_name_what_fits(heads: Heads, tensor: int, sequence: int, nearest: str) -> None:
    with pytest.raises(ParallelError, match=f"the nearest that fits is {nearest}"):
        check_heads(heads, tensor, sequence)


@pytest.mark.parametrize(("tensor", "sequence"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 4), (4, 2)])
def test_heads_of_keys_are_dealt_or_repeated(tensor: int, sequence: int) -> None:
    check_heads(Heads(8, 2, 4), tensor, sequence)


def test_stacked_experts_are_left_to_the_axis_of_experts() -> None:
    plan = {"mlp.experts": "moe_tp_experts", "mlp.experts.gate_up_proj": "packed_colwise", "q_proj": "colwise"}
    assert without_experts(plan) == {"q_proj": "colwise"}
