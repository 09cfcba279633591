"""The factor of clipping, and numbers that clip nothing."""

from __future__ import annotations

import pytest
import torch

from shardtune.engine.nn import BaseTrainModule
from shardtune.errors import ModelError
from shardtune.parallel.clipping import check_max_norm, clip_factor


class Mine(BaseTrainModule):
    """Without weights."""


@pytest.mark.parametrize("max_norm", [0.5, 5.0, 50.0, float("inf")])
def test_a_gradient_is_scaled_as_by_torch(max_norm: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    weight.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    expected = weight.grad * clip_factor(max_norm, 5.0)
    torch.nn.utils.clip_grad_norm_([weight], max_norm)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_a_norm_that_turns_or_erases_the_gradient_is_refused(max_norm: float) -> None:
    with pytest.raises(ModelError, match=r"clip_grad_norm_ is called with (0\.0|-1\.0|nan)") as caught:
        check_max_norm(max_norm, "Mine.train")
    assert caught.value.where == "Mine.train"


def test_so_it_is_in_a_module_of_an_engine() -> None:
    with pytest.raises(ModelError, match=r"clip_grad_norm_ is called with -1\.0") as caught:
        BaseTrainModule.clip_grad_norm_(Mine(), -1.0)
    assert caught.value.where == "Mine"
