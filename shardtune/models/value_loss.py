"""The loss of a value head beside the loss of tokens: the squared error of returns, and how much is explained."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardtune.batch import LossSum, Metric, PackedBatch
from shardtune.config.schema import ModelConfig, ValueHeadConfig
from shardtune.data.robot.returns import RETURN
from shardtune.models.loss import accumulation_dtype

VALUE = "value"
"""The loss term."""
HEAD = "value_head"
"""The name of the head in a model."""
ERROR, EXPLAINED = "value_loss", "explained_variance"
"""Metrics: the mean squared error, without the term's weight; 1 - Var(return - value) / Var(return), over targets."""
_MOMENTS = tuple(f"{EXPLAINED}.{name}" for name in ("error", "return", "square"))


def described(model: ModelConfig, frames: bool) -> list[str]:
    """A sentence on what the recipe's value head is trained on; none without one.

    Args:
        model: the recipe's `actor.model`.
        frames: whether rows are frames of robot data.
    """
    if not model.add_value_head:
        return []
    discount = model.value_head.discount
    if not frames:
        of = "what the adapter makes of its rows"
    elif discount is None:
        of = "the returns in the rows"
    else:
        of = f"returns: rewards until the end of the episode, discounted by {discount:g}"
    return [f"a value head is trained on {of}" + ("; detached" if model.value_head.detach else "")]


class ValueLoss:
    """The value at each target of a row, which is to be the row's return.

    Args:
        config: the recipe's `actor.model.value_head`.
    """

    def __init__(self, config: ValueHeadConfig) -> None:
        self._config = config
        self._sums: torch.Tensor | None = None  # of training, on this rank, since `clear`

    def values(self, model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """[targets]: the values from hidden states [targets, width], those from which the targets are predicted."""
        head = model.get_submodule(HEAD)
        return head((hidden.detach() if self._config.detach else hidden)[None])[0, :, 0]

    def loss(self, values: torch.Tensor, batch: PackedBatch, *, training: bool) -> LossSum:
        """The weighted sum of squared errors, times the term's weight.

        Args:
            values: [targets].
            batch: its field `return` has one for each document.
            training: whether it counts in `metrics`.
        """
        sums, squares = _sums(values, batch)
        if training:
            self._sums = sums if self._sums is None else self._sums + sums
        return LossSum(self._config.weight * squares, batch.target_weight)

    def measured(self, values: torch.Tensor, batch: PackedBatch) -> dict[str, Metric]:
        """The sums of a micro-batch in evaluation; `explained` makes metrics of those of a whole set."""
        return _moments(_sums(values, batch)[0].tolist())

    def clear(self) -> None:
        self._sums = None

    def moments(self) -> list[float]:
        """The sums of training on this rank since `clear`, see `metrics_of`."""
        return [0.0] * 5 if self._sums is None else self._sums.tolist()


def metrics_of(moments: list[float]) -> dict[str, Metric]:
    """The metrics from the sums of `ValueLoss.moments` over all ranks."""
    return explained(_moments(moments))


def explained(sums: Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics with the explained variance in the place of the sums that it is computed from, if they are there.

    Where all returns are the same it is 1 if they are predicted exactly, otherwise 0.
    """
    others = {name: metric for name, metric in sums.items() if name not in _MOMENTS}
    if len(others) == len(sums) or not sums[ERROR].weight:
        return others
    error, mean, square = (sums[name].mean for name in _MOMENTS)
    squared = sums[ERROR].mean
    left, whole = squared - error**2, square - mean**2
    if whole <= 1e-14 * square:
        share = float(squared <= 1e-14 * square)
    else:
        share = 1 - left / whole
    return {**others, EXPLAINED: Metric(share, 1.0)}


def _sums(values: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Without a graph, float64 [5]: of the weights w, w e, w e², w r and w r²; and of w e² with one.

    e = r - v is the error, r the return. Worked example: documents of 3 and 2 tokens (`cu_seqlens` 0 3 5) whose targets
    are predicted from the tokens 1 and 3 belong to the documents 0 and 1, whose returns they have.
    """
    document = torch.searchsorted(batch.cu_seqlens.long(), batch.target_positions, right=True) - 1
    acc = accumulation_dtype(values.dtype)
    weights, returns = batch.target_weights.to(acc), batch[RETURN].to(acc)[document]
    errors = returns - values.to(acc)
    squares = (weights * errors.square()).sum()
    w, e, r = (tensor.detach().double() for tensor in (weights, errors, returns))
    return torch.stack([part.sum() for part in (w, w * e, w * e * e, w * r, w * r * r)]), squares


def _moments(sums: list[float]) -> dict[str, Metric]:
    weight, error, squared, mean, square = sums
    moments = dict(zip(_MOMENTS, (error, mean, square), strict=True))
    return {ERROR: Metric(squared, weight), **{name: Metric(value, weight) for name, value in moments.items()}}
