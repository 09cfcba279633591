"""Experts in MXFP4, as gpt-oss has them: 32 values of four bits share an exponent.

`down_proj_blocks` [experts, rows, groups, 16] holds two codes in a byte, `down_proj_scales` [experts, rows, groups]
exponents of two. In the model the matrix lies the other way: `down_proj` [experts, groups * 32, rows].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from shardtune.checkpoint.quantized.tensor import DequantizedTensor, companion, unfit
from shardtune.checkpoint.weight_files import WeightTensor

_BLOCKS, _SCALES = "_blocks", "_scales"
GROUP = 32


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor(DequantizedTensor):
    """Stacked matrices in MXFP4; `scale` has the exponents."""

    scale: WeightTensor

    def values(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        (expert, column, row), (experts, columns, rows) = offsets, sizes
        group = column // GROUP
        groups = -(-(column + columns) // GROUP) - group
        start, count = (expert, row, group), (experts, rows, groups)
        codes = self.data.read_slice((*start, 0), (*count, GROUP // 2))
        made = convert_moe_packed_tensors(codes, self.scale.read_slice(start, count), dtype=self.dtype)
        return made[:, column % GROUP :][:, :columns]


def mxfp4_weights(stored: Mapping[str, WeightTensor], dtype: torch.dtype) -> dict[str, WeightTensor]:
    """The tensors on disk, those in MXFP4 with their exponents as values.

    Raises:
        ModelError: exponents are missing, or do not fit.
    """
    found = dict(stored)
    for name, blocks in stored.items():
        if not name.endswith(_BLOCKS) or blocks.dtype != torch.uint8:
            continue
        weight = name.removesuffix(_BLOCKS)
        scales = companion(found, blocks, weight + _SCALES)
        shape = blocks.shape
        if len(shape) != 4 or shape[3] != GROUP // 2 or scales.shape != shape[:3] or scales.dtype != torch.uint8:
            raise unfit(
                blocks, scales, f" ([experts, rows, groups, {GROUP // 2}] in bytes, an exponent for each group)"
            )
        del found[name]
        values = (shape[0], shape[2] * GROUP, shape[1])
        found[weight] = Mxfp4Tensor(weight, blocks.file, values, dtype, blocks, scales)
    return found
