"""What a model gets, or loses, after it was built is refused: no optimizer or checkpoint has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

from shardtune.errors import ModelError
from shardtune.parallel.buffers import KeptBuffers
from shardtune.parallel.meta_init import materialise
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


class Projected(nn.Module):
    """Buffers in products, of which torch takes one dtype alone, and a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fixed", torch.full((2, 4), 0.1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
        sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
        self.language = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x @ self.fixed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_in_fp64_buffers_are_those_of_double(dtype: torch.dtype) -> None:
    net = Projected()
    frequencies = net.language.rotary_emb.inv_freq.clone()
    materialise(net, dtype=dtype, device=torch.device("cpu"))
    plain = Projected().to(dtype)
    plain.load_state_dict(net.state_dict())
    x = torch.rand(5, 2, dtype=dtype)
    assert torch.equal(net.eval()(x), plain.eval()(x))
    assert torch.equal(net.language.rotary_emb.inv_freq, frequencies)  # as transformers loads it
    assert net.seen.dtype == torch.int64


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("read", "written", "behind", "another"):
            self.register_buffer(name, torch.zeros(2), persistent=False)


def test_buffers_of_no_checkpoint_get_their_values_again_however_they_were_written() -> None:
    model = Counting()
    buffers, kept = dict(model.named_buffers()), KeptBuffers(model)
    versions = {name: buffer._version for name, buffer in buffers.items()}
    buffers["written"].add_(1)
    buffers["behind"].data.add_(1)
    model.another = torch.ones(2)
    kept.restore()
    assert all(now is buffers[name] and not now.any() for name, now in model.named_buffers())
    assert {name for name, buffer in buffers.items() if buffer._version != versions[name]} == {"written"}
