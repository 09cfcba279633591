"""A tensor whose values are computed from what is stored, for just the part that is read."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardtune.checkpoint.safetensors_file import ReadInParts
from shardtune.checkpoint.weight_files import WeightTensor
from shardtune.errors import ModelError

_BUFFER_BYTES = 16 << 20
"""Values in fp32 that are computed at a time."""


@dataclass(frozen=True, slots=True)
class DequantizedTensor(ReadInParts):
    """A weight that is stored as codes and scales.

    Attributes:
        name: of the weight.
        file: that the codes are in.
        shape: of the values.
        dtype: in which parts are given by `read` and `read_slice`.
        data: the codes.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: WeightTensor

    @abstractmethod
    def values(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The block of shape `sizes` whose first element is at `offsets`, in any floating dtype."""

    def read_into(self, target: torch.Tensor, offsets: Sequence[int]) -> None:
        if target.numel() == 0:
            return
        step = max(1, _BUFFER_BYTES // (4 * math.prod(target.shape[1:])))
        for first in range(0, target.shape[0], step):
            part = target[first : first + step]
            part.copy_(self.values((offsets[0] + first, *offsets[1:]), part.shape))


def companion(stored: dict[str, WeightTensor], of: WeightTensor, *names: str) -> WeightTensor:
    """Takes the first of some names, which a weight cannot be read without, out of the tensors on disk.

    Raises:
        ModelError: there is none.
    """
    for name in names:
        if name in stored:
            return stored.pop(name)
    kind = str(of.dtype).removeprefix("torch.")
    raise ModelError(
        f"'{of.name}' is stored as {kind}, and '{names[0]}', which its values depend on, is not among the weights",
        where=str(of.file),
        remedy="the weights are incomplete: download or copy them again",
    )


def unfit(first: WeightTensor, second: WeightTensor, why: str = "") -> ModelError:
    """The error for a weight and a companion whose shapes do not belong together."""
    return ModelError(
        f"'{second.name}' has shape {list(second.shape)}, which does not fit '{first.name}' of shape "
        f"{list(first.shape)}{why}",
        where=str(second.file),
        remedy="the files belong to different models, or config.json to another: download them again",
    )
