"""Log-probabilities of target tokens, read from a model's logits over padded rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardtune.batch import IGNORED
from shardtune.models.loss import accumulation_dtype


def get_batch_logps(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None, *, average: bool = False
) -> torch.Tensor:
    """The sum of the log-probabilities of each row's targets, in fp32 (fp64 for fp64 logits).

    The logits at position t predict the label at t + 1, so the first label of a row is never a target and the last
    logits are unused. Only the label -100 excludes a position: a target of probability 1 has log-probability 0 and
    counts like any other.

    Args:
        logits: [rows, tokens, vocabulary].
        labels: int64 [rows, tokens], -100 for positions without a target.
        weights: [rows, tokens], the weight of each target; None: 1.
        average: divide each row's sum by the weight of its targets; a row without any gives 0.

    Returns:
        [rows], with a graph where the logits have one.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits of shape {list(logits.shape)} do not belong to labels of shape {list(labels.shape)}")
    targets = labels[:, 1:]
    counted = targets != IGNORED
    chosen = logits[:, :-1][counted]
    dtype = accumulation_dtype(logits.dtype)
    losses = F.cross_entropy(chosen.to(dtype), targets[counted], reduction="none")
    placed = torch.zeros(targets.shape, dtype=dtype, device=logits.device)
    shares = counted.to(dtype) if weights is None else weights[:, 1:].to(dtype) * counted
    sums = -(placed.masked_scatter(counted, losses) * shares).sum(-1)
    if not average:
        return sums
    totals = shares.sum(-1)
    return sums / torch.where(totals > 0, totals, torch.ones_like(totals))


def target_weight(labels: torch.Tensor, weights: torch.Tensor | None = None) -> float:
    """The total weight of the targets of padded rows; without weights, their number.

    Args:
        labels: int64 [rows, tokens], -100 for positions without a target.
        weights: [rows, tokens].
    """
    counted = labels[:, 1:] != IGNORED
    if weights is None:
        return float(counted.sum())
    return float((weights[:, 1:].double() * counted).sum())
