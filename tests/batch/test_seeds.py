"""Seeding gives the draws of `torch.manual_seed`, without the stack that this formats; numpy and Python have theirs."""

from __future__ import annotations

import random
import traceback
from typing import NoReturn

import numpy as np
import pytest
import torch

from shardtune.batch import seeds
from shardtune.batch.seeds import generators_kept, seed_generators


def refused() -> NoReturn:
    raise AssertionError("the stack is formatted")


def test_draws_are_those_of_manual_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = 2**63 - 5
    torch.manual_seed(seed)
    expected = torch.rand(3)
    monkeypatch.setattr(seeds, "_accelerator", lambda: "")
    monkeypatch.setattr(traceback, "format_stack", refused)
    seed_generators(seed)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("kind", "called"), [("cuda", ["all GPUs"]), ("xpu", ["everything"])])
def test_accelerators_are_seeded_too(monkeypatch: pytest.MonkeyPatch, kind: str, called: list[str]) -> None:
    found: list[str] = []
    monkeypatch.setattr(seeds, "_accelerator", lambda: kind)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: found.append("all GPUs"))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: found.append("everything"))
    seed_generators(3)
    assert found == called


def drawn() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_all_global_generators_are_seeded() -> None:
    with generators_kept():
        seed_generators(2**63 - 5)
        first = drawn()
        drawn()
        seed_generators(2**63 - 5)
        assert drawn() == first
        seed_generators(7)
        assert not set(drawn()) & set(first)


def test_generators_are_kept_after_an_error_too() -> None:
    with generators_kept():
        expected = drawn()
    with pytest.raises(KeyError), generators_kept():
        raise KeyError(drawn())
    assert drawn() == expected
