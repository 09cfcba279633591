"""Activation checkpointing, full or selective, and compilation of a model's units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypedDict

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, noop_context_fn
from transformers import PreTrainedModel

from shardtune.config import ModelConfig
from shardtune.errors import ModelError
from shardtune.models.kept_buffers import KeptBuffers
from shardtune.parallel.shard_units import outermost
from shardtune.parallel.torch_private.graph import in_transform
from shardtune.parallel.torch_private.operations import OpOverload, schema_of
from shardtune.parallel.torch_private.recomputation import selective_contexts

Contexts = Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]
"""The contexts of a forward pass and of its recomputation."""


class CheckpointArguments(TypedDict, total=False):
    """The arguments of `torch.utils.checkpoint.checkpoint` that are used here."""

    use_reentrant: bool
    context_fn: Contexts


CHECKPOINTS = "_gradient_checkpointing_func"
"""The attribute of a module of transformers through which it checkpoints what it calls."""
checkpoint_apart = torch.compiler.disable(checkpoint)
"""`checkpoint`, which the compiler does not read, around a function that is compiled by itself.

The compiler can read `checkpoint` and compile it with the layer around it, but only as a whole: it takes no contexts,
in which buffers are kept, and a layer that it has to interrupt (attention over packed rows, experts, an attribute that
is set) would be computed uncompiled, without a word.
"""
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_grouped_mm": 0, "_scaled_mm": 0, "_scaled_grouped_mm": 0}
"""Matrix products of aten, and which of their tensors is the left factor, whose last dimension is summed over."""
OTHERS = ("convolution", "_varlen_attn", "_flash_attention_forward", "_efficient_attention_forward")
FUSED_ATTENTION = "_scaled_dot_product_"
WIDER = 8
"""A product [m, k] x [k, n] is saved if n <= WIDER * k, and recomputed if it is wider.

Each number of the result takes 2 k operations, so a wide product with a small k fills memory and is cheap to repeat:
the scores of plain attention (k = head_dim, n = tokens of the sequence), rotary angles (k = 1), the second matrix of a
low-rank adapter (k = rank). Of a linear layer 4096 -> 14336 k is 4096 and n is 14336: saved. Of LoRA's second matrix
with rank 16, k is 16 and n is 4096: recomputed.
"""


def set_execution(model: nn.Module, units: Sequence[nn.Module], config: ModelConfig) -> None:
    """Apply `actor.model.gradient_checkpointing` and `actor.model.compile` to a model, in place, before it is sharded.

    A second call changes nothing more.

    Args:
        model: any module; a model of transformers in it uses its own checkpointing where it has one.
        units: the modules that are sharded as a unit; each is checkpointed, or compiled, by itself.
        config: the section `actor.model`.

    Raises:
        ModelError: there is no unit to checkpoint.
    """
    alone = outermost(list(units))
    if config.gradient_checkpointing:
        _checkpoint_units(model, alone, config.gradient_checkpointing, config.compile)
    if config.compile:
        for unit in alone or [model]:
            unit.compile(dynamic=True)


def checkpoint_arguments(kind: bool | str, module: nn.Module | None = None) -> CheckpointArguments:
    """The arguments of `checkpoint` for a value of `actor.model.gradient_checkpointing`.

    Args:
        kind: the value.
        module: whose forward is checkpointed, where that may change buffers.
    """
    selective = partial(selective_contexts, keep_dear) if kind == "selective" else None
    if module is not None and any(True for _ in module.buffers()):
        return {"use_reentrant": False, "context_fn": partial(KeptBuffers(module).contexts, selective)}
    return {"use_reentrant": False, "context_fn": selective} if selective else {"use_reentrant": False}


def checkpoint_pretrained(model: PreTrainedModel, kind: bool | str, *, compiles: bool) -> None:
    """Let a model of transformers checkpoint its layers.

    Args:
        model: that supports it.
        kind: of `actor.model.gradient_checkpointing`.
        compiles: whether its layers are compiled.
    """
    model.activation_checkpointing_enable(checkpoint_arguments(kind))
    for module in model.modules():
        if CHECKPOINTS in vars(module):
            arguments = checkpoint_arguments(kind, module)
            if compiles:
                setattr(module, CHECKPOINTS, partial(checkpoint_apart, torch.compile(_call, dynamic=True), **arguments))
            else:
                setattr(module, CHECKPOINTS, partial(_checkpointed, **arguments))


def checkpoint_unit(unit: nn.Module, kind: bool | str, *, compiles: bool = False) -> None:
    """Checkpoint the forward of a module; a second call changes nothing more.

    Args:
        unit: the module.
        kind: of `actor.model.gradient_checkpointing`.
        compiles: whether the forward is compiled; torch compiles nothing that a checkpoint calls, unless that is
            compiled by itself.
    """
    if isinstance(unit.forward, partial) and unit.forward.func in (_checkpointed, checkpoint_apart):
        return
    arguments = checkpoint_arguments(kind, unit)
    if compiles:
        unit.forward = partial(checkpoint_apart, torch.compile(unit.forward, dynamic=True), **arguments)
    else:
        unit.forward = partial(_checkpointed, unit.forward, **arguments)


def _checkpointed(
    function: Callable[..., object],
    *args: object,
    context_fn: Contexts = noop_context_fn,
    use_reentrant: bool,
    **kwargs: Any,
) -> object:
    """`checkpoint`; in a transform of `torch.func`, which allows none, the function is called as it is."""
    if in_transform():
        return function(*args, **kwargs)
    return checkpoint(function, *args, use_reentrant=use_reentrant, context_fn=context_fn, **kwargs)


def keep_dear(_context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Save the results of matrix products and attention kernels, recompute all others.

    A kernel that draws random numbers is always recomputed: if it were skipped, the generator would not advance, and
    later draws of the recomputation would differ from those of the forward pass.
    """
    keep = isinstance(op, OpOverload) and _is_dear(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _is_dear(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    name = schema_of(op).name.partition("::")[2]
    if name in PRODUCTS:
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        left, right = tensors[PRODUCTS[name] : PRODUCTS[name] + 2]
        return WIDER * left.shape[-1] >= right.shape[-1]
    if name not in OTHERS and not (name.startswith(FUSED_ATTENTION) and "backward" not in name):
        return False
    return torch.Tag.nondeterministic_seeded not in op.tags or _dropout(op, args, kwargs) == 0.0


def _dropout(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> float | None:
    """The dropout probability of an attention kernel; None if it has no such argument."""
    for place, argument in enumerate(schema_of(op).arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return float(given) if isinstance(given, int | float) else 0.0
    return None


def _call(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    return function(*args, **kwargs)


def _checkpoint_units(model: nn.Module, units: Sequence[nn.Module], kind: bool | str, compiles: bool) -> None:
    pretrained = outermost([one for one in model.modules() if isinstance(one, PreTrainedModel)])
    own = [one for one in pretrained if isinstance(one, PreTrainedModel) and one.supports_gradient_checkpointing]
    for one in own:
        checkpoint_pretrained(one, kind, compiles=compiles)
    within = {id(module) for one in own for module in one.modules()}
    units = [unit for unit in units if id(unit) not in within]
    if not units and not own:
        raise ModelError(
            f"{type(model).__name__} has no units whose activations could be computed again",
            where=f"actor.model.gradient_checkpointing: {str(kind).lower()}",
            remedy="name the classes of its repeated modules (unit_classes of the adapter, actor.fsdp_config.wrap), or "
            "set it to false",
        )
    for unit in units:
        checkpoint_unit(unit, kind, compiles=compiles)
