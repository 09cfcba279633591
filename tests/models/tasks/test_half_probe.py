"""Half precision is refused for a model that fails in it alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardtune.errors import ModelError
from shardtune.models.mixed_precision import compute_in
from shardtune.models.tasks.half_probe import check_half


class Widening(nn.Module):
    """Multiplies what it widens to fp32 by its own weight, as FNet does, or fails in any precision."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.weight, self.fails = nn.Parameter(torch.ones(2, 3)), fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise LookupError("no such thing")
        return F.linear(x.float(), self.weight)


def test_a_model_that_fails_in_half_alone_is_refused() -> None:
    model = Widening(fails=False)
    check_half(model, lambda: model(torch.ones(1, 3)), 1)
    model = model.bfloat16()
    in_dtype = [torch.bfloat16]

    def compute() -> None:
        kind = in_dtype.pop() if in_dtype else torch.float32  # as computing_in_fp32 makes of a model in half precision
        model.to(kind)(torch.ones(1, 3))

    with pytest.raises(ModelError, match=r"fails in half precision: RuntimeError: .*dtype"):
        check_half(model, compute, 1)


def test_a_model_that_fails_in_any_precision_is_not_about_half() -> None:
    """Its own error comes where the model is called next."""
    model = Widening(fails=True)
    compute_in(model, torch.bfloat16)
    check_half(model, lambda: model(torch.ones(1, 3)), 1)
