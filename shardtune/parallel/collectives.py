"""Sums and exchanges between ranks that gradients pass through."""

from __future__ import annotations

from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def sum_over(tensor: torch.Tensor, ranks: DeviceMesh) -> torch.Tensor:
    """The sum of a tensor over ranks, each of which holds a part; the gradient of the sum is that of every part."""
    return _Sum.apply(tensor, ranks.get_group())


def replicated_input(tensor: torch.Tensor, ranks: DeviceMesh) -> torch.Tensor:
    """A tensor that all ranks hold alike and each uses in a part of the work, so that its gradient is their sum."""
    return _HandToAll.apply(tensor, ranks.get_group())


def exchange(tensor: torch.Tensor, ranks: DeviceMesh, *, split: int, join: int) -> torch.Tensor:
    """Cut `tensor` along one dimension into a part per rank, and join the parts that come from all along another.

    Worked example on two ranks with split=0 and join=1: rank 0 has [[a b] [c d]], rank 1 has [[e f] [g h]]; then rank 0
    has [[a b e f]] and rank 1 has [[c d g h]]. The gradient takes the reverse path.

    Args:
        tensor: its dimension `split` divides by the number of ranks.
        ranks: one-dimensional.
        split: the dimension that becomes smaller.
        join: the dimension that becomes larger.
    """
    return _Exchange.apply(tensor, ranks.get_group(), split, join)


class _OverGroup(Protocol):
    """State that the forward pass saves for the backward pass."""

    group: dist.ProcessGroup


class _BetweenDimensions(_OverGroup, Protocol):
    split: int
    join: int


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _OverGroup, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: _OverGroup, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return cast(torch.Tensor, _HandToAll.apply(grads[0], ctx.group)), None


class _HandToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _OverGroup, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: _OverGroup, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return cast(torch.Tensor, _Sum.apply(grads[0], ctx.group)), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _BetweenDimensions, tensor: torch.Tensor, group: dist.ProcessGroup, split: int, join: int
    ) -> torch.Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        return _swap(tensor, group, split, join)

    @staticmethod
    def backward(ctx: _BetweenDimensions, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return cast(torch.Tensor, _Exchange.apply(grads[0], ctx.group, ctx.join, ctx.split)), None, None, None


def _swap(tensor: torch.Tensor, group: dist.ProcessGroup, split: int, join: int) -> torch.Tensor:
    num_ranks = dist.get_world_size(group)
    sent = torch.stack(tensor.chunk(num_ranks, dim=split)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(0), dim=join)
