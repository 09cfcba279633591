"""Running out of memory is told as such, with the ways out."""

from __future__ import annotations

import pytest
import torch

import shardtune.run.api
from shardtune.cli.out_of_memory import REMEDIES, explain_out_of_memory
from tests.support.workspace import run_cli

RECORDED = [
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:129] err == 0. DefaultCPUAllocator: can't allocate memory: you tried…"
    ),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
]


@pytest.mark.parametrize("error", RECORDED, ids=lambda error: type(error).__name__)
def test_the_ways_out_are_named(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(shardtune.run.api, "train", train)
    ended = run_cli("train", "recipe.yaml")
    assert ended.code == 1
    assert ended.err.startswith("error: out of memory: ")
    assert all(f"remedy: {remedy}" in ended.err for remedy in REMEDIES)
    assert "Traceback" not in ended.err


def test_a_real_allocation_that_fails_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert explain_out_of_memory(caught.value) is not None


def test_other_errors_are_not_taken_for_it() -> None:
    assert explain_out_of_memory(RuntimeError("shapes do not match")) is None
    assert explain_out_of_memory(ValueError("out of memory")) is None
