"""How the units of a model run: computed a second time in the backward pass, or compiled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from shardtune.config import ModelConfig
from shardtune.errors import ModelError
from shardtune.parallel.units import outermost


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
        _compute_again(model, alone)
    if config.compile:
        for unit in alone or [model]:
            unit.compile(dynamic=True)


def _compute_again(model: nn.Module, units: Sequence[nn.Module]) -> None:
    if isinstance(model, PreTrainedModel) and model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        return
    if not units:
        raise ModelError(
            f"{type(model).__name__} has no units whose activations could be computed again",
            where="actor.model.gradient_checkpointing: true",
            remedy="name the classes of its repeated modules (unit_classes of the adapter, actor.fsdp_config.wrap), or "
            "set it to false",
        )
    for unit in units:
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)
