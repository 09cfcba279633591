"""How an optimizer's moments are kept: in full, in bf16, or in blocks of 8-bit codes; on whole and on sharded tensors.

Rounding is stochastic: up or down by chance, so that the mean is right. A second moment changes by a thousandth per step
(beta2 = 0.999), which is less than half of what bf16 or 8 bits can tell apart: rounded to the nearest it would never
change again. The chance is a function of seed, step, parameter and place in the whole parameter: it is the same on any
layout, and there is no generator state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

StateDtype = Literal["fp32", "bf16", "int8"]
State = dict[str, torch.Tensor]
"""What belongs to one parameter, by name."""
BLOCK = 256
"""Numbers of a row that share a scale."""
NARROWEST = 8
"""Rows shorter than this are kept in full: their scales would take as much room as is saved."""
SCALE = "_scale"
CHUNK = {"cpu": 2**18, "cuda": 2**22}
"""Numbers that are computed on at a time; so much exists in full precision, in about ten copies."""
_MASK = 0xFFFFFFFF
_FACTORS = (0x21F0AAAD, 0x735A2D97)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's part lies in the whole parameter.

    Attributes:
        shape: of the whole.
        offsets: of the part's first number, in each dimension.
        column_parts: into how many equal parts ranks cut the last dimension.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    column_parts: int = 1

    @classmethod
    def of(cls, parameter: torch.Tensor, start: int = 0) -> Place:
        """That of this rank's part.

        Args:
            parameter: whole or sharded.
            start: for a part that is a range of the whole's numbers, of one dimension: the first of them.
        """
        if not isinstance(parameter, DTensor):
            return cls(tuple(parameter.shape), (start, *[0] * (parameter.ndim - 1)) if parameter.ndim else ())
        mesh, placements = parameter.device_mesh, parameter.placements
        _, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        last = parameter.ndim - 1
        cuts = [mesh.size(axis) for axis, placement in enumerate(placements) if _dimension(placement) == last]
        return cls(tuple(parameter.shape), tuple(offsets), math.prod(cuts))

    @property
    def has_blocks(self) -> bool:
        """Whether rows are long enough for blocks, and cut evenly if they are cut."""
        return len(self.shape) > 1 and self.shape[-1] >= NARROWEST and self.shape[-1] % self.column_parts == 0

    @property
    def blocks(self) -> int:
        """In a row of the whole: a part of a row begins with a block of its own."""
        return self.column_parts * -(-self.shape[-1] // self.column_parts // BLOCK)

    def numbers(self, first: int, part: torch.Tensor) -> torch.Tensor:
        """The places of numbers in the whole, in the order of its memory: int64, of the shape of `part`.

        Args:
            first: row of this rank's part that `part` begins with.
        """
        found = torch.zeros((), dtype=torch.int64, device=part.device)
        for dim, size in enumerate(part.shape):
            offset = self.offsets[dim] + (first if dim == 0 else 0)
            steps = torch.arange(offset, offset + size, device=part.device) * math.prod(self.shape[dim + 1 :])
            found = found + steps.view(-1, *[1] * (part.ndim - dim - 1))
        return found


def _dimension(placement: object) -> int | None:
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, outside of any graph."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def chunks(part: torch.Tensor) -> Iterator[tuple[int, int]]:
    """First and last row (along the first dimension) of the pieces that are computed on at a time."""
    rows = part.shape[0] if part.ndim else 1
    each = max(1, CHUNK.get(part.device.type, CHUNK["cuda"]) * rows // max(1, part.numel()))
    for first in range(0, rows if part.numel() else 0, each):
        yield first, min(first + each, rows)


def rows_of(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """A view of some rows; of a scalar, itself."""
    return tensor[first:last] if tensor.ndim else tensor


def noise(numbers: torch.Tensor, key: int) -> torch.Tensor:
    """32 random bits for each place, in int64: a mixing function of 32 bits (Wellons and others, "hash prospector")."""
    found = (numbers & _MASK).bitwise_xor_(key & _MASK)
    found.bitwise_xor_(found >> 16).mul_(_FACTORS[0]).bitwise_and_(_MASK)
    found.bitwise_xor_(found >> 15).bitwise_xor_(key >> 31 & _MASK).mul_(_FACTORS[1]).bitwise_and_(_MASK)
    return found.bitwise_xor_(found >> 15)


def to_bf16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Rounded up or down by chance: 16 random `bits` are added below what bf16 keeps.

    Args:
        values: fp32 or fp64.
        bits: int64 of the same shape, each in [0, 2^16).
    """
    raw = values.float().contiguous().view(torch.int32)
    raw = (raw + bits.to(torch.int32)).bitwise_and_(-0x10000)
    return raw.view(torch.float32).to(torch.bfloat16)


@lru_cache
def codes(signed: bool, device: torch.device) -> torch.Tensor:
    """What the 256 codes stand for, as shares of a block's largest: fp32 [256], ascending.

    The dynamic tree type of Dettmers et al. ("8-bit Optimizers via Block-wise Quantization", 2021): seven decades, with
    twice as many steps in each as in the one below. Without a sign there are twice as many in each.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        steps = 2**decade * (1 if signed else 2)
        middles = [0.1 + 0.9 * (step + 0.5) / steps for step in range(steps)]
        found += [10.0 ** (decade - 6) * middle for middle in middles]
        found += [-(10.0 ** (decade - 6)) * middle for middle in middles] if signed else []
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


def to_codes(values: torch.Tensor, chance: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of rows.

    Without a sign, what is above zero never becomes zero: a second moment of zero would make the update explode.

    Args:
        values: [..., width], fp32 or fp64.
        chance: of the same shape, in [0, 1): the next code is taken where it is below how far the number lies towards it.

    Returns:
        uint8 [..., width], and fp32 [..., blocks]: the largest absolute value of each block.
    """
    values = values.float()
    width = values.shape[-1]
    padded = F.pad(values, (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = padded.abs().amax(-1)
    table = codes(signed, values.device)
    share = values / _across(torch.where(scale > 0, scale, 1.0), width)
    below = (torch.searchsorted(table, share, right=True) - 1).clamp_(0, len(table) - 2)
    lower = table[below]
    towards = (share - lower) / (table[below + 1] - lower)
    found = below + (chance < towards)
    if not signed:
        found = torch.where(values > 0, found.clamp(min=1), found)
    return found.to(torch.uint8), scale


def from_codes(code: torch.Tensor, scale: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """fp32 values of rows; arguments as `to_codes` gives them."""
    return codes(signed, code.device)[code.int()].mul_(_across(scale, code.shape[-1]))


def _across(scale: torch.Tensor, width: int) -> torch.Tensor:
    """Each block's scale for each of its numbers: [..., width]."""
    return scale.repeat_interleave(BLOCK, dim=-1)[..., :width]


@dataclass(frozen=True, slots=True)
class Moment:
    """One of the running means that an optimizer keeps of each parameter.

    Attributes:
        name: in the state.
        signed: whether it can be below zero.
    """

    name: str
    signed: bool

    def fresh(self, parameter: torch.Tensor, place: Place, kept: StateDtype) -> State:
        """Zeros, lying as the parameter does."""
        if kept == "int8" and place.has_blocks:
            return {
                self.name: torch.zeros_like(parameter.detach(), dtype=torch.uint8),
                self.name + SCALE: scales_like(parameter.detach(), place),
            }
        dtype = torch.bfloat16 if kept == "bf16" and parameter.ndim > 1 else None
        return {self.name: torch.zeros_like(parameter.detach(), dtype=dtype)}

    def read(self, state: State, first: int, last: int) -> torch.Tensor:
        """Some rows of this rank's part in full precision."""
        part = rows_of(local(state[self.name]), first, last)
        if part.dtype != torch.uint8:
            return part.float() if part.dtype == torch.bfloat16 else part
        return from_codes(part, local(state[self.name + SCALE])[first:last], signed=self.signed)

    def write(self, state: State, first: int, last: int, values: torch.Tensor, bits: torch.Tensor) -> None:
        """Keep them; `bits` are 16 random ones for each, in int64."""
        part = rows_of(local(state[self.name]), first, last)
        if part.dtype == torch.uint8:
            code, scale = to_codes(values, (bits.float() + 0.5) / 2**16, signed=self.signed)
            part.copy_(code)
            local(state[self.name + SCALE])[first:last].copy_(scale)
        else:
            part.copy_(to_bf16(values, bits) if part.dtype == torch.bfloat16 else values)


def scales_like(parameter: torch.Tensor, place: Place, *, blocks: int | None = None) -> torch.Tensor:
    """Zeros for the scales of a parameter's blocks: [..., blocks], with its rows.

    Args:
        blocks: of another layout, whose columns are then all here; None: this one's, cut as the parameter is.
    """
    shape = (*place.shape[:-1], blocks or place.blocks)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=torch.float32, device=parameter.device)
    last = parameter.ndim - 1
    placements = [
        Replicate() if blocks and _dimension(placement) == last else placement for placement in parameter.placements
    ]
    mesh = parameter.device_mesh
    here = local(parameter)
    own = blocks or place.blocks // place.column_parts
    part = torch.zeros(*here.shape[:-1], own, dtype=torch.float32, device=here.device)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides))
