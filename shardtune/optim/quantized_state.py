"""Storage of an optimizer's moments: in full, in bf16, or in blocks of 8-bit codes; of whole and of sharded tensors.

Rounding is stochastic, with the exact value as its mean. A second moment changes by a thousandth per step (beta2 =
0.999), which is less than half of a step of bf16 or of 8 bits: rounded to the nearest it would never change again. The
random bits are a function of seed, step, parameter and index in the whole parameter: they are the same on any layout,
and there is no generator state.

Worked example of blocks: a weight [4, 600]. A row has ceil(600 / 256) = 3 blocks, of columns 0-255, 256-511 and
512-599: the codes are uint8 [4, 600], the scales fp32 [4, 3]. Sharded by rows over 2 ranks, each has codes [2, 600] and
scales [2, 3]. Cut by columns into 2 parts of 300 (tensor parallelism), every part begins a new block: 2 * ceil(300 /
256) = 4 blocks, of columns 0-255, 256-299, 300-555 and 556-599, and each rank has scales [4, 2].
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

from shardtune.parallel.meta_init import local_offsets
from shardtune.parallel.torch_private.tensors import StridedShard

StateDtype = Literal["fp32", "bf16", "int8"]
State = dict[str, torch.Tensor]
"""The tensors of one parameter, by name."""
BLOCK = 256
"""Largest number of columns that share a scale."""
NARROWEST = 8
"""Rows shorter than this are stored in full: their scales would take as much memory as is saved."""
SCALE = "_scale"
CHUNK = {"cpu": 2**18, "cuda": 2**22}
"""Numbers that are updated at a time; so many exist in full precision, in about ten copies."""
_MASK = 0xFFFFFFFF
_FACTORS = (0x21F0AAAD, 0x735A2D97)


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a rank's part in the whole parameter.

    Attributes:
        shape: of the whole.
        offsets: of the part's first number, in each dimension.
        column_parts: the number of equal parts into which ranks cut the last dimension.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    column_parts: int = 1

    @classmethod
    def of(cls, parameter: torch.Tensor, start: int = 0) -> Place:
        """The place of this rank's part.

        Args:
            parameter: whole or sharded.
            start: for a part that is a range of the flattened parameter: its first index.
        """
        if not isinstance(parameter, DTensor):
            return cls(tuple(parameter.shape), (start, *[0] * (parameter.ndim - 1)) if parameter.ndim else ())
        mesh, placements = parameter.device_mesh, parameter.placements
        last = parameter.ndim - 1
        cuts = [mesh.size(axis) for axis, placement in enumerate(placements) if _dimension(placement) == last]
        return cls(tuple(parameter.shape), local_offsets(parameter), math.prod(cuts))

    @property
    def has_blocks(self) -> bool:
        """Whether rows are long enough for blocks, and are cut into parts of equal width."""
        return len(self.shape) > 1 and self.shape[-1] >= NARROWEST and self.shape[-1] % self.column_parts == 0

    @property
    def blocks(self) -> int:
        """The number of blocks in a row of the whole; each part of a row begins a new block."""
        return _blocks(self.shape[-1], self.column_parts)

    def same_blocks(self, column_parts: int) -> bool:
        """Whether blocks begin at the same columns if the last dimension is cut into `column_parts` parts.

        A width of 1024 has the same blocks for 1, 2 and 4 parts (0, 256, 512, 768); a width of 600 has not.
        """
        both = [
            _block_of(torch.arange(self.shape[-1]), self.shape[-1], cut) for cut in (self.column_parts, column_parts)
        ]
        return bool(torch.equal(*both))

    def numbers(self, first: int, part: torch.Tensor) -> torch.Tensor:
        """The flat index of each number in the whole parameter: int64, of the shape of `part`.

        Worked example: of a whole [4, 600] this rank has rows 2 and 3 (offsets (2, 0)); for `first` = 1 and `part`
        [1, 600] the indices are 3 * 600 + 0, …, 3 * 600 + 599.

        Args:
            first: the row of this rank's part at which `part` begins.
        """
        found = torch.zeros((), dtype=torch.int64, device=part.device)
        for dim, size in enumerate(part.shape):
            offset = self.offsets[dim] + (first if dim == 0 else 0)
            steps = torch.arange(offset, offset + size, device=part.device) * math.prod(self.shape[dim + 1 :])
            found = found + steps.view(-1, *[1] * (part.ndim - dim - 1))
        return found


def _blocks(width: int, column_parts: int) -> int:
    return column_parts * -(-(width // column_parts) // BLOCK)


def _block_of(columns: torch.Tensor, width: int, column_parts: int) -> torch.Tensor:
    """The block of each column, where rows of `width` are cut into parts and these into blocks.

    With a width of 600 in 2 parts of 300, of 2 blocks each: column 299 is in block 299 // 300 * 2 + 299 // 256 = 1,
    column 300 in block 300 // 300 * 2 + 0 // 256 = 2.
    """
    part = width // column_parts
    return columns // part * -(-part // BLOCK) + columns % part // BLOCK


def _dimension(placement: object) -> int | None:
    return placement.dim if isinstance(placement, Shard | StridedShard) else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def full_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of a tensor's arithmetic: its own, or fp32 if it is kept in half precision."""
    return torch.promote_types(tensor.dtype, torch.float32)


def chunks(part: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The row ranges [first, last), along the first dimension, that are updated at a time.

    On a CPU a part [1000, 600] is updated in ranges of 2^18 * 1000 // 600000 = 436 rows: 0-436, 436-872, 872-1000.
    """
    rows = part.shape[0] if part.ndim else 1
    each = max(1, CHUNK.get(part.device.type, CHUNK["cuda"]) * rows // max(1, part.numel()))
    for first in range(0, rows if part.numel() else 0, each):
        yield first, min(first + each, rows)


def rows_of(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """A view of some rows; of a scalar, itself."""
    return tensor[first:last] if tensor.ndim else tensor


def noise(numbers: torch.Tensor, key: int) -> torch.Tensor:
    """32 random bits for each index, in int64: a mixing function of 32 bits (Wellons and others, "hash prospector")."""
    found = (numbers & _MASK).bitwise_xor_(key & _MASK)
    found.bitwise_xor_(found >> 16).mul_(_FACTORS[0]).bitwise_and_(_MASK)
    found.bitwise_xor_(found >> 15).bitwise_xor_(key >> 31 & _MASK).mul_(_FACTORS[1]).bitwise_and_(_MASK)
    return found.bitwise_xor_(found >> 15)


def to_bf16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Stochastic rounding to bf16: 16 random bits are added to the lower half of fp32, which is then cut off.

    1 + 2^-8 is 0x3F808000, half-way between the bf16 numbers 0x3F80 and 0x3F81: with bits from 0x8000 on, which is half
    of all, the sum carries into the upper half.

    Args:
        values: fp32 or fp64.
        bits: int64 of the same shape, each in [0, 2^16).
    """
    raw = values.float().contiguous().view(torch.int32)
    raw = (raw + bits.to(torch.int32)).bitwise_and_(-0x10000)
    return raw.view(torch.float32).to(torch.bfloat16)


@lru_cache
def codes(signed: bool, device: torch.device) -> torch.Tensor:
    """The values of the 256 codes, relative to a block's largest magnitude: fp32 [256], ascending.

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

    Unsigned, a value above zero never becomes zero: a second moment of zero would make the update explode.

    Args:
        values: [..., width], fp32 or fp64.
        chance: of the same shape, uniform in [0, 1). A value at 0.3 of the way from one code to the next becomes the
            next one where its chance is below 0.3.

    Returns:
        codes uint8 [..., width], and scales fp32 [..., blocks]: the largest absolute value of each block.
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
    """fp32 values of rows, from the codes and scales of `to_codes`."""
    return codes(signed, code.device)[code.int()].mul_(_across(scale, code.shape[-1]))


def _across(scale: torch.Tensor, width: int) -> torch.Tensor:
    """The scale of each column's block: [..., blocks] to [..., width].

    Scales [a, b, c] of a width of 600 become 256 times a, 256 times b and 88 times c.
    """
    return scale.repeat_interleave(BLOCK, dim=-1)[..., :width]


@dataclass(frozen=True, slots=True)
class Moment:
    """A running mean that an optimizer has for each parameter.

    Attributes:
        name: its key in the state.
        signed: whether it can be negative.
    """

    name: str
    signed: bool

    def fresh(self, parameter: torch.Tensor, place: Place, kept: StateDtype) -> State:
        """Zeros, sharded as the parameter is."""
        if kept == "int8" and place.has_blocks:
            return {
                self.name: torch.zeros_like(parameter.detach(), dtype=torch.uint8),
                self.name + SCALE: scales_like(parameter.detach(), place),
            }
        dtype = torch.bfloat16 if kept == "bf16" else full_dtype(parameter)
        return {self.name: torch.zeros_like(parameter.detach(), dtype=dtype)}

    def read(self, state: State, first: int, last: int) -> torch.Tensor:
        """Some rows of this rank's part in full precision."""
        part = rows_of(local(state[self.name]), first, last)
        if part.dtype != torch.uint8:
            return part.float() if part.dtype == torch.bfloat16 else part
        return from_codes(part, local(state[self.name + SCALE])[first:last], signed=self.signed)

    def write(self, state: State, first: int, last: int, values: torch.Tensor, bits: torch.Tensor) -> None:
        """Store the values of some rows; `bits` are 16 random bits for each, in int64."""
        part = rows_of(local(state[self.name]), first, last)
        if part.dtype == torch.uint8:
            code, scale = to_codes(values, (bits.float() + 0.5) / 2**16, signed=self.signed)
            part.copy_(code)
            local(state[self.name + SCALE])[first:last].copy_(scale)
        else:
            part.copy_(to_bf16(values, bits) if part.dtype == torch.bfloat16 else values)

    def moved(self, state: State, parameter: torch.Tensor, place: Place, kept: StateDtype, column_parts: int) -> State:
        """A moment read from a checkpoint, in this layout's blocks: bit for bit if the blocks are the same.

        Otherwise numbers are rounded once more, to the nearest.

        Args:
            state: with scales of the form that `scales_like` makes for `column_parts`.
            column_parts: the number of parts into which rows were cut when it was saved.
        """
        saved = {key: state[key] for key in (self.name, self.name + SCALE) if key in state}
        own = self.fresh(parameter, place, kept)
        if own.keys() == saved.keys() and (len(own) == 1 or place.same_blocks(column_parts)):
            return saved
        part = local(saved[self.name])
        for first, last in chunks(part):
            values = rows_of(part, first, last)
            if values.dtype == torch.uint8:
                width = place.shape[-1]
                columns = torch.arange(values.shape[-1], device=part.device) + place.offsets[-1]
                scale = local(saved[self.name + SCALE])[first:last][..., _block_of(columns, width, column_parts)]
                values = codes(self.signed, part.device)[values.int()] * scale
            self.write(own, first, last, values, torch.full_like(values, 2**15, dtype=torch.int64))
        return own


def scales_like(parameter: torch.Tensor, place: Place, column_parts: int | None = None) -> torch.Tensor:
    """Zeros for the scales of a parameter's blocks: [..., blocks], with its rows.

    Args:
        parameter: whole or sharded.
        place: of this rank's part.
        column_parts: of the layout that the scales come from; if its blocks differ, every rank has those of all
            columns. None: this layout's own, sharded as the parameter is.
    """
    own = column_parts is None or (place.has_blocks and place.same_blocks(column_parts))
    blocks = place.blocks if own else _blocks(place.shape[-1], column_parts or 1)
    shape = (*place.shape[:-1], blocks)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=torch.float32, device=parameter.device)
    last, here = parameter.ndim - 1, local(parameter)
    placements = [
        placement if own or _dimension(placement) != last else Replicate() for placement in parameter.placements
    ]
    part = torch.zeros(
        *here.shape[:-1], blocks // place.column_parts if own else blocks, dtype=torch.float32, device=here.device
    )
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))),
    )
