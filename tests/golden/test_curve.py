"""A refactoring must not move the loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.curve import KEYS, RECORD, STEPS, measure

pytestmark = pytest.mark.lengthy

TOLERANCE = 1e-6
"""Processors differ by 1e-13 in fp64; every change of meaning moves some of these numbers by more than 1e-4."""


@pytest.mark.parametrize("micro_batch_size", [8, 3, 1])
def test_losses_are_those_on_record(micro_batch_size: int, tmp_path: Path):
    """However a step is cut into micro-batches; the ragged last step of each epoch included."""
    expected = json.loads(RECORD.read_text())
    measured = measure(tmp_path, f"actor.micro_batch_size={micro_batch_size}")
    assert len(measured) == len(expected) == STEPS
    for step, (now, before) in enumerate(zip(measured, expected, strict=True), 1):
        for key in KEYS:
            assert now[key] == pytest.approx(before[key], rel=TOLERANCE, abs=1e-12), f"step {step}: {key}"


def test_the_record_is_worth_comparing_with():
    """It falls, clips in some steps and not in others, and holds a short step."""
    lines = json.loads(RECORD.read_text())
    assert lines[-1]["train/loss"] < 0.9 * lines[0]["train/loss"]
    clipped = [line["train/grad_norm"] > 1.2 for line in lines]
    assert any(clipped)
    assert not all(clipped)
    assert min(line["train/tokens"] for line in lines) < 0.7 * max(line["train/tokens"] for line in lines)
    assert all(line["train/supervised_tokens"] < line["train/tokens"] for line in lines)
    assert len({line["train/learning_rate"] for line in lines}) > STEPS / 2
