"""Losses of preference methods, one for each pair or row, from log-probabilities of whole answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shardtune.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Log-ratios log p_policy - log p_reference of the answers of pairs, [pairs], and what scales them."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    beta: float
    smoothing: float

    @property
    def margin(self) -> torch.Tensor:
        return self.beta * (self.chosen - self.rejected)


def _sigmoid(pairs: _Pairs) -> torch.Tensor:
    return _logistic(pairs.margin, pairs.smoothing)


def _robust(pairs: _Pairs) -> torch.Tensor:
    flipped = pairs.smoothing * F.logsigmoid(-pairs.margin)
    return (flipped - (1 - pairs.smoothing) * F.logsigmoid(pairs.margin)) / (1 - 2 * pairs.smoothing)


def _hinge(pairs: _Pairs) -> torch.Tensor:
    return torch.relu(1 - pairs.margin)


def _ipo(pairs: _Pairs) -> torch.Tensor:
    return (pairs.chosen - pairs.rejected - 1 / (2 * pairs.beta)).square()


def _exo_pair(pairs: _Pairs) -> torch.Tensor:
    log_win, log_lose = F.logsigmoid(pairs.margin), F.logsigmoid(-pairs.margin)
    win = log_win.exp() * (log_win - math.log1p(-pairs.smoothing))
    return win + log_lose.exp() * (log_lose - math.log(pairs.smoothing))


def _nca_pair(pairs: _Pairs) -> torch.Tensor:
    chosen, rejected = pairs.beta * pairs.chosen, pairs.beta * pairs.rejected
    return -F.logsigmoid(chosen) - 0.5 * (F.logsigmoid(-chosen) + F.logsigmoid(-rejected))


def _bco_pair(pairs: _Pairs) -> torch.Tensor:
    return -F.logsigmoid(pairs.beta * pairs.chosen) - F.logsigmoid(-pairs.beta * pairs.rejected)


def _sppo_hard(pairs: _Pairs) -> torch.Tensor:
    half = 0.5 / pairs.beta
    return (pairs.chosen - half).square() + (pairs.rejected + half).square()


def _apo_zero(pairs: _Pairs) -> torch.Tensor:
    return torch.sigmoid(-pairs.beta * pairs.chosen) + torch.sigmoid(pairs.beta * pairs.rejected)


def _apo_down(pairs: _Pairs) -> torch.Tensor:
    return torch.sigmoid(pairs.beta * pairs.chosen) + torch.sigmoid(-pairs.margin)


PAIR_LOSSES: Mapping[str, Callable[[_Pairs], torch.Tensor]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
}
"""By TRL's names."""
SMOOTHED = {"sigmoid": 0.0, "robust": 0.0, "exo_pair": 1e-3}
"""The losses that have a label smoothing, and from which value on."""


def dpo_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Direct preference optimisation (arXiv:2305.18290, eq. 7) and losses of the same arguments, one for each pair.

    | loss_type | of a pair with log-ratios c, r and margin m = beta (c - r) | from |
    |---|---|---|
    | sigmoid | -log sigmoid(m); smoothed: cDPO | arXiv:2305.18290 |
    | robust | as sigmoid, unbiased under labels flipped with probability `label_smoothing` | arXiv:2403.00409 |
    | hinge | max(0, 1 - m) | SLiC, arXiv:2305.10425 |
    | ipo | (c - r - 1 / (2 beta))^2, of log-probabilities per token | arXiv:2310.12036, eq. 17 |
    | exo_pair | reverse KL to the preference, with `label_smoothing` | arXiv:2402.00856, eq. 16 |
    | nca_pair | noise-contrastive alignment | arXiv:2402.05369 |
    | bco_pair | -log sigmoid(beta c) - log sigmoid(-beta r) | BCO without its running mean, arXiv:2404.04656 |
    | sppo_hard | (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2 | arXiv:2405.00675, eq. 4.7 |
    | apo_zero | sigmoid(-beta c) + sigmoid(beta r) | arXiv:2408.06266, eq. 7 |
    | apo_down | sigmoid(beta c) + sigmoid(-m) | arXiv:2408.06266, eq. 8 |

    Args:
        chosen: [pairs], the log-probability of each preferred answer, summed over its tokens; for "ipo" the mean over
            them.
        rejected: [pairs], of the other answers.
        ref_chosen: [pairs], the same by the reference model, without a graph.
        ref_rejected: [pairs].
        beta: how strongly the policy is held at the reference.
        loss_type: of the table.
        label_smoothing: probability below 0.5 that a pair is labelled wrongly ("sigmoid", "robust", "exo_pair").

    Returns:
        [pairs].

    Raises:
        ConfigError: an unknown loss, or a smoothing that it does not have.
    """
    if loss_type not in PAIR_LOSSES:
        raise ConfigError(
            f"there is no loss {loss_type!r}", where="dpo_loss(loss_type=…)", remedy=f"use {', '.join(PAIR_LOSSES)}"
        )
    least = SMOOTHED.get(loss_type)
    if (least is None and label_smoothing) or (least is not None and not least <= label_smoothing < 0.5):
        raise ConfigError(
            f"{loss_type!r} has no label_smoothing of {label_smoothing}",
            where="dpo_loss(label_smoothing=…)",
            remedy="leave it out" if least is None else f"give one from {least:g} to below 0.5",
        )
    return PAIR_LOSSES[loss_type](_Pairs(chosen - ref_chosen, rejected - ref_rejected, beta, label_smoothing))


def kto_loss(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    desirable: torch.Tensor,
    kl: torch.Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """Kahneman-Tversky optimisation (arXiv:2402.01306, eq. 7), one loss for each row; no pairs are needed.

    Args:
        log_probs: [rows], the log-probability of each answer, summed over its tokens.
        ref_log_probs: [rows], by the reference model, without a graph.
        desirable: bool [rows].
        kl: the divergence from the reference over all ranks, at least 0, without a graph: the mean log-ratio of answers
            with prompts that are not theirs.
        beta: how strongly the policy is held at the reference.
        desirable_weight: of desirable rows.
        undesirable_weight: of the others.
    """
    ratio = log_probs - ref_log_probs - kl
    good = desirable_weight * torch.sigmoid(-beta * ratio)
    return torch.where(desirable, good, undesirable_weight * torch.sigmoid(beta * ratio))


def cpo_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> torch.Tensor:
    """The preference term of contrastive preference optimisation (arXiv:2401.08417, eq. 3), one for each pair.

    The method adds the mean negative log-probability of the chosen answers' tokens.

    Args:
        chosen: [pairs], the log-probability of each preferred answer, summed over its tokens; no reference.
        rejected: [pairs].
        beta: factor on their difference.
        label_smoothing: probability that a pair is labelled wrongly.
    """
    return _logistic(beta * (chosen - rejected), label_smoothing)


def simpo_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float = 2.0, gamma: float = 0.5, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Simple preference optimisation (arXiv:2405.14734, eq. 6), one loss for each pair; no reference.

    Args:
        chosen: [pairs], the log-probability of each preferred answer, the **mean** over its tokens.
        rejected: [pairs].
        beta: factor on their difference.
        gamma: the margin by which the preferred answer shall be ahead.
        label_smoothing: probability that a pair is labelled wrongly.
    """
    return _logistic(beta * (chosen - rejected) - gamma, label_smoothing)


def orpo_loss(chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float = 0.1) -> torch.Tensor:
    """The odds-ratio term of ORPO (arXiv:2403.07691, eq. 7), times beta, one for each pair; no reference.

    The method adds the mean negative log-probability of the chosen answers' tokens.

    Args:
        chosen: [pairs], the log-probability of each preferred answer, the **mean** over its tokens.
        rejected: [pairs].
        beta: the paper's lambda.
    """
    log_odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
    return -beta * F.logsigmoid(log_odds)


def reward_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, *, margin: torch.Tensor | float = 0.0, center: float = 0.0
) -> torch.Tensor:
    """The Bradley-Terry loss of a reward model (arXiv:2203.02155, eq. 1), one for each pair.

    Args:
        chosen: [pairs], the rewards of the preferred answers.
        rejected: [pairs].
        margin: by which a pair's rewards shall differ (Llama 2, arXiv:2307.09288, eq. 2).
        center: weight of (chosen + rejected)^2, which draws rewards towards 0 (arXiv:2312.09244).
    """
    return -F.logsigmoid(chosen - rejected - margin) + center * (chosen + rejected).square()


def _logistic(margin: torch.Tensor, smoothing: float) -> torch.Tensor:
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def _log1mexp(values: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) for x < 0: by expm1 near 0, by log1p elsewhere."""
    near = values > -math.log(2)
    small, large = values.where(near, -1.0), values.where(~near, -1.0)  # gradients of both are computed
    return torch.where(near, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))
