"""Seeding gives the draws of `torch.manual_seed`, without the stack that this formats."""

from __future__ import annotations

import traceback
from typing import NoReturn

import pytest
import torch

from shardtune.batch import seeds
from shardtune.batch.seeds import seed_torch


def refused() -> NoReturn:
    raise AssertionError("the stack is formatted")


def test_draws_are_those_of_manual_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = 2**63 - 5
    torch.manual_seed(seed)
    expected = torch.rand(3)
    monkeypatch.setattr(seeds, "_accelerator", lambda: "")
    monkeypatch.setattr(traceback, "format_stack", refused)
    seed_torch(seed)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("kind", "called"), [("cuda", ["all GPUs"]), ("xpu", ["everything"])])
def test_accelerators_are_seeded_too(monkeypatch: pytest.MonkeyPatch, kind: str, called: list[str]) -> None:
    found: list[str] = []
    monkeypatch.setattr(seeds, "_accelerator", lambda: kind)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: found.append("all GPUs"))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: found.append("everything"))
    seed_torch(3)
    assert found == called
