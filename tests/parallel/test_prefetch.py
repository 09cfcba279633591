"""How many units ahead weights are gathered: as many as asked for, and the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardtune.parallel.fsdp2 import shard
from tests.support.adapted import group
from tests.support.dist.ranks import run_ranks
from tests.support.dist.training import Trace, recipe, run_recipes, save_model, save_rows


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def gathered_ahead(prefetch: int) -> dict[str, tuple[list[str], list[str]]]:
    """By unit, which units it gathers in the forward and in the backward pass."""
    model = Stack()
    shard(model, [*model.layers], group(), "fp64", prefetch=prefetch)
    states = {m._get_fsdp_state(): n or "root" for n, m in model.named_modules() if isinstance(m, FSDPModule)}
    return {
        name.removeprefix("layers."): (
            [states[other].removeprefix("layers.") for other in state._states_to_forward_prefetch],
            [states[other].removeprefix("layers.") for other in state._states_to_backward_prefetch],
        )
        for state, name in states.items()
    }


def test_units_gather_those_that_come_next() -> None:
    assert run_ranks(gathered_ahead, 2, 2)[0] == {
        "root": (["0", "1"], ["3", "2"]),
        "0": (["1", "2"], []),
        "1": (["2", "3"], ["0"]),
        "2": (["3"], ["1", "0"]),
        "3": ([], ["2", "1"]),
    }


@pytest.mark.parametrize("prefetch", [9, 1])
def test_more_than_there_are_and_torchs_own(prefetch: int) -> None:
    told = run_ranks(gathered_ahead, 2, prefetch)[0]
    if prefetch == 1:
        assert set(map(str, told.values())) == {"([], [])"}
    else:
        assert told["root"] == (["0", "1", "2", "3"], ["3", "2", "1", "0"])
        assert told["3"] == ([], ["2", "1", "0"])


def numbers(trace: Trace) -> list[float]:
    return [*trace.losses, *trace.norms, *(float(weight.double().sum()) for weight in trace.weights.values())]


def test_the_numbers_stay(tmp_path: Path) -> None:
    model, rows = save_model("dense", tmp_path / "model", num_hidden_layers=4), save_rows(tmp_path / "rows.jsonl")
    keys = {"runner__max_steps": 2, "actor__micro_batch_size": 2}
    asked = [
        {},
        {"actor__fsdp_config__prefetch": 3, "actor__model__gradient_checkpointing": "selective"},
    ]
    own, *others = run_ranks(run_recipes, 2, [recipe(model, rows, **keys, **more) for more in asked])[0]
    for other in others:
        assert numbers(other) == pytest.approx(numbers(own), abs=1e-10)
