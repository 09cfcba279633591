"""Sharding with FSDP2."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from shardtune.parallel.full_precision import full_precision_layers, full_precision_parameters
from shardtune.parallel.precision import COMPUTE_DTYPE, SUM_DTYPE
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.torch_private.fsdp2 import count_calls, shard_integers


def shard(
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
) -> None:
    """Shard `root` in place over the ranks that its layout names, with FSDP2; a single process keeps the plain module.

    With copies of the sharded model (HSDP) gradients are reduced over the shards first, then over the copies; copies
    alone (DDP) are shards of one rank.

    Gradients are summed over ranks, not averaged: losses are divided by the step's weight beforehand. FSDP2 averages
    unless every one of its modules is set otherwise (the root alone is silently wrong), and gloo can only sum.
    Scalar and empty parameters, which FSDP2 cannot split, and those that need full precision stay whole on every rank;
    `Weights` sums their gradients. Large layers that need it are units of their own.

    Args:
        root: the module that is called, on the meta device.
        units: modules that are gathered and freed as one; one inside another is gathered by itself.
        ranks: all of them share the shards.
        precision: bf16 | pure_bf16 | fp16 | fp32 | fp64.
        reshard_after_forward: False keeps a unit's weights between forward and backward.
        prefetch: how many units ahead weights are gathered; 1 leaves it to FSDP2.
        entry_points: names of further methods of `root` that use its weights.
        experts: modules whose parameters are spread over experts' ranks already; each shards over the others by itself.
        offload: keep weights, gradients and optimizer states in host memory.
        cast_inputs: whether floating inputs of `root` and of the units get the dtype of the computation. One process
            casts none, so targets, draws and tables of positions would be rounded on several ranks alone.
    """
    if ranks.mesh is None:
        return
    shards = ranks.shard_mesh
    compute = COMPUTE_DTYPE[precision]
    sums = SUM_DTYPE[precision]
    policy = MixedPrecisionPolicy(
        param_dtype=compute if compute != sums else None, reduce_dtype=sums, cast_forward_inputs=cast_inputs
    )
    whole = {parameter for parameter in root.parameters() if parameter.ndim == 0 or not parameter.numel()}
    in_full: list[nn.Linear] = []
    if policy.param_dtype is not None:
        in_full = full_precision_layers(root, compute)
        whole |= full_precision_parameters(root, compute).difference(*(layer.parameters() for layer in in_full))
    shard_integers()
    by_itself = {*units, *experts, *in_full}
    innermost_first = [module for module in reversed(list(root.modules())) if module in by_itself]
    for unit in (*innermost_first, root):
        fully_shard(
            unit,
            mesh=ranks.expert_mesh["expert_shard"] if unit in experts and ranks.expert_mesh is not None else shards,
            mp_policy=replace(policy, param_dtype=None) if unit in in_full else policy,
            reshard_after_forward=reshard_after_forward and unit is not root,
            ignored_params=whole,
            offload_policy=CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if offload else OffloadPolicy(),
        )
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if prefetch > 1:
        gather_ahead(root, prefetch)
    for name in entry_points:
        register_fsdp_forward_method(root, name)


def gather_ahead(root: nn.Module, number: int) -> None:
    """Let each unit prefetch the weights of this many others before its own are used.

    Those are the next ones in the forward pass and the ones before in the backward pass, in the order in which the
    model has them. By itself FSDP2 prefetches in the backward pass only, one unit.

    Args:
        root: sharded; its own weights count as the first unit's.
        number: at least 1.
    """
    units: list[FSDPModule] = [
        module for module in root.modules() if isinstance(module, FSDPModule)
    ]  # the root is the first
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + number])
        before = units[max(1, place - number) : place] if place else units[-number:]
        unit.set_modules_to_backward_prefetch([module for module in reversed(before) if module is not root])
        count_calls(unit)
