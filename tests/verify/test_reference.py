"""The plain training that verify compares with, and the rounding errors that it is given."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from shardtune.verify.reference import rounding_as_bf16


@pytest.mark.parametrize("per_row", [False, True])
def test_rounding_reaches_transforms_of_torch_func(per_row: bool) -> None:
    """Weights are what they were afterwards, and tensors that a transform has made do not leave it."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), torch.randn(2, 3).double()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def loss() -> torch.Tensor:
        slope = vmap(grad(lambda v: model(v)[0]))(x) if per_row else grad(lambda v: model(v).sum())(x)
        return slope.square().sum() + model(x).sum()

    exact = loss()
    with rounding_as_bf16(model, seed=0):
        rounded = loss()
    rounded.backward()
    assert 0 < abs(rounded - exact) < 0.1
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert torch.equal(loss(), exact)
