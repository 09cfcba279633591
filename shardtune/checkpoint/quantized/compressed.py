"""Weights of compressed-tensors (llm-compressor), in integers or FP8, by their `quantization_config`.

A weight of [rows, columns] has beside it `weight_scale`: one number, one for each row ([rows, 1]), for each group of
columns ([rows, groups]) or for each block; and `weight_zero_point`, of the same shape, where codes are not symmetric.
Codes of 4 or 8 bits may be packed (`pack-quantized`): `weight_packed` [rows, words] of 32 bits, the first column
lowest, with `weight_shape`; zero points are packed likewise, down the columns. value = (code - zero point) * scale,
computed in the dtype of the scale, as that library does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardtune.checkpoint.quantized.fp8 import CODES, block_of, of_blocks
from shardtune.checkpoint.quantized.scheme import Quantization
from shardtune.checkpoint.quantized.tensor import DequantizedTensor, companion, unfit
from shardtune.checkpoint.weight_files import WeightTensor

FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
PACKED_BITS = (4, 8)
"""Of codes that do not cross from one word to the next."""
_WORD = 32
_PACKED, _SHAPE, _SCALE, _ZERO = ".weight_packed", ".weight_shape", ".weight_scale", ".weight_zero_point"
_ACTIVATIONS = tuple(
    f".{what}_{ending}"
    for what in ("input", "output", "q", "k", "v")
    for ending in ("scale", "zero_point", "global_scale")
)
"""Of inputs, outputs and caches, which plain weights do not need."""


@dataclass(frozen=True, slots=True)
class CompressedTensor(DequantizedTensor):
    """A matrix in integers or FP8.

    Attributes:
        scale: a number for each block, or one element.
        zero: the code that stands for 0, for each block; None: 0.
        block: rows and columns of a block.
        bits: of a packed code; 0: codes are not packed.
    """

    scale: WeightTensor
    zero: WeightTensor | None
    block: tuple[int, int]
    bits: int

    def values(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        scales = of_blocks(self.scale, self.block, offsets, sizes)
        codes = self._codes(offsets, sizes).to(scales.dtype)
        if self.zero is not None:
            codes -= self._zeros(self.zero, offsets, sizes).to(scales.dtype)
        return codes * scales

    def _codes(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        if not self.bits:
            return self.data.read_slice(offsets, sizes)
        (row, column), (rows, columns) = offsets, sizes
        each = _WORD // self.bits
        first = column // each
        words = self.data.read_slice((row, first), (rows, -(-(column + columns) // each) - first))
        return _unpacked(words, self.bits)[:, column - first * each :][:, :columns]

    def _zeros(self, zero: WeightTensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        if not self.bits or zero.dtype != torch.int32:
            return of_blocks(zero, self.block, offsets, sizes)
        (row, column), (rows, columns) = offsets, sizes
        codes = _unpacked(zero.read().T, self.bits).T
        down, across = (
            torch.arange(start, start + count) // size
            for start, count, size in zip((row, column), (rows, columns), self.block, strict=True)
        )
        return codes[down][:, across]


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes of words [rows, n] as [rows, n * 32 / bits]; half of the range is below zero."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2) - 2 ** (bits - 1)


def compressed_weights(
    stored: Mapping[str, WeightTensor], quantization: Quantization, dtype: torch.dtype
) -> dict[str, WeightTensor]:
    """The tensors on disk, those in codes with their scales as values; scales of activations are left out.

    Raises:
        ModelError: the weights are in a format that is not read, a scale is missing, or does not fit its weight.
    """
    structure = _check(quantization)
    found = {name: tensor for name, tensor in stored.items() if not name.endswith(_ACTIVATIONS)}
    for name, tensor in stored.items():
        packed = name.endswith(_PACKED)
        coded = packed or tensor.dtype in (*CODES, torch.int8)
        if not coded or name not in found or name.endswith(_ZERO):
            continue
        stem = name.removesuffix(_PACKED if packed else ".weight")
        if stem + ".weight_g_idx" in stored:
            raise quantization.refusal("with columns in another order (weight_g_idx)")
        scale = companion(found, tensor, stem + _SCALE)
        zero = found.pop(stem + _ZERO, None)
        shape, bits = tuple(tensor.shape), 0
        if packed:
            given = companion(found, tensor, stem + _SHAPE)
            shape = tuple(given.read().tolist())
            bits = _bits(tensor, given, shape, quantization)
            del found[name]
        if len(shape) != 2:
            raise unfit(tensor, scale, " (only matrices are read)")
        block = block_of(tensor, shape, scale, {"weight_block_size": structure})
        weight = stem + ".weight"
        found[weight] = CompressedTensor(weight, tensor.file, shape, dtype, tensor, scale, zero, block, bits)
    return found


def _check(quantization: Quantization) -> object:
    """Refuse formats that are not read; the rows and columns of a block, where blocks are matrices."""
    settings = quantization.settings
    groups = settings.get("config_groups")
    listed = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    formats = {str(group.get("format") or settings.get("format")) for group in listed}
    if others := formats.difference(FORMATS) or ({"of no group"} if not listed else set()):
        raise quantization.refusal(f"in the format {', '.join(sorted(others))}")
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise quantization.refusal(f"and sparse ({sparsity['format']})")
    if settings.get("quantization_status", "compressed") != "compressed":
        raise quantization.refusal(f"but not compressed (quantization_status: {settings['quantization_status']})")
    if settings.get("transform_config"):
        raise quantization.refusal("with transforms (transform_config)")
    structures = [weights.get("block_structure") for group in listed if (weights := group.get("weights"))]
    return next(filter(None, structures), None)


def _bits(tensor: WeightTensor, given: WeightTensor, shape: Sequence[int], quantization: Quantization) -> int:
    """The bits of a packed code, by the number of words of a row."""
    if len(shape) != 2 or tuple(tensor.shape[:1]) != tuple(shape[:1]) or tensor.dtype != torch.int32:
        raise unfit(tensor, given, f" ({list(shape)})")
    fitting = [bits for bits in PACKED_BITS if tensor.shape[1] == -(-shape[1] * bits // _WORD)]
    if not fitting:
        raise quantization.refusal("in codes of other than 4 or 8 bits")
    return fitting[0]
