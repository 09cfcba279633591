"""Sums of gradients over ranks that FSDP does not make."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardtune.parallel.ranks import Ranks


def sum_whole(parameters: Sequence[nn.Parameter], dtype: torch.dtype, ranks: Ranks) -> None:
    """Sum over all ranks the gradients of parameters that every rank holds whole and no plan cuts.

    Such are scalars, and norms in full precision. Tensor ranks have computed the same gradient of them, so tensor rank
    0 alone contributes its own; with every rank's the sum would be too large by a factor of the number of tensor ranks.

    Args:
        parameters: the same on all ranks, each of which calls it.
        dtype: of the sums of parameters without a gradient on this rank.
        ranks: of the run.
    """
    # A parameter that no rank used keeps no gradient, so that the optimizer skips it (no weight decay, no moments).
    used = torch.tensor([parameter.grad is not None for parameter in parameters], device=ranks.device)
    contributes = ranks.tensor_rank == 0
    grads = [p.grad if p.grad is not None and contributes else torch.zeros_like(p, dtype=dtype) for p in parameters]
    flat = torch.cat([*(grad.reshape(-1) for grad in grads), used.to(grads[0].dtype)])
    dist.all_reduce(flat)
    pieces = flat.split([*(grad.numel() for grad in grads), len(parameters)])
    for parameter, piece, users in zip(parameters, pieces, pieces[-1].tolist(), strict=False):
        parameter.grad = piece.view_as(parameter).clone() if users else None


def sum_parts(grads: Sequence[torch.Tensor], ranks: Ranks) -> None:
    """Sum, in place, gradients over tensor ranks, of which each has computed a part.

    They are this rank's shards, which lie alike on all tensor ranks; FSDP sums shards over the other ranks. Worked
    example: the two tensor ranks of a layer both hold the weight of a norm of queries, and each uses it on its own
    heads. Micro-batch 1 gives gradients 1 and 2 there, micro-batch 2 gives 10 and 20. After both backward passes the
    ranks hold 11 and 22; one sum makes it 33 on both, which is right. transformers' hook sums `.grad` in each backward
    pass: 1 + 2 = 3 on both after the first, then 3 + 10 and 3 + 20, whose sum is 36. With T tensor ranks it counts
    micro-batch k of n T ** (n - k) times.
    """
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=ranks.tensor_mesh.get_group())
    for grad, piece in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(piece.view_as(grad))
