"""What torch's generators draw is held, and a loss that depends on it still has its graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from shardtune.verify.held_draws import HeldDraws


def test_draws_are_constants_of_any_shape() -> None:
    like = torch.zeros(3, 20)
    with HeldDraws():
        halves = [
            torch.randn_like(like), torch.rand(7), torch.randn(2, generator=torch.Generator()), like.clone().normal_(),
            torch.normal(like, 1.0), like.clone().uniform_(), torch.distributions.Normal(0.0, 1.0).rsample((4,)),
        ]  # fmt: skip
        middles = [torch.randint(10, 20, (5,)), torch.randint(30, (5,)), torch.randint_like(like, 30)]
        kept = [torch.bernoulli(like + 0.1), like.clone().bernoulli_(0.1)]
    assert all((half == 0.5).all() for half in halves)
    assert all((middle == 15).all() for middle in middles)
    assert all((one == 1).all() for one in kept)
    assert len(torch.randn(9).unique()) == 9


def test_dropout_keeps_everything_and_gradients_pass() -> None:
    x = torch.ones(4, 6, requires_grad=True)
    with HeldDraws():
        dropped = F.dropout(x, 0.5) + nn.Dropout(0.5)(x)
        dropped.sum().backward()
    assert (dropped == 4).all()
    assert x.grad is not None
    assert (x.grad == 4).all()
