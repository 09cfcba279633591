"""Functions of whole matrices of which ranks have rows: each rank computes some of them, for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from shardtune.parallel.meta_init import shard_of

Part = Callable[[int], torch.Tensor]
"""Maps the number of a parameter to a tensor that is laid out as the parameter is."""
Compute = Callable[[int, torch.Tensor], torch.Tensor]
"""Maps the number of a parameter and the whole of that tensor to another one of its shape."""


def of_whole(parameters: Sequence[torch.Tensor], part: Part, compute: Compute) -> Iterator[tuple[int, torch.Tensor]]:
    """This rank's parts of what a function makes of whole matrices, with the numbers of their parameters.

    Of matrices whose rows lie on n ranks, n at a time are gathered, one on each rank, which computes it and returns
    their rows to the others. Any other matrix is gathered and computed on every rank.

    Worked example: 3 matrices on 2 ranks. First rank 0 gets the largest and rank 1 the next one; then rank 0 gets the
    third, and rank 1 has nothing to compute.

    Args:
        parameters: matrices, whole or sharded, in the same order on all ranks.
        part: called once for each, shortly before it is gathered.
        compute: called once for each in all, or on every rank.
    """
    divided: dict[dist.ProcessGroup, list[int]] = {}
    for number, parameter in enumerate(parameters):
        group = _group_of_rows(parameter)
        if group is not None:
            divided.setdefault(group, []).append(number)
        elif isinstance(parameter, DTensor):
            given = part(number)
            assert isinstance(given, DTensor)
            yield number, shard_of(parameter).of(compute(number, given.full_tensor()))
        else:
            yield number, compute(number, part(number))
    for group, members in divided.items():
        in_order = sorted(members, key=lambda number: (-parameters[number].numel(), number))
        size = dist.get_world_size(group)
        for first in range(0, len(in_order), size):
            some = {number: part(number) for number in in_order[first : first + size]}
            yield from _divided(some, compute, group)


def _group_of_rows(matrix: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks that have rows of a matrix, where it is cut by rows alone, and once."""
    if not isinstance(matrix, DTensor):
        return None
    cuts = [axis for axis, placement in enumerate(matrix.placements) if not placement.is_replicate()]
    if len(cuts) != 1 or not isinstance(matrix.placements[cuts[0]], Shard) or matrix.placements[cuts[0]] != Shard(0):
        return None
    return matrix.device_mesh.get_group(cuts[0]) if matrix.device_mesh.size(cuts[0]) > 1 else None


def _divided(
    matrices: Mapping[int, torch.Tensor], compute: Compute, group: dist.ProcessGroup
) -> Iterator[tuple[int, torch.Tensor]]:
    """As `of_whole`, for at most as many matrices as there are ranks in the group."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = {number: shard_of(matrix).local for number, matrix in matrices.items()}
    own = list(matrices)[rank] if rank < len(matrices) else None
    sizes = [part.numel() for part in parts.values()] + [0] * (size - len(parts))
    pieces = [0] * size
    if own is not None:
        rows, columns = matrices[own].shape
        each = -(-rows // size)  # as torch.chunk cuts
        pieces = [max(0, min(each, rows - place * each)) * columns for place in range(size)]
    sent = torch.cat([part.reshape(-1) for part in parts.values()])
    gathered = sent.new_empty(sum(pieces))
    dist.all_to_all_single(gathered, sent, pieces, sizes, group=group)
    if own is not None:
        gathered = compute(own, gathered.view(matrices[own].shape)).reshape(-1).to(sent.dtype)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, gathered.contiguous(), sizes, pieces, group=group)
    for (number, part), piece in zip(parts.items(), received.split(sizes[: len(parts)]), strict=True):
        yield number, piece.view(part.shape)
