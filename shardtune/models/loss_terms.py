"""What a micro-batch gives: its losses by term, checked, and its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from shardtune.batch import LossSum, Metric
from shardtune.errors import ModelError

TERM = "loss"
"""The name of a loss that is the only one."""

Losses = LossSum | Mapping[str, LossSum]
Measured = Mapping[str, Metric | tuple[float, float]]


class Evaluation(NamedTuple):
    """The losses and metrics of a micro-batch.

    Attributes:
        losses: as `Adapter.loss` returns them, by term.
        metrics: (sum, weight) by name.
    """

    losses: dict[str, LossSum]
    metrics: Measured


def named(losses: Losses) -> dict[str, LossSum]:
    """The terms of a loss by name, checked: each a scalar with a graph (in training) and a weight.

    Raises:
        ModelError: a term is no `LossSum` of a scalar and a number, or has no graph.
    """
    terms = {TERM: losses} if isinstance(losses, LossSum) else losses
    if not isinstance(terms, Mapping) or not all(isinstance(term, LossSum) for term in terms.values()):
        raise ModelError(
            f"loss returned a {type(losses).__name__}, not a LossSum or a dict of them",
            where="Adapter.loss",
            remedy="return LossSum(total, weight): the sum of the loss over its targets, and how many they are",
        )
    found = {name: _summable(name, term) for name, term in terms.items()}
    if torch.is_grad_enabled() and found and not any(term.total.requires_grad for term in found.values()):
        raise ModelError(
            "the loss has no graph: no parameter that is trained has a part in it",
            where="Adapter.loss",
            remedy="compute it from what model(…) returns; .detach(), .item(), .data and torch.no_grad() cut the graph",
        )
    return found


def _summable(name: str, term: LossSum) -> LossSum:
    """A loss term, checked to have a scalar as its total and a number as its weight."""
    total, weight = term
    if not isinstance(total, torch.Tensor) or total.ndim:
        kind = f"of shape {list(total.shape)}" if isinstance(total, torch.Tensor) else f"a {type(total).__name__}"
        raise ModelError(
            f"the total of the loss {name!r} is {kind}, not a tensor with one number",
            where="Adapter.loss",
            remedy='sum over the targets: reduction="sum", or losses.sum()',
        )
    try:
        return LossSum(total, float(weight))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"the weight of the loss {name!r} is {weight!r}, not a number",
            where="Adapter.loss",
            remedy="give how many targets the total is a sum of: LossSum(total, len(targets))",
        ) from error
