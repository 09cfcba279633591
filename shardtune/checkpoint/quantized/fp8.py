"""FP8 weights with a scale for each block, as DeepSeek, Qwen and others publish them.

A weight of [rows, columns] in float8_e4m3fn has beside it `weight_scale_inv`, one number for each block of
`weight_block_size` (128 x 128): value = code * scale, in fp32. Blocks at the right and lower edge may be smaller: a
matrix of [576, 200] has scales of [5, 2]. Other grids are read where they divide the weight evenly: a scale for each
row, for each 32 columns (MXFP8, exponents alone), or one for all. Experts may be packed in four bits, two to a byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers.integrations.mxfp4 import FP4_VALUES

from shardtune.checkpoint.quantized.tensor import DequantizedTensor, companion, unfit
from shardtune.checkpoint.weight_files import FLOATS, WeightTensor
from shardtune.errors import ModelError

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
PACKED = torch.int8
"""Two values of four bits in a byte, the lower half first."""
_SCALE = "_scale_inv"
_OTHER_NAMES = (".scale", ".qscale_weight")
"""In place of `.weight_scale_inv`."""
_ACTIVATIONS = (".activation_scale", ".input_scale", ".qscale_act")
"""Scales of inputs, which plain weights do not need."""
_EXPONENT_BIAS = 127


@dataclass(frozen=True, slots=True)
class Fp8Tensor(DequantizedTensor):
    """A weight in FP8, or packed FP4.

    Attributes:
        scale: a number for each block; as many dimensions as the weight, or one element.
        block: rows and columns of a block.
    """

    scale: WeightTensor
    block: tuple[int, int]

    def values(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        return self._codes(offsets, sizes).mul_(_as_fp32(of_blocks(self.scale, self.block, offsets, sizes)))

    def _codes(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        if self.data.dtype != PACKED:
            return self.data.read_slice(offsets, sizes).float()
        *outer, column = offsets
        *count, columns = sizes
        first, end = column // 2, (column + columns + 1) // 2
        pairs = self.data.read_slice((*outer, first), (*count, end - first)).view(torch.uint8).int()
        codes = torch.stack([pairs & 0xF, pairs >> 4], dim=-1).flatten(-2)
        return torch.tensor(FP4_VALUES)[codes[..., column % 2 :][..., :columns]]


def of_blocks(
    scale: WeightTensor, block: tuple[int, int], offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """The scale of each element of a part of a weight.

    Args:
        scale: a number for each block, or one.
        block: rows and columns of a block.
        offsets: of the part's first element.
        sizes: of the part.
    """
    *outer, row, column = offsets
    *count, rows, columns = sizes
    down, across = (_blocks(*part) for part in zip((row, column), (rows, columns), block, strict=True))
    if len(scale.shape) < len(sizes):
        scales = scale.read().reshape((1,) * len(sizes))
    else:
        inside = [int(index[-1]) + 1 for index in (down, across)]
        first = [start // size for start, size in zip((row, column), block, strict=True)]
        scales = scale.read_slice((*outer, *first), (*count, *inside))
    return scales[..., down, :][..., across]


def _blocks(start: int, count: int, size: int) -> torch.Tensor:
    """The number of the block of each row (or column), counted from the first one's."""
    return torch.arange(start, start + count) // size - start // size


def _as_fp32(scales: torch.Tensor) -> torch.Tensor:
    """Scales as numbers; in bytes they are exponents of two."""
    return (scales.float() - _EXPONENT_BIAS).exp2() if scales.dtype == torch.uint8 else scales.float()


def fp8_weights(
    stored: Mapping[str, WeightTensor], settings: Mapping[str, object], dtype: torch.dtype
) -> dict[str, WeightTensor]:
    """The tensors on disk, those in FP8 with their scales as values; inputs' scales are left out.

    Raises:
        ModelError: a scale is missing, or does not fit its weight.
    """
    found = {name: tensor for name, tensor in stored.items() if not name.endswith(_ACTIVATIONS)}
    coded = [tensor for tensor in stored.values() if tensor.dtype in (*CODES, PACKED)]
    for tensor in coded:
        name, stem = tensor.name, tensor.name.removesuffix(".weight")
        others = [stem + ending for ending in _OTHER_NAMES] if stem != name else []
        scale = companion(found, tensor, name + _SCALE, *others)
        *outer, columns = tensor.shape or (1,)
        shape = (*outer, columns * 2 if tensor.dtype == PACKED else columns)
        found[name] = Fp8Tensor(
            name, tensor.file, shape, dtype, tensor, scale, block_of(tensor, shape, scale, settings)
        )
    for name, tensor in stored.items():
        weight = found.get(name.removesuffix(_SCALE)) if name.endswith(_SCALE) and name in found else None
        if weight is not None:
            kind = str(weight.dtype).removeprefix("torch.")
            raise ModelError(
                f"'{weight.name}' is stored as {kind}, and yet has a scale, '{name}'",
                where=str(tensor.file),
                remedy="leave the scale out if the weight is converted already; otherwise download the files again",
            )
    return found


def block_of(
    tensor: WeightTensor, shape: Sequence[int], scale: WeightTensor, settings: Mapping[str, object]
) -> tuple[int, int]:
    """The rows and columns of a block: those of config.json where the scales fit them, otherwise an even division."""
    if scale.dtype not in (*FLOATS.values(), torch.float8_e8m0fnu, torch.uint8) or len(shape) < 2:
        raise unfit(tensor, scale, f" (a scale as {str(scale.dtype).removeprefix('torch.')})")
    *outer, rows, columns = shape
    if all(size == 1 for size in scale.shape):
        return rows, columns
    stated = settings.get("weight_block_size", (128, 128)) or (rows, columns)
    if (
        not isinstance(stated, list | tuple)
        or len(stated) != 2
        or not all(isinstance(n, int) and n > 0 for n in stated)
    ):
        raise unfit(tensor, scale, f": weight_block_size is {stated!r}, not two positive numbers")
    grid = tuple(scale.shape[-2:])
    if len(scale.shape) != len(shape) or list(scale.shape[:-2]) != outer or 0 in grid:
        raise unfit(tensor, scale, f" in blocks of {list(stated)}")
    if grid == (-(-rows // stated[0]), -(-columns // stated[1])):
        return stated[0], stated[1]
    if rows % grid[0] or columns % grid[1]:
        raise unfit(tensor, scale, f" in blocks of {list(stated)}")
    return rows // grid[0], columns // grid[1]
