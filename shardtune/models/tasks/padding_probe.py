"""Whether a model computes a row otherwise where it is padded, as models that mix tokens without a mask do (FNet),
that pool neighbours (Funnel) or that read the last position (XLNet's classifier)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from shardtune.batch import Batch
from shardtune.models.packing_probe import AGREEMENT
from shardtune.parallel.fp32_compute import in_fp32

ADDED = 3
"""Tokens of padding behind the row: neither an even number nor a whole window."""
LONGEST = 512
"""Tokens of the row that are computed."""
SHORTEST = 4
"""Tokens that are left of a text."""


@torch.no_grad()
def padding_changes(
    outputs: Callable[[Batch], Mapping[str, torch.Tensor]],
    batch: Batch,
    padding: Mapping[str, float],
    *,
    most: int | None,
    dtype: torch.dtype,
) -> bool:
    """Whether the outputs of a row differ from those of the same row with padding behind it, at an even and at an odd
    number of tokens.

    Args:
        outputs: calls the model.
        batch: the row; fields of tokens have them in their last dimension.
        padding: those fields, and what they are padded with.
        most: tokens that the model has positions for; None: any number.
        dtype: in which it computes.
    """
    widest = max(batch[name].shape[-1] for name in padding.keys() & batch.fields.keys())
    least = max(0, widest - (LONGEST if most is None else min(LONGEST, most - ADDED)))
    cuts = [cut for cut in (least, least + 1) if cut == least or widest - cut >= SHORTEST]

    def distance() -> float:
        found = 0.0
        for cut in cuts:
            alone = _changed(batch, padding, cut, 0)
            padded = outputs(_changed(batch, padding, cut, ADDED))
            pairs = [(one, padded[name]) for name, one in outputs(alone).items() if one.is_floating_point()]
            found = max([found, *(_difference(one, other) for one, other in pairs)], key=_nan_last)
        return found

    apart, computed = in_fp32(distance, dtype)
    return not apart <= AGREEMENT[computed]  # nor is NaN


def _changed(batch: Batch, padding: Mapping[str, float], cut: int, added: int) -> Batch:
    """The row without some tokens behind the first one, so that its last stays, and with padding at its end."""
    fields = dict(batch.fields)
    for name in padding.keys() & fields.keys():
        tokens = fields[name]
        left = min(cut, max(0, tokens.shape[-1] - SHORTEST))
        kept = torch.cat([tokens[..., :1], tokens[..., 1 + left :]], -1) if left else tokens
        fields[name] = torch.nn.functional.pad(kept, (0, added), value=padding[name])
    return replace(batch, fields=fields)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest one of what both have, beside the largest value."""
    places = tuple(slice(0, size) for size in one.shape)
    largest = one.abs().max()
    return float((one - other[places]).abs().max() / torch.where(largest == 0, 1, largest))


def _nan_last(value: float) -> tuple[bool, float]:
    return value != value, value
