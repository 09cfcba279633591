"""How the units of a model run: computed a second time in the backward pass, in full or in part, or compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from shardtune.config import ModelConfig
from shardtune.errors import ModelError
from shardtune.parallel.shard_units import outermost
from shardtune.parallel.torch_private import OpOverload, schema_of

PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_grouped_mm": 0, "_scaled_mm": 0, "_scaled_grouped_mm": 0}
"""Matrix products of aten, and which of their arguments is the left factor, whose last dimension is summed over."""
OTHERS = ("convolution", "_varlen_attn", "_flash_attention_forward", "_efficient_attention_forward")
FUSED_ATTENTION = "_scaled_dot_product_"
WIDER = 8
"""How many times as wide as what is summed over a product may be and still be kept.

A number of the result costs twice as many operations as are summed over. Scores of plain attention (rows of them, as
wide as the text is long), rotary angles and the second matrix of a low-rank adapter are wide and cheap.
"""


def set_execution(model: nn.Module, units: Sequence[nn.Module], config: ModelConfig) -> None:
    """Apply `actor.model.gradient_checkpointing` and `actor.model.compile` to a model, in place, before it is sharded.

    Args:
        model: any module; a model of transformers checkpoints in its own way, where it has one.
        units: the modules that shard together; each is computed again, or compiled, by itself.
        config: the section `actor.model`.

    Raises:
        ModelError: there is nothing to compute again.
    """
    alone = outermost(list(units))
    if config.gradient_checkpointing:
        _compute_again(model, alone, config.gradient_checkpointing)
    if config.compile:
        for unit in alone or [model]:
            unit.compile(dynamic=True)


def checkpoint_arguments(kind: bool | str) -> dict[str, Any]:
    """What `torch.utils.checkpoint.checkpoint` takes for a value of `actor.model.gradient_checkpointing`."""
    if kind == "selective":
        return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, keep_dear)}
    return {"use_reentrant": False}


def keep_dear(_context: Any, op: Callable[..., Any], *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether the result of an operation is kept (matrix products, attention kernels) or computed a second time.

    A kernel that draws random numbers is run again: one that is passed over would leave the generator behind, and what
    is drawn after it would differ from the first time.
    """
    keep = isinstance(op, OpOverload) and _is_dear(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _is_dear(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    name = schema_of(op).name.partition("::")[2]
    if name in PRODUCTS:
        left, right = args[PRODUCTS[name] : PRODUCTS[name] + 2]
        return WIDER * left.shape[-1] >= right.shape[-1]
    if name not in OTHERS and not (name.startswith(FUSED_ATTENTION) and "backward" not in name):
        return False
    return torch.Tag.nondeterministic_seeded not in op.tags or _dropout(op, args, kwargs) == 0.0


def _dropout(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
    """The share that an attention kernel drops; None if it does not say."""
    for place, argument in enumerate(schema_of(op).arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return float(given or 0.0)
    return None


def _compute_again(model: nn.Module, units: Sequence[nn.Module], kind: bool | str) -> None:
    if isinstance(model, PreTrainedModel) and model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable(checkpoint_arguments(kind))
        return
    if not units:
        raise ModelError(
            f"{type(model).__name__} has no units whose activations could be computed again",
            where=f"actor.model.gradient_checkpointing: {str(kind).lower()}",
            remedy="name the classes of its repeated modules (unit_classes of the adapter, actor.fsdp_config.wrap), or "
            "set it to false",
        )
    for unit in units:
        unit.forward = partial(checkpoint, unit.forward, **checkpoint_arguments(kind))
