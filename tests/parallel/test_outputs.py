"""Tensors are found in outputs of any kind, and those apart that FSDP2 does not find by itself."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from transformers.modeling_outputs import CausalLMOutput

from shardtune.parallel.outputs import tensors_in
from shardtune.parallel.unused_units import tie


class Plain:
    def __init__(self, loss: object) -> None:
        self.loss, self.model, self.text = loss, nn.Linear(2, 2), "text"


class Slotted:
    __slots__ = ("loss", "unset")

    def __init__(self, loss: object) -> None:
        self.loss = loss


class Described(Slotted):
    def __init__(self, loss: object) -> None:
        super().__init__(None)
        self.more = {"loss": loss}


@dataclass
class Data:
    loss: object


class Circle:
    def __init__(self, loss: object) -> None:
        self.loss, self.own = loss, self


def with_attribute(loss: Any) -> CausalLMOutput:
    output = CausalLMOutput(logits=torch.ones(2))
    output.__dict__["more"] = loss
    return output


SEEN = (lambda x: x, lambda x: (1, [x]), lambda x: {"a": {"b": x}}, Data, lambda x: CausalLMOutput(loss=x))
HIDDEN = (
    Plain, Slotted, Described, Circle, lambda x: [Data(Plain(x))], lambda x: UserDict(x=x), lambda x: {x},
    lambda x: Normal(x, 1.0), with_attribute,
)  # fmt: skip


@pytest.mark.parametrize("make", [*SEEN, *HIDDEN])
def test_tensors_are_found(make: Any) -> None:
    tensor = torch.ones(2, requires_grad=True) * 1
    made = make(tensor)
    (found,) = tensors_in(made)
    assert found is tensor or isinstance(made, Normal)  # which expands it
    assert len(tensors_in(made, hidden=True)) == (make in HIDDEN)
    assert not tensors_in(make(tensor.detach()))


@pytest.mark.parametrize("make", [*SEEN, Plain, Slotted, Described, Circle])
def test_others_get_gradients_through_an_object_of_any_kind(make: Any) -> None:
    """The object itself stays as it is, since it may be held elsewhere."""
    for tensor in (torch.ones(2, requires_grad=True) * 1, torch.ones(2)):
        other = torch.ones(1, requires_grad=True)
        made = make(tensor)
        tied = tie(made, [other])
        assert type(tied) is type(made)
        assert tensors_in(made, constants=True)[0] is tensor
        tensors_in(tied)[0].sum().backward()
        assert other.grad is not None
