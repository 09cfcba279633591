"""Linear layers as bitsandbytes stores them: four bits (NF4, FP4) in blocks, or eight bits in rows.

Four bits: the codes of a matrix end to end, two in a byte, the first in the upper half; `quant_map` has the 16 levels,
`absmax` the scale of each block of 64. With double quantisation the scales are codes themselves, for blocks of 256
with scales of their own and one offset. The sizes are JSON in a tensor of bytes. Eight bits: value = code * SCB / 127.
The library is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardtune.checkpoint.quantized.tensor import DequantizedTensor, companion, unfit
from shardtune.checkpoint.weight_files import FLOATS, WeightTensor
from shardtune.errors import ModelError

_STATE = ".quant_state.bitsandbytes__"
_ROW_SCALES = "SCB"
_LAYOUT = "weight_format"
_ONE_BY_127 = 7.874015718698502e-3


@dataclass(frozen=True, slots=True)
class Nested:
    """Scales that are stored as codes: levels[code] * scales[i // block] + offset, in fp32."""

    levels: WeightTensor
    scales: WeightTensor
    block: int
    offset: float

    def decoded(self, codes: torch.Tensor, first: int) -> torch.Tensor:
        """The scales whose codes begin at number `first`."""
        start, end = first // self.block, -(-(first + codes.numel()) // self.block)
        scales = self.scales.read_slice((start,), (end - start,)).float()
        numbers = torch.arange(first, first + codes.numel()) // self.block - start
        return self.levels.read().float()[codes.int()].mul_(scales[numbers]).add_(self.offset)


@dataclass(frozen=True, slots=True)
class FourBitTensor(DequantizedTensor):
    """A matrix in four bits.

    Attributes:
        kind: nf4 or fp4.
        levels: the value of each of the 16 codes.
        scales: of each block, or their codes.
        block: values that share a scale.
        nested: how scales are decoded that are codes.
        rounded: the dtype in which bitsandbytes computes the values; None: fp32.
    """

    kind: str
    levels: WeightTensor
    scales: WeightTensor
    block: int
    nested: Nested | None
    rounded: torch.dtype | None

    @property
    def unrounded(self) -> FourBitTensor:
        """The same matrix, level times scale in fp32."""
        return replace(self, rounded=None)

    def is_nf4_of(self, block: int) -> bool:
        """Whether encoding the values in NF4, row by row in blocks of a size, gives the codes and scales stored."""
        return self.kind == "nf4" and self.block == block and self.shape[-1] % block == 0

    def values(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        rows, (column, columns), width = sizes[0], (offsets[-1], sizes[-1]), self.shape[-1]
        first = offsets[0] * width
        numbers = torch.arange(first, first + rows * width)
        blocks = numbers // self.block - first // self.block
        scales = self.scales.read_slice((first // self.block,), (int(blocks[-1]) + 1,))
        if self.nested is not None:
            scales = self.nested.decoded(scales, first // self.block)
        found = self.levels.read().float()[self._codes(first, rows * width)].mul_(scales.float()[blocks])
        part = found.view(rows, width)[:, column : column + columns]
        return part if self.rounded is None else part.to(self.rounded)

    def _codes(self, first: int, count: int) -> torch.Tensor:
        """`count` codes, from number `first` on; they may be stored as numbers of more than a byte."""
        each = 2 * self.data.dtype.itemsize
        start, end = first // each, -(-(first + count) // each)
        raw = self.data.read_slice((start, 0), (end - start, 1)).view(torch.uint8).flatten().int()
        codes = torch.stack([raw >> 4, raw & 0xF], dim=-1).flatten()
        return codes[first - start * each :][:count]


@dataclass(frozen=True, slots=True)
class EightBitTensor(DequantizedTensor):
    """A matrix in eight bits; `scale` has the largest magnitude of each row."""

    scale: WeightTensor

    def values(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        codes = self.data.read_slice(offsets, sizes)
        scales = self.scale.read_slice(offsets[:1], sizes[:1]).float()
        return (codes * scales.view(-1, 1)).mul_(_ONE_BY_127)


def bitsandbytes_weights(stored: Mapping[str, WeightTensor], dtype: torch.dtype) -> dict[str, WeightTensor]:
    """The tensors on disk, quantised ones with what belongs to them as values.

    Raises:
        ModelError: something is missing, or does not fit.
    """
    found = dict(stored)
    for name, tensor in stored.items():
        if not name.endswith("weight"):
            continue
        stem = name.removesuffix("weight")
        if tensor.dtype == torch.int8:
            found[name] = _eight_bits(found, tensor, stem, dtype)
        elif f"{name}.absmax" in found or any(f"{name}{_STATE}{kind}" in found for kind in ("nf4", "fp4")):
            found[name] = _four_bits(found, tensor, dtype)
    return found


def _eight_bits(found: dict[str, WeightTensor], tensor: WeightTensor, stem: str, dtype: torch.dtype) -> WeightTensor:
    scale = companion(found, tensor, stem + _ROW_SCALES)
    layout = found.pop(stem + _LAYOUT, None)
    if len(tensor.shape) != 2 or scale.shape != tensor.shape[:1]:
        raise unfit(tensor, scale)
    if layout is not None and int(layout.read()) != 0:
        raise ModelError(
            f"'{tensor.name}' is stored in the layout of one kind of GPU ({stem + _LAYOUT} = {int(layout.read())})",
            where=str(tensor.file),
            remedy="save it again with a newer bitsandbytes, or fine-tune the unquantised model",
        )
    return EightBitTensor(tensor.name, tensor.file, tuple(tensor.shape), dtype, tensor, scale)


def _four_bits(found: dict[str, WeightTensor], tensor: WeightTensor, dtype: torch.dtype) -> WeightTensor:
    name = tensor.name
    state = companion(found, tensor, *(f"{name}{_STATE}{kind}" for kind in ("nf4", "fp4")))
    levels, scales = companion(found, tensor, f"{name}.quant_map"), companion(found, tensor, f"{name}.absmax")
    try:
        described = json.loads(bytes(state.read().to(torch.uint8).flatten().tolist()))
        kind, block, shape = str(described["quant_type"]), int(described["blocksize"]), tuple(described["shape"])
        rounded = FLOATS[described["dtype"]]
        nested = None
        if f"{name}.nested_absmax" in found or "nested_blocksize" in described:
            nested = Nested(
                companion(found, tensor, f"{name}.nested_quant_map"),
                companion(found, tensor, f"{name}.nested_absmax"),
                int(described["nested_blocksize"]),
                float(described["nested_offset"]),
            )
    except (ValueError, KeyError, TypeError) as problem:
        raise ModelError(
            f"'{state.name}' does not describe how '{name}' is stored: {type(problem).__name__}: {problem}",
            where=str(state.file),
            remedy="the file is damaged: download or copy it again",
        ) from problem
    made = FourBitTensor(name, tensor.file, shape, dtype, tensor, kind, levels, scales, block, nested, rounded)
    _check(made)
    return made


def _check(made: FourBitTensor) -> None:
    if len(made.shape) != 2 or made.block < 1:
        raise unfit(made.data, made.scales, f": a matrix of {list(made.shape)} in blocks of {made.block}")
    count = made.shape[0] * made.shape[1]
    codes = -(-count // (2 * made.data.dtype.itemsize))
    blocks = -(-count // made.block)
    why = f": a matrix of {list(made.shape)} in blocks of {made.block}"
    if tuple(made.data.shape) != (codes, 1) or tuple(made.scales.shape) != (blocks,):
        raise unfit(made.data, made.scales, why)
    if tuple(made.levels.shape) != (16,):
        raise unfit(made.data, made.levels, ", which takes 16 levels")
    nested = made.nested
    if nested is not None and tuple(nested.scales.shape) != (-(-blocks // max(1, nested.block)),):
        raise unfit(made.scales, nested.scales, f" in blocks of {nested.block}")
    if (nested is None) == (made.scales.dtype not in FLOATS.values()):
        raise unfit(made.data, made.scales, f" (as {str(made.scales.dtype).removeprefix('torch.')})")
