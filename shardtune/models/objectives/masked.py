"""Sums and means over the tokens that count, and estimates of a divergence from log-probabilities."""

from __future__ import annotations

from typing import Literal

import torch

from shardtune.batch import LossSum
from shardtune.errors import ConfigError

Per = Literal["token", "sequence", "length"]
Estimator = Literal["k1", "k2", "k3"]


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """The sum of values where the mask is not 0; what stands elsewhere (NaN, too) does not count.

    Args:
        values: [...].
        mask: of the same shape, bool, or numbers that weigh the values.
        dim: along which to sum; None: over all.
    """
    weighed = torch.where(mask != 0, values, 0.0) * mask.to(values.dtype)
    return weighed.sum() if dim is None else weighed.sum(dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """The mean of values where the mask is not 0; 0 where nothing counts. Arguments as `masked_sum`'s.

    Of one rank and micro-batch: for a loss over all of them use `loss_sum`.
    """
    weight = mask.to(values.dtype).sum() if dim is None else mask.to(values.dtype).sum(dim)
    return masked_sum(values, mask, dim) / weight.where(weight != 0, 1.0)


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True) -> torch.Tensor:
    """Values with mean 0 and variance 1 (Bessel's correction, plus 1e-8) over what counts; 0 elsewhere.

    Args:
        values: [...], of all ranks: statistics of one rank's are other ones.
        mask: of the same shape, bool or 0 and 1.
        shift_mean: False: the mean stays what it is.
    """
    values = torch.where(mask != 0, values, 0.0)  # before the square, whose gradient at NaN would be NaN
    mean, number = masked_mean(values, mask), (mask != 0).sum()
    variance = masked_mean((values - mean).square(), mask) * number / (number - 1).clamp(min=1)
    white = (values - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask != 0, white if shift_mean else white + mean, 0.0)


def loss_sum(losses: torch.Tensor, mask: torch.Tensor, per: Per = "token", *, length: int | None = None) -> LossSum:
    """Token losses as a sum and what it is divided by, so that ranks and micro-batches can be added up exactly.

    In a method of an engine: `self.mean_over_ranks(*loss_sum(losses, mask)).backward()`; an adapter returns the sum.

    Args:
        losses: [rows, tokens].
        mask: [rows, tokens], bool or 0 and 1.
        per: "token": the mean over all tokens (DAPO, arXiv:2503.14476, eq. 8; verl's token-mean). "sequence": the mean
            over rows of the means over their tokens (GRPO, arXiv:2402.03300, eq. 3; verl's seq-mean-token-mean).
            "length": the mean over rows of their sums, over a fixed length (Dr. GRPO, arXiv:2503.20783).
        length: with "length", the number of tokens that every row counts as; the longest answer allowed, say.

    Raises:
        ConfigError: a length without "length", or the other way round.
    """
    if (per == "length") != (length is not None):
        raise ConfigError(
            f"per={per!r} with length={length}",
            where="loss_sum",
            remedy='give length with per="length", and with no other',
        )
    if per == "token":
        return LossSum(masked_sum(losses, mask), float((mask != 0).sum()))
    if per == "sequence":
        return LossSum(masked_mean(losses, mask, dim=1).sum(), float(len(losses)))
    if length is None:
        raise ConfigError(f"per={per!r}", where="loss_sum", remedy="use token, sequence, length")
    return LossSum(masked_sum(losses, mask), float(len(losses) * length))


def kl_estimate(log_probs: torch.Tensor, reference: torch.Tensor, estimator: Estimator = "k3") -> torch.Tensor:
    """Estimates of KL(policy || reference) from tokens that the policy drew, one for each (Schulman, 2020).

    With r = p_reference / p_policy of the token: k1 = -log r (unbiased, may be negative), k2 = (log r)^2 / 2 (low
    variance, biased), k3 = r - 1 - log r (unbiased, never negative; GRPO's). See joschu.net/blog/kl-approx.html.

    Args:
        log_probs: [...] of the policy.
        reference: [...] of the reference, usually without a graph.
        estimator: of the three.
    """
    log_ratio = reference - log_probs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        return log_ratio.exp() - 1 - log_ratio
    raise ConfigError(f"there is no estimator {estimator!r}", where="kl_estimate", remedy="use k1, k2, k3")
