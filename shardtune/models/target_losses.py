"""Losses and predictions at the targets of a micro-batch, from what enters a model's head, in chunks of logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shardtune.batch import PackedBatch
from shardtune.models.distillation import Distilled
from shardtune.models.language_head import AtHead
from shardtune.models.loss import (
    CrossEntropy,
    TokenLoss,
    accumulation_dtype,
    chunk_rows,
    head_cross_entropy,
    linear_cross_entropy,
)
from shardtune.models.source_losses import TargetLosses
from shardtune.models.user_metrics import Prediction


def target_losses(
    at: AtHead,
    batch: PackedBatch,
    token_loss: TokenLoss | Distilled,
    vocabulary: int,
    *,
    count_correct: bool,
    by_source: TargetLosses | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of the targets' losses, and the number of targets with the largest logit (0 unless counted);
    the same on all ranks that share the sequences.

    Args:
        at: the forward.
        batch: its targets and their weights.
        token_loss: of a target.
        vocabulary: the number of logits.
        count_correct: whether to count.
        by_source: reads each target's loss.
    """
    targets, weights = batch.targets, batch.target_weights
    if at.part is not None:
        targets, weights = at.part.select(targets), at.part.select(weights)
        token_loss = token_loss.of(at.part.mine) if isinstance(token_loss, Distilled) else token_loss
    each = None
    if by_source is not None:
        each = torch.zeros(len(targets), dtype=accumulation_dtype(at.hidden.dtype), device=targets.device)
    if isinstance(token_loss, Distilled) and type(at.head) is not nn.Linear:
        total, correct = linear_cross_entropy(
            at.logits, None, targets, weights, loss=token_loss, count_correct=count_correct, each=each
        )
    elif type(at.head) is nn.Linear and isinstance(token_loss, CrossEntropy | Distilled):
        total, correct = linear_cross_entropy(
            at.hidden, at.head.weight, targets, weights, bias=at.head.bias, transform=at.transform,
            loss=token_loss, count_correct=count_correct, each=each,
        )  # fmt: skip
    else:
        assert not isinstance(token_loss, Distilled)
        total, correct = head_cross_entropy(
            at.hidden, _same if at.head is None else at.head, vocabulary, targets, weights,
            transform=at.transform, token_loss=token_loss, count_correct=count_correct, each=each,
        )  # fmt: skip
    if by_source is not None and each is not None:
        by_source.add(batch, each if at.part is None else at.part.gather(each))
    return (total, correct) if at.part is None else (at.part.sum(total), at.part.sum(correct))


def target_predictions(at: AtHead, batch: PackedBatch, vocabulary: int) -> Iterator[Prediction]:
    """The logits at the targets, in chunks of the loss's size."""
    hidden = at.hidden if at.part is None else at.part.gather(at.hidden)
    size = chunk_rows(hidden.device, vocabulary)
    for start in range(0, hidden.shape[0], size):
        rows = slice(start, start + size)
        logits = at.logits_from(hidden[rows])
        yield Prediction(logits.to(accumulation_dtype(logits.dtype)), batch.targets[rows], batch.target_weights[rows])


def _same(logits: torch.Tensor) -> torch.Tensor:
    return logits
