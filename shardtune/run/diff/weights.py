"""How the trained models of two runs differ, tensor by tensor; no tensor is in memory as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardtune.checkpoint.safetensors_file import StoredTensor, read_header
from shardtune.errors import ShardtuneError
from shardtune.run.stored_run import StoredRun

BLOCK_BYTES = 64 << 20
SHOWN_TENSORS = 8
NOT_FINITE = math.inf


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not bitwise the same in both models.

    Attributes:
        name: on disk.
        relative: the largest difference of two values, relative to the tensor's largest value; infinite where one of
            two values alone is not finite.
    """

    name: str
    relative: float


@dataclass(frozen=True, slots=True)
class WeightsDifference:
    """The tensors in `final/` of two runs.

    Attributes:
        tensors: how many were compared.
        differing: those that differ, the largest difference first.
        alone: names that one model alone has, or with another shape or dtype.
        unknown: why they were not compared; "" if they were.
    """

    tensors: int = 0
    differing: list[TensorDifference] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    unknown: str = ""

    @property
    def equal(self) -> bool:
        return not (self.unknown or self.differing or self.alone)


def compare_weights(first: StoredRun, second: StoredRun) -> WeightsDifference:
    """Read both models once."""
    try:
        one, other = (_tensors(run.final) for run in (first, second))
        without = [str(run.path) for run, found in ((first, one), (second, other)) if not found]
        if without:
            return WeightsDifference(unknown=f"no trained model: {' and '.join(without)}")
        shared = [name for name in one if name in other and _kind(one[name]) == _kind(other[name])]
        alone = sorted((one.keys() | other.keys()) - set(shared))
        found = [TensorDifference(name, _largest_difference(one[name], other[name])) for name in shared]
    except (OSError, ShardtuneError) as error:
        return WeightsDifference(unknown=str(error).splitlines()[0])
    differing = sorted((tensor for tensor in found if tensor.relative), key=lambda tensor: -tensor.relative)
    return WeightsDifference(len(shared), differing, alone)


def _tensors(directory: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= read_header(file)[0]
    return found


def _kind(tensor: StoredTensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tensor.shape


def _largest_difference(one: StoredTensor, other: StoredTensor) -> float:
    """Of two tensors' values, relative to the largest value; 0.0 only for the same bits."""
    difference, scale, same = 0.0, 0.0, True
    for mine, theirs in zip(_blocks(one), _blocks(other), strict=True):
        if torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
            scale = max(scale, _largest(mine))
            continue
        same = False
        a, b = mine.double(), theirs.double()
        if not torch.equal(a.isfinite(), b.isfinite()):
            return NOT_FINITE
        scale = max(scale, _largest(mine), _largest(theirs))
        difference = max(difference, _largest(a - b))
    if same:
        return 0.0
    return max(difference / scale if scale else 0.0, torch.finfo(torch.float64).tiny)  # 0.0 and -0.0 are other bits


def _largest(values: torch.Tensor) -> float:
    return float(values.double().abs().nan_to_num(0.0, posinf=0.0).max()) if values.numel() else 0.0


def _blocks(tensor: StoredTensor) -> Iterator[torch.Tensor]:
    """The tensor in pieces, flat; cut along its first dimension."""
    if not tensor.shape:
        yield tensor.read().reshape(1)
        return
    row = max(1, math.prod(tensor.shape[1:]) * tensor.dtype.itemsize)
    rows = max(1, BLOCK_BYTES // row)
    rest = tensor.shape[1:]
    for start in range(0, tensor.shape[0], rows):
        size = min(rows, tensor.shape[0] - start)
        yield tensor.read_slice((start, *(0 for _ in rest)), (size, *rest)).reshape(-1)
