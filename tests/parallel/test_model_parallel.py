"""Experts that ranks share: what is refused before ranks start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardtune.errors import ParallelError
from shardtune.parallel.model_parallel import DISPATCHED, check_experts


class Experts(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(number, 3, 2))


def test_ranks_have_to_divide_the_experts() -> None:
    model = nn.ModuleDict({"first": Experts(6), "second": Experts(6)})
    plan = {name: style for key in model for name, style in ((key, DISPATCHED), (f"{key}.weight", "grouped_gemm"))}
    assert check_experts(model, plan, 3) == ["first", "second"]
    with pytest.raises(ParallelError, match="4 ranks cannot share 6 experts evenly") as error:
        check_experts(model, plan, 4)
    assert error.value.remedy == "set it to 3"
    with pytest.raises(ParallelError, match="ModuleDict declares no experts"):
        check_experts(model, {}, 2)
