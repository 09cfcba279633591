"""What activation checkpointing keeps, what it computes a second time, and how much memory that takes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from transformers import Qwen2Config, Qwen2ForCausalLM

from shardtune.models.activation_checkpointing import (
    PRODUCTS,
    checkpoint_arguments,
    checkpoint_pretrained,
    checkpoint_unit,
    keep_dear,
)
from shardtune.parallel.torch_private.recomputation import selective_contexts

LAYERS = 2
ATEN = torch.ops.aten


class Products(TorchDispatchMode):
    """Counts matrix products and attention kernels, those of backward passes too."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        self.products += name in PRODUCTS
        self.attention += name.startswith("_scaled_dot_product") and "backward" not in name
        return func(*args, **(kwargs or {}))


def run(how: bool | str) -> tuple[Products, int, list[torch.Tensor]]:
    """One forward and backward of a small model: what was computed, the bytes held between the two, gradients."""
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_hidden_layers=LAYERS, **sizes)).double().train()
    if how:
        model.activation_checkpointing_enable(checkpoint_arguments(how))
    ids = torch.randint(0, 64, (2, 96))
    counted = Products()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    held = sum(event.self_cpu_memory_usage for event in profile.events() or ())
    loss.backward()
    first = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with counted:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counted, held, first


@pytest.mark.lengthy
def test_selective_computes_no_product_twice_and_holds_less_than_all() -> None:
    (none, most, wanted), (full, least, _), (selective, between, found) = run(False), run(True), run("selective")
    assert full.products - none.products == 6 * LAYERS  # each of seven but the last, which nothing waits for
    assert full.attention - none.attention == LAYERS
    assert (selective.products, selective.attention) == (none.products, none.attention)
    assert least < 0.8 * between < 0.8 * 0.8 * most
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-12)


class Added(torch.nn.Module):
    """A layer that changes the result of its product in place."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.one, self.two = torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6, bias=False)
        self.bias = torch.nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.one(x).tanh() @ self.two.weight
        return found.add_(self.bias).sin() if self.inside else found


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_product_that_is_changed_in_place_is_computed_again(inside: bool, backwards: int) -> None:
    """By the layer itself, as biases of experts are added, or by whoever calls it."""
    layer, x = Added(inside).double(), torch.randn(4, 6, dtype=torch.float64)
    found = []
    for how in (False, "selective"):
        layer.zero_grad()
        for _ in range(backwards):
            out = checkpoint(layer, x, **checkpoint_arguments(how)) if how else layer(x)
            out.add_(x).cos().sum().backward()
        found.append([parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None])
    assert len(found[0]) == 2 + inside
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-14)


def test_what_is_saved_is_freed_without_a_search_for_garbage() -> None:
    """Nothing that holds it is part of a cycle; a plan and the memory of a step depend on it."""

    def policy(*args: Any, **kwargs: Any) -> CheckpointPolicy:
        return keep_dear(*args, **kwargs)

    gone, ones = weakref.ref(policy), torch.ones(4, 4)
    gc.disable()
    try:
        contexts = selective_contexts(policy)
        with contexts[0]:
            ones @ ones
        del contexts, policy
        assert gone() is None
    finally:
        gc.enable()


def kept(op: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    return keep_dear(None, op, *args, **kwargs) == CheckpointPolicy.MUST_SAVE


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_what_is_cheap_for_its_width_is_computed_again() -> None:
    assert kept(ATEN.mm.default, empty(100, 512), empty(512, 2048))
    assert kept(ATEN.addmm.default, empty(8), empty(100, 1), empty(1, 8))
    assert not kept(ATEN.mm.default, empty(100, 16), empty(16, 512))  # the second matrix of an adapter
    assert kept(ATEN.mm.default, empty(100, 512), empty(512, 16))  # and the first
    assert not kept(ATEN.bmm.default, empty(8, 2048, 64), empty(8, 64, 2048))  # scores
    assert kept(ATEN.bmm.default, empty(8, 2048, 2048), empty(8, 2048, 64))  # values
    assert not kept(ATEN.silu.default, empty(100, 512))


@pytest.mark.parametrize("name", ["_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"])
def test_a_kernel_that_draws_is_run_again(name: str) -> None:
    """Passed over, it would leave the generator behind."""
    op = getattr(ATEN, name).default
    q = empty(1, 4, 128, 64)
    bias = [None, True] if "cudnn" in name else []
    assert kept(op, q, q, q, *bias, 0.0)
    assert kept(op, q, q, q, *bias)
    assert not kept(op, q, q, q, *bias, 0.1)
    assert not kept(op, q, q, q, *bias, dropout_p=0.1)


@pytest.mark.parametrize("kind", [True, "selective"])
def test_a_transform_of_torch_func_differentiates_a_checkpointed_layer(kind: bool | str) -> None:
    """torch refuses a checkpoint there, so the layer is called as it is; elsewhere it stays checkpointed."""
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double(), torch.randn(2, 3, dtype=torch.float64)

    def gradients() -> list[torch.Tensor]:
        layer.zero_grad()
        (grad(lambda v: layer(v).sum())(x).square().sum() + layer(x).sum()).backward()
        return [one.grad for one in layer.parameters() if one.grad is not None]

    wanted = gradients()
    checkpoint_unit(layer, kind)
    for found, expected in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_so_does_one_of_transformers() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=8, num_hidden_layers=1, attn_implementation="eager", **sizes)
    model = Qwen2ForCausalLM(config).double().train()
    x = torch.randn(1, 4, 16, dtype=torch.float64)

    def slope() -> torch.Tensor:
        return grad(lambda v: model(inputs_embeds=v, use_cache=False).logits.sum())(x)

    wanted = slope()
    checkpoint_pretrained(model, True, compiles=False)
    assert torch.equal(slope(), wanted)
