"""Whether tensor ranks compute the same gradient of what each of them holds whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardtune.errors import ParallelError
from shardtune.parallel.ranks import Ranks

APART = 0.05
"""Difference of a gradient, relative to its own norm, from which on ranks have computed other sums, not roundings."""
COUNTS = 1e-5
"""Of the largest gradient's norm; a smaller gradient may be nothing but roundings."""
OF_SHARDS = {"replicate", "shard"}
"""Axes of the mesh on which the parts of a parameter lie that tensor ranks have alike."""


def check_whole_gradients(parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> bool:
    """Compare the gradients of parameters that no plan cuts, before they are summed; every rank calls it.

    Args:
        parameters: by name, those that are trained and that no plan has as parts.
        ranks: of the run.

    Returns:
        Whether there was a gradient to compare.

    Raises:
        ParallelError: a tensor rank has another gradient than the first one; it would train other weights.
    """
    whole = {name: parameter for name, parameter in parameters.items() if _is_alike(parameter)}
    if not whole:
        return True
    found = torch.tensor([_compared(parameter, ranks) for parameter in whole.values()], dtype=torch.float64)
    differences, norms = ranks.largest_of(found.to(ranks.device, torch.float32)).double().cpu().unbind(1)
    apart = (differences > APART * norms) & (norms > COUNTS * norms.max())
    wrong = [name for name, is_apart in zip(whole, apart.tolist(), strict=True) if is_apart]
    if wrong:
        raise ParallelError(
            f"every tensor rank holds {wrong[0]} whole, and computes another gradient of it: it is used on a rank's "
            f"own features or heads alone ({len(wrong)} such parameter{'s' if len(wrong) > 1 else ''})",
            where="actor.parallel.tensor",
            remedy="give it the style replicated_with_grad_allreduce in the tensor_plan of an adapter, freeze it, or "
            "set actor.parallel.tensor: 1",
        )
    return bool(norms.max() > 0)


def _is_alike(parameter: nn.Parameter) -> bool:
    """Whether tensor ranks hold the same of a parameter."""
    return not isinstance(parameter, DTensor) or set(parameter.device_mesh.mesh_dim_names or ()) <= OF_SHARDS


def _compared(parameter: nn.Parameter, ranks: Ranks) -> tuple[float, float]:
    """The norms of the difference from the first tensor rank's gradient, and of this rank's."""
    held = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    own = held.to_local() if isinstance(held, DTensor) else held
    first = own.detach().clone().contiguous()
    group = ranks.tensor_mesh.get_group()
    dist.broadcast(first, dist.get_global_rank(group, 0), group)
    return float(torch.linalg.vector_norm(first.sub_(own))), float(torch.linalg.vector_norm(own))
