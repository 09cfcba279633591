"""A layout that changes numbers is found, and the part of it that does."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn

from shardtune.config import load_recipe
from shardtune.verify.claims.dropout import PLUGIN
from shardtune.verify.claims.layouts import SWITCHES, Switch, active_switches, check_layouts, find_switch
from shardtune.verify.result import Failed
from tests.support.short_runs import runs_of
from tests.verify.claims.test_parity import adapter, rows_of_numbers


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No dropout is left off by a plugin of a run."""
    monkeypatch.setattr(F, "dropout", F.dropout)
    monkeypatch.setattr(nn.Module, "train", nn.Module.train)
    monkeypatch.setattr(F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
    yield
    sys.modules.pop(PLUGIN, None)


def test_a_layout_that_changes_nothing_passes(tmp_path: Path) -> None:
    found = check_layouts(runs_of(rows_of_numbers(tmp_path, adapter("Regressor")), tmp_path / "runs", steps=1))
    assert "1 step on 1 rank (packing) as on one rank in the simplest form" in found
    assert "in fp32" in found


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("name", "keys", "part"),
    [("MixedRows", {}, "packing"), ("RedrawnActivations", {"gradient_checkpointing": True}, "checkpointing")],
)
def test_the_part_that_makes_the_difference_is_named(
    name: str, keys: dict[str, Any], part: str, tmp_path: Path
) -> None:
    values = rows_of_numbers(tmp_path, adapter(name))
    values["actor"]["model"] |= keys
    with pytest.raises(Failed, match=f"{part} makes the difference") as failure:
        check_layouts(runs_of(values, tmp_path / "runs", steps=1))
    assert failure.value.where.startswith("step 1: ")
    assert "of the weights after it" in failure.value.what


@pytest.mark.parametrize("name", [switch.name for switch in SWITCHES])
def test_each_part_is_found_alone(name: str) -> None:
    def differs(off: Sequence[Switch]) -> bool:
        tried.append([switch.name for switch in off])
        return name not in tried[-1]

    tried: list[list[str]] = []
    blame = find_switch(SWITCHES, differs)
    assert blame is not None
    assert blame.switch.name == name
    assert blame.alone
    assert [len(off) for off in tried[:-1]] == list(range(1, len(tried))), "one after the other"


def test_two_parts_that_only_differ_together() -> None:
    def differs(off: Sequence[Switch]) -> bool:
        return not {"packing", "sharding"} & {switch.name for switch in off}

    blame = find_switch(SWITCHES[1:] + SWITCHES[:1], differs)
    assert blame is not None
    assert blame.switch.name == "sharding"
    assert not blame.alone


def test_what_nothing_switches_off() -> None:
    assert find_switch(SWITCHES, lambda off: True) is None


def test_the_parts_of_a_recipe(tmp_path: Path) -> None:
    values = rows_of_numbers(tmp_path, adapter("Regressor"))
    values["actor"]["model"] |= {"is_lora": True, "compile": True}
    values["actor"]["fsdp_config"] = {"cpu_offload": True}
    recipe = load_recipe(values)
    names = [switch.name for switch in active_switches(recipe, 2, deals_rows=True)]
    assert names == ["packing", "compile", "offload", "sharding", "adapter"]
    assert [switch.name for switch in active_switches(recipe, 1, deals_rows=False)] == ["compile", "adapter"]
