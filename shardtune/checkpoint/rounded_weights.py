"""Values on disk that a model in half precision does not hold."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from shardtune.checkpoint.quantized.tensor import DequantizedTensor
from shardtune.checkpoint.weight_files import WeightTensor

SAMPLE = 4096
"""Numbers of a tensor that are compared, at most, unless a row is longer."""


def rounding_notes(read: Iterable[tuple[WeightTensor, torch.Tensor]], place: str | Path) -> list[str]:
    """A note for the user where half precision has rounded weights, found in the first rows of each; else none.

    Args:
        read: tensors on disk, each with what it was read into.
        place: where they are.
    """
    for stored, held in read:
        if _is_rounded(stored, held):
            wide, half = (str(each.dtype).removeprefix("torch.") for each in (stored, held))
            return [
                f"the weights in {place} are in {wide}, of which {half} does not hold all values: they are rounded to "
                f"the nearest, once, as training in {half} begins ({stored.name} is the first)"
            ]
    return []


def _is_rounded(stored: WeightTensor, held: torch.Tensor) -> bool:
    is_half = held.is_floating_point() and held.dtype.itemsize < 4
    if not is_half or isinstance(stored, DequantizedTensor) or stored.dtype.itemsize < 4:
        return False
    sizes = list(stored.shape)
    if sizes:
        width = max(1, torch.Size(sizes[1:]).numel())
        sizes[0] = min(sizes[0], max(1, SAMPLE // width))
    sample = stored.read_slice([0] * len(sizes), sizes)
    return not torch.equal(sample.to(held.dtype).to(sample.dtype), sample)
