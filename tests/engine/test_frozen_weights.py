"""Marks of weights, by which a change of their bits is noticed."""

from __future__ import annotations

import pytest
import torch

from shardtune.engine.frozen_weights import _mark


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [2.0, 0.5, -1.0, 4.0])
def test_weights_that_are_doubled_have_another_mark(dtype: torch.dtype, factor: float) -> None:
    weight = torch.rand(64, 32, dtype=dtype, generator=torch.Generator().manual_seed(0)) + 1
    assert _mark(weight) == _mark(weight.clone())
    assert _mark(weight) != _mark(weight * factor)
