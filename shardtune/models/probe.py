"""Does this model, as it stands, keep packed rows apart and give each what it gives alone? Measured before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from shardtune.batch import Batch, Sample
from shardtune.data.packing import pack
from shardtune.errors import ModelError
from shardtune.models.adapter import AdapterRoot
from shardtune.models.causal_lm import CausalLM

LONGEST = 2048
"""Tokens of a row that the probe looks at."""
POSITIONS = 16
"""Tokens at a row's end whose logits are compared; what a window hides or a neighbour leaks shows there."""
AGREEMENT = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far two ways to the same logits may differ, relative to the largest logit; a wrong window or a leak moves them by 0.1 to 2."""
ISOLATION = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 5e-3}
"""How far a row may move when its neighbour changes; the shapes are the same, so only a mixture of experts moves at all."""


@torch.no_grad()
def probe_packing(
    root: AdapterRoot, adapter: CausalLM, samples: Sequence[Sample], device: torch.device, dtype: torch.dtype
) -> list[str]:
    """Choose the fastest way that gives right numbers for this model; every rank calls it with the same rows.

    Packing and the chunked head are kept where the logits of real rows agree with the model's own forward of each row
    alone under its own eager attention, and where changing one packed row leaves the other in place.

    Args:
        root: the (sharded) module.
        adapter: whose choices are changed where a check fails.
        samples: two rows of the data.
        device: where the model computes.
        dtype: the compute dtype.

    Returns:
        What was given up, one sentence each; empty when packing is exact.
    """
    was_training = root.training
    root.eval()
    rows = [_clip(sample) for sample in samples]
    try:
        return _choose(root, adapter, rows, device, dtype)
    finally:
        root.train(was_training)


def _choose(
    root: AdapterRoot, adapter: CausalLM, rows: list[Sample], device: torch.device, dtype: torch.dtype
) -> list[str]:
    reference = [
        root.reference_logits(torch.from_numpy(row.input_ids.astype(np.int64)).to(device), _tail(row).to(device))
        for row in rows
    ]
    notes = []

    def alone() -> bool:
        return all(
            _agree(_packed(root, [row], device)[0], own, AGREEMENT[dtype])
            for row, own in zip(rows, reference, strict=True)
        )

    if not alone():
        if adapter.packs:
            adapter.one_row_per_forward(root.model)
            notes.append("its attention over packed rows differs from its own: one row per forward")
        if not alone():
            adapter.use_own_head()
            notes.append("its logits are not a linear head of its last hidden state: taken from its own forward")
        if not alone():
            raise ModelError(
                "the loss path of this model does not give the logits of its own forward",
                where=f"{type(root.model).__name__}",
                remedy="give the model an adapter of its own (actor.model.adapter)",
            )
    if adapter.packs and len(rows) > 1:
        together = _packed(root, rows, device)
        exact = all(_agree(got, own, AGREEMENT[dtype]) for got, own in zip(together, reference, strict=True))
        if not exact or not _isolated(root, rows, together, device, dtype):
            adapter.one_row_per_forward(root.model)
            notes.append("packed rows see each other in this model: one row per forward")
    return notes


def _isolated(
    root: AdapterRoot, rows: list[Sample], together: list[torch.Tensor], device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether a row stays in place when all tokens of the other change."""
    for number in range(len(rows)):
        changed = list(rows)
        other = rows[number].input_ids
        changed[number] = replace(rows[number], input_ids=np.roll(other, 1) if len(set(other)) > 1 else other * 0)
        moved = _packed(root, changed, device)
        for place, (before, after) in enumerate(zip(together, moved, strict=True)):
            if place != number and not _agree(after, before, ISOLATION[dtype]):
                return False
    return True


def _clip(sample: Sample) -> Sample:
    return replace(sample, input_ids=sample.input_ids[:LONGEST], loss_weights=sample.loss_weights[:LONGEST])


def _tail(row: Sample) -> torch.Tensor:
    return torch.arange(max(0, row.length - POSITIONS), row.length)


def _packed(root: AdapterRoot, rows: list[Sample], device: torch.device) -> list[torch.Tensor]:
    """The last logits of each row when they are packed into one forward."""
    batch: Batch = pack(rows, range(len(rows)), {}).to(device)
    starts = np.cumsum([0, *(row.length for row in rows)])
    tails = [_tail(row) + int(start) for row, start in zip(rows, starts, strict=False)]
    logits = root.logits(batch, torch.cat(tails).to(device))
    return list(logits.split([len(tail) for tail in tails]))


def _agree(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    scale = float(wanted.abs().max()) or 1.0
    return float((got - wanted).abs().max()) <= tolerance * scale
