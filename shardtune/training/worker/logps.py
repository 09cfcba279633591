"""Log-probabilities of target tokens, read from a model's logits over padded rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardtune.batch import IGNORED
from shardtune.models.loss import accumulation_dtype


def get_batch_logps(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The log-probability of each target token, in fp32 (fp64 for fp64 logits), as HALOs' function of this name.

    The logits at position t predict the label at t + 1, so the first label of a row is never a target and the last
    logits are unused. `labels[:, 1:] != -100` is where the result counts: a target of probability 1 has log-probability
    0, too, and counts like any other.

    Args:
        logits: [rows, tokens, vocabulary].
        labels: int64 [rows, tokens], -100 for positions without a target.

    Returns:
        [rows, tokens - 1], 0 for positions without a target; with a graph where the logits have one.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits of shape {list(logits.shape)} do not belong to labels of shape {list(labels.shape)}")
    targets = labels[:, 1:]
    counted = targets != IGNORED
    dtype = accumulation_dtype(logits.dtype)
    losses = F.cross_entropy(logits[:, :-1][counted].to(dtype), targets[counted], reduction="none")
    return -torch.zeros(targets.shape, dtype=dtype, device=logits.device).masked_scatter(counted, losses)


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
