"""Chooses FSDP2 or FSDP1 to shard a model, with the matching weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, TypedDict

from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from shardtune.errors import ParallelError
from shardtune.parallel.fsdp1 import FlatSharding, into_rows
from shardtune.parallel.fsdp1_weights import FlatWeights
from shardtune.parallel.fsdp2 import shard
from shardtune.parallel.generation import keep_step
from shardtune.parallel.gradient_hooks import refuse_gradient_hooks
from shardtune.parallel.half_products import lacks_half_products, multiply_in_fp32
from shardtune.parallel.precision import COMPUTE_DTYPE, IN_FULL
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.shard_units import REVERSIBLE
from shardtune.parallel.torch_private.tensors import read_whole_numbers
from shardtune.parallel.unfit_parameters import check_joined, check_python
from shardtune.parallel.weights import Weights


class _How(TypedDict):
    """Arguments of weights of either kind."""

    reduce_each: bool
    excluded_from_checkpoint: Collection[str]


class Hold(Protocol):
    """Makes the weights of a sharded model that has its values; every rank calls it."""

    def __call__(
        self,
        model: nn.Module,
        *,
        reduce_each: bool = False,
        excluded_from_checkpoint: Collection[str] = (),
        partial: Collection[str] = (),
        masters: bool = True,
    ) -> Weights: ...


def shard_model(
    root: nn.Module,
    units: Sequence[nn.Module],
    ranks: Ranks,
    precision: str,
    *,
    reshard_after_forward: bool = True,
    prefetch: int = 1,
    entry_points: Sequence[str] = (),
    experts: Collection[nn.Module] = (),
    offload: bool = False,
    cast_inputs: bool = True,
) -> Hold:
    """Shard `root` in place by its ranks' layout: with FSDP2 (so DDP too) or FSDP1; arguments as `shard` has them.

    FSDP1 takes weights that have their values, so here the model gets rows to load them into, and the returned
    function passes them on.

    Raises:
        ModelError: a parameter has a hook on its gradient, which would not be called.
        ParallelError: the model has no forward or is of TorchScript, or FSDP1 cannot shard a part of it.

    Returns:
        What makes the model's weights once it has its values; arguments as `Weights` and `FlatWeights` have them.
    """
    refuse_gradient_hooks(root.named_parameters(), ranks)
    if ranks.mesh is not None:
        read_whole_numbers()
        _refuse_container(root)
        check_python(root)
    for module in root.modules() if ranks.mesh is not None else ():
        if isinstance(module, GenerationMixin):
            keep_step(module)
    flat: FlatSharding | None = None
    if ranks.layout.flat and ranks.mesh is not None:
        _refuse_reversible(root)
        check_joined(dict(root.named_parameters()))
        flat = FlatSharding(
            root, tuple(units), ranks, precision, reshard_after_forward, tuple(entry_points), cast_inputs
        )
        into_rows(flat)
    else:
        shard(
            root,
            units,
            ranks,
            precision,
            reshard_after_forward=reshard_after_forward,
            prefetch=prefetch,
            entry_points=entry_points,
            experts=experts,
            offload=offload,
            cast_inputs=cast_inputs,
        )
    _register_recorded_outputs(root)
    if lacks_half_products(ranks.device, COMPUTE_DTYPE[precision]):
        multiply_in_fp32(root)

    def hold(
        model: nn.Module,
        *,
        reduce_each: bool = False,
        excluded_from_checkpoint: Collection[str] = (),
        partial: Collection[str] = (),
        masters: bool = True,
    ) -> Weights:
        how: _How = {"reduce_each": reduce_each, "excluded_from_checkpoint": excluded_from_checkpoint}
        if flat is not None:
            return FlatWeights(flat, model, masters=masters, **how)
        return Weights(root, model, precision if masters else IN_FULL[precision], ranks, partial=partial, **how)

    return hold


def _refuse_container(root: nn.Module) -> None:
    if isinstance(root, (nn.ModuleDict, nn.ModuleList)):
        raise ParallelError(
            f"the model is a {type(root).__name__}, which has no forward, before which weights could be gathered",
            where=type(root).__name__,
            remedy="make it a part of an nn.Module with a forward, and call that",
        )


def _refuse_reversible(root: nn.Module) -> None:
    for name in {type(module).__name__ for module in root.modules()}.intersection(REVERSIBLE):
        raise ParallelError(
            f"actor.training_backend: fsdp1 does not work with {name}, which computes its layers again in the backward "
            "pass and adds up their gradients there",
            where="actor.training_backend",
            remedy="use actor.training_backend: fsdp (FSDP2), or leave it out",
        )


def _register_recorded_outputs(root: nn.Module) -> None:
    """Let the models of transformers in `root` return hidden states, attentions and router logits.

    transformers registers what a model can return in its constructor, by the name of its class. An unpickled model has
    not run it, and FSDP2 gives a module another class; without the entry outputs are left out without a word.
    """
    for module in root.modules():
        if isinstance(module, PreTrainedModel):
            _CAN_RECORD_REGISTRY[module] = module.can_record_outputs
