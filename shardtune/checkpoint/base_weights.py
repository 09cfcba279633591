"""Values of a model's own tensors, whole and as a rank stores them: sharded, and in four bits for NF4 layers."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardtune.models.lora.attach import BaseTensor
from shardtune.models.lora.nf4 import decode, encode
from shardtune.parallel.meta_init import shard_of
from shardtune.parallel.ranks import Ranks

AT_ONCE = 1 << 22
"""Values that are summed at once, so that no whole tensor is copied."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a value."""


def part_of(target: BaseTensor, full: torch.Tensor) -> torch.Tensor:
    """This rank's part of whole values, in the format and on the device of the target."""
    shard = shard_of(target.tensor)
    part = torch.empty_like(shard.local)
    if part.numel() and target.layer is None:
        part.copy_(shard.of(full))
    elif part.numel():
        rows = full[shard.offsets[0] : shard.offsets[0] + len(part)]
        part.copy_(encode(rows.to(part.device)))
    return part


def fill_base(target: BaseTensor, full: torch.Tensor) -> None:
    """Copies this rank's part of whole values into the model."""
    shard_of(target.tensor).local.copy_(part_of(target, full))


def whole_base(target: BaseTensor) -> torch.Tensor:
    """The target's values in full, in fp32 on the CPU; a collective of all ranks if it is sharded."""
    tensor = target.tensor.detach()
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if target.layer is not None:
        full = decode(full, target.layer.in_features, torch.float32)
    return full.to("cpu", torch.float32, copy=True)


@torch.no_grad()
def fingerprint(model: nn.Module, names: Collection[str], ranks: Ranks) -> str:
    """A hash of the values of some parameters: the same in any layout, in bf16 and fp32; all ranks call it.

    Args:
        model: sharded or not, its weights in memory.
        names: of the parameters.
    """
    chosen = [(name, parameter) for name, parameter in sorted(model.named_parameters()) if name in names]
    sums = torch.zeros(len(chosen), dtype=torch.int64)
    for number, (_, parameter) in enumerate(chosen):
        if ranks.is_main if not isinstance(parameter, DTensor) else _is_first_copy(parameter):
            sums[number] = _sum_of_bits(shard_of(parameter).local)
    if ranks.mesh is not None:
        sums = sums.to(ranks.device)
        dist.all_reduce(sums)
    lines = [f"{name} {tuple(p.shape)} {bits}" for (name, p), bits in zip(chosen, sums.tolist(), strict=True)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _is_first_copy(parameter: DTensor) -> bool:
    """Whether this rank's part counts: of the ranks that hold the same one, the one beside rank 0.

    Tensor ranks that do not cut a parameter, and copies of a sharded model, have whole meshes of their own.
    """
    mesh, place = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert place is not None
    first = bool((mesh.mesh == 0).any())
    return first and not any(
        at for at, placement in zip(place, parameter.placements, strict=True) if placement.is_replicate()
    )


def own_bits(tensor: torch.Tensor) -> int:
    """The sum of a tensor's values in their own dtype, read as integers: another one where a value has changed."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    total, width = 0, INTEGERS[tensor.element_size()]
    for piece in tensor.contiguous().view(-1).split(AT_ONCE):
        total += int(piece.view(width).sum(dtype=torch.int64))
    return total


def _sum_of_bits(tensor: torch.Tensor) -> int:
    """The sum of a tensor's values as fp32, read as integers: exact, so their order does not matter."""
    total = 0
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    for piece in tensor.contiguous().view(-1).split(AT_ONCE):
        bits = piece.float().view(torch.int32) if piece.is_floating_point() else piece
        total += int(bits.sum(dtype=torch.int64))
    return (total + 2**63) % 2**64 - 2**63  # as int64 wraps around
