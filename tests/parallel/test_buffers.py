"""What a model gets, or loses, after it was built is refused: no optimizer or checkpoint has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardtune.errors import ModelError
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("later", None)
        self.register_buffer("cache", None, persistent=False)


CHANGES: dict[str, tuple[Callable[[Net], object], str]] = {
    "emptied": (
        lambda net: setattr(net, "mean", None),
        "mean is [2] of torch.float32 when the model is built and None",
    ),
    "another shape": (lambda net: setattr(net, "mean", torch.zeros(3)), "and [3] of torch.float32 now"),
    "another dtype": (lambda net: setattr(net, "mean", torch.zeros(2).double()), "and [2] of torch.float64 now"),
    "filled": (lambda net: setattr(net, "later", torch.zeros(2)), "the buffer later was made after the model was"),
    "registered": (lambda net: net.register_buffer("own", torch.zeros(2)), "the buffer own was made after the model"),
    "a layer": (lambda net: setattr(net, "proj", nn.Linear(2, 2)), "the parameter proj.weight was made after the"),
    "another layer": (lambda net: setattr(net, "inner", nn.Linear(2, 2)), "the parameter inner.weight was made after"),
    "a norm": (lambda net: setattr(net, "norm", nn.BatchNorm1d(2, affine=False)), "the buffer norm.running_mean was"),
}


def read(weights: Weights) -> None:
    weights.copy_buffers()
    weights.refuse_added()


@pytest.mark.parametrize("name", CHANGES)
def test_what_checkpoints_would_not_hold_is_refused(name: str) -> None:
    net = Net()
    weights = Weights(net, net, "fp32", Ranks(0, 1, torch.device("cpu")))
    net.mean = torch.ones(2)  # of the same form
    net.cache = torch.ones(3)
    read(weights)
    change, says = CHANGES[name]
    change(net)
    with pytest.raises(ModelError) as error:
        read(weights)
    assert says in str(error.value)
    assert "persistent=False" in str(error.value) or "constructor" in str(error.value)
