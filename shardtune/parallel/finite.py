"""Numbers that are not finite, or that a dtype cannot hold, among the weights of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardtune.parallel.ranks import Ranks

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Unfit:
    """A tensor with numbers that are not finite, or that its dtype on disk or in computation cannot hold.

    Attributes:
        name: of the tensor.
        largest: its largest magnitude; NaN where it has any.
        dtype: that cannot hold it.
    """

    name: str
    largest: float
    dtype: torch.dtype

    @property
    def is_nan(self) -> bool:
        return math.isnan(self.largest)

    def __str__(self) -> str:
        if self.is_nan:
            return f"{self.name} holds NaN"
        if math.isinf(self.largest):
            return f"{self.name} holds infinite values"
        kind, most = str(self.dtype).removeprefix("torch."), torch.finfo(self.dtype).max
        return f"{self.name} holds values up to {self.largest:.3g}, beyond the range of {kind} ({most:.3g})"


@torch.no_grad()
def find_unfit(
    tensors: Mapping[str, torch.Tensor], ranks: Ranks | None, dtype: Callable[[str, torch.Tensor], torch.dtype]
) -> list[Unfit]:
    """The tensors with numbers that are not finite in a dtype; the same on every rank, and every rank calls it.

    Each rank reads its own parts once; one small reduction joins them.

    Args:
        tensors: this rank's parts by name, with the same names on all ranks; whole numbers and codes are left out.
        ranks: of the run; None: the tensors are whole on every rank.
        dtype: maps a name and its part to the dtype that has to hold it.
    """
    parts = {name: part for name, part in tensors.items() if part.dtype in FLOATS}
    if not parts:
        return []
    device = next(iter(parts.values())).device if ranks is None else ranks.device
    largest = torch.stack([_largest(part).to(device, torch.float64) for part in parts.values()])
    nan = largest.isnan()
    # NaN has no place in an order, so it is reduced apart.
    joined = torch.cat([largest.masked_fill(nan, 0.0), nan.double()])
    if ranks is not None:
        joined = ranks.largest_of(joined)
    magnitudes, nans = joined.cpu().chunk(2)
    unfit = []
    for (name, part), value, is_nan in zip(parts.items(), magnitudes, nans.tolist(), strict=True):
        kind = dtype(name, part)
        if is_nan or not bool(value.to(kind).isfinite()):
            unfit.append(Unfit(name, math.nan if is_nan else float(value), kind))
    return unfit


def _largest(part: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of a tensor, NaN with any NaN; its fastest way, without a copy of the tensor."""
    if not part.numel():
        return torch.zeros(())
    return torch.maximum(*(end.abs() for end in torch.aminmax(part)))


def some(unfit: Sequence[Unfit]) -> str:
    """The first of them, and how many more there are."""
    return str(unfit[0]) + (f" ({len(unfit) - 1} more tensors likewise)" if len(unfit) > 1 else "")
