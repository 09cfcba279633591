"""FSDP1, which torch develops no further, so nothing of this is going to be public."""

from __future__ import annotations

from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._flat_param import FlatParameter as FlatParameter
from torch.distributed.fsdp._runtime_utils import _reduce_grad

# `FlatParameter` is the type of a parameter that FSDP1 has joined; only annotations need it.

HYBRID_SHARD_ZERO2 = ShardingStrategy._HYBRID_SHARD_ZERO2
"""Copies of a sharded model whose weights stay whole between forward and backward."""


def flat_parameter(wrapped: FullyShardedDataParallel) -> FlatParameter | None:
    """The parameter that FSDP1 has made of a unit's; None for a unit without any."""
    return None if wrapped._handle is None else wrapped._handle.flat_param


def gather(wrapped: FullyShardedDataParallel) -> None:
    """Gather a unit's weights outside of a forward, in the dtype of the computation; `free_gathered` frees them.

    The public `summon_full_params` gathers them in full precision.
    """
    if wrapped._handle is not None:
        wrapped._handle.pre_unshard()
        wrapped._handle.unshard()
        wrapped._handle.post_unshard()


def free_gathered(wrapped: FullyShardedDataParallel) -> None:
    """Free a unit's gathered weights, which FSDP1 keeps after a forward without a backward; the next one gathers."""
    if wrapped._handle is not None:
        wrapped._handle.reshard(free_unsharded_flat_param=True)
        wrapped._handle.post_reshard()


def is_gathered(wrapped: FullyShardedDataParallel) -> bool:
    """Whether a unit's weights are gathered, or its modules have views of what was, or its memory still holds it."""
    handle = wrapped._handle
    if handle is None:
        return False
    holds = handle.uses_sharded_strategy and not handle.needs_unshard()
    return holds or handle._skipped_use_sharded_views or not handle.is_sharded(handle.flat_param)


def sum_gradients(wrapped: FullyShardedDataParallel) -> None:
    """Let FSDP1 sum gradients over ranks, where it would average."""
    wrapped._gradient_predivide_factor = wrapped._gradient_postdivide_factor = 1


def reduces_gradients(wrapped: FullyShardedDataParallel) -> bool:
    """Whether this backward pass reduces gradients over ranks, that is, is not inside `no_sync`."""
    return wrapped._sync_gradients


def reduce_left_gradient(wrapped: FullyShardedDataParallel) -> None:
    """Reduce a unit's gradient over ranks, if a backward pass has left it whole.

    FSDP1 reduces it at the end of the first forward since the last pass. In half precision each forward accumulates by
    itself, so a pass without that one (its output is dropped, or detached) does not come by there.
    """
    handle = wrapped._handle
    flat = None if handle is None else handle.flat_param
    if handle is None or flat is None or flat.grad is None or flat.grad.numel() == flat.numel():
        return
    flat.grad.data = flat.grad.to(handle._reduce_dtype)
    before = wrapped.training_state, handle._training_state
    wrapped.training_state = TrainingState.FORWARD_BACKWARD
    handle._training_state = HandleTrainingState.BACKWARD_POST
    try:
        _reduce_grad(wrapped, handle)
    finally:
        wrapped.training_state, handle._training_state = before
    handle.prepare_gradient_for_optim()


def drop_unreduced_gradient(flat: FlatParameter) -> None:
    """Forget a gradient that is not reduced yet; FSDP1 would go on adding to it, in the dtype of the computation."""
    flat.grad = None
    flat._post_backward_called = False
    for parameter in flat._params or ():
        parameter.grad = None
