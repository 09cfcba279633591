"""Values of a model's own tensors, whole and as a rank keeps them: sharded, and in four bits where they are kept so."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from shardtune.models.lora import BaseTensor
from shardtune.models.nf4 import decode, encode
from shardtune.parallel.materialise import shard_of


def part_of(target: BaseTensor, full: torch.Tensor) -> torch.Tensor:
    """This rank's part of whole values, in the form and on the device in which the target is kept."""
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
