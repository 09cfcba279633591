"""Advantages of sampled answers, and the clipped losses that train a policy on them."""

from __future__ import annotations

from typing import Literal

import torch

from shardtune.errors import ConfigError
from shardtune.models.objectives.masked import masked_mean

Scale = Literal["group", "batch", "none"]
Level = Literal["token", "sequence"]


def group_advantages(
    rewards: torch.Tensor, group_size: int, *, scale: Scale = "group", eps: float = 1e-4
) -> torch.Tensor:
    """GRPO's advantages: how much better an answer is than the others to the same prompt.

    Args:
        rewards: [groups * group_size], the answers to one prompt next to each other; of all ranks.
        group_size: answers to each prompt.
        scale: "group": over the standard deviation of the group's rewards (arXiv:2402.03300); "batch": over that of
            all; "none": the difference from the mean alone (Dr. GRPO, arXiv:2503.20783).
        eps: added to the standard deviation, which is that of samples (Bessel's correction).

    Returns:
        [groups * group_size]; 0 where a group's rewards are all the same.

    Raises:
        ConfigError: the rewards do not fill groups of at least two.
    """
    groups = _groups(rewards, group_size, "group_advantages")
    centred = groups - groups.mean(1, keepdim=True)
    if scale == "none":
        return centred.flatten()
    if scale not in ("group", "batch"):
        raise ConfigError(f"scale={scale!r}", where="group_advantages", remedy="use group, batch, none")
    spread = groups.std(1, keepdim=True) if scale == "group" else groups.std()
    return (centred / (spread + eps)).flatten()


def leave_one_out_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """RLOO's advantages (arXiv:2402.14740): each reward less the mean of the other answers' to the same prompt.

    Arguments and errors as `group_advantages`'.
    """
    groups = _groups(rewards, group_size, "leave_one_out_advantages")
    others = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    return (groups - others).flatten()


def _groups(rewards: torch.Tensor, group_size: int, where: str) -> torch.Tensor:
    if group_size < 2 or rewards.ndim != 1 or len(rewards) % group_size:
        raise ConfigError(
            f"rewards of shape {list(rewards.shape)} are no groups of {group_size}",
            where=where,
            remedy="give one reward for each answer, at least two answers to each prompt, next to each other",
        )
    return rewards.view(-1, group_size)


def generalised_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), from the last token backwards.

    A = sum_l (gamma lam)^l delta_{t+l} with delta_t = reward_t + gamma value_{t+1} - value_t; after the last token that
    counts the value is 0. Tokens that do not count (padding, what a tool wrote) are passed over.

    Args:
        rewards: [rows, tokens].
        values: [rows, tokens], of the state before each token.
        mask: [rows, tokens], bool or 0 and 1.
        gamma: discount of a token.
        lam: 0: one step, low variance; 1: whole returns.

    Returns:
        (advantages, returns): [rows, tokens] both, without a graph, 0 where nothing counts; returns are what the values
        are trained towards, advantages + values.
    """
    counted, values = mask != 0, values.detach()
    following, advantage = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    found = torch.zeros_like(values)
    for place in reversed(range(values.shape[1])):
        here = counted[:, place]
        delta = rewards[:, place] + gamma * following - values[:, place]
        advantage = torch.where(here, delta + gamma * lam * advantage, advantage)
        following = torch.where(here, values[:, place], following)
        found[:, place] = torch.where(here, advantage, 0.0)
    return found, torch.where(counted, found + values, 0.0)


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    max_ratio: float | None = None,
    level: Level = "token",
) -> torch.Tensor:
    """The clipped loss of PPO and GRPO (arXiv:1707.06347, eq. 7; arXiv:2402.03300, eq. 3), one for each token.

    -min(ratio A, clamp(ratio, 1 - clip, 1 + clip_high) A) with ratio = p / p_old. For the mean over tokens, rows or a
    fixed length see `loss_sum`, for the divergence from a reference `kl_estimate`, which is added times its weight.

    Args:
        log_probs: [rows, tokens] of the policy.
        old_log_probs: [rows, tokens] of the policy that drew the tokens, without a graph; `log_probs.detach()` for one
            update a draw.
        advantages: [rows], or [rows, tokens].
        mask: [rows, tokens], bool or 0 and 1: which tokens the policy drew.
        clip: how far the ratio may fall.
        clip_high: how far it may rise; None: as far (DAPO, arXiv:2503.14476: 0.28).
        max_ratio: the largest ratio at all, above 1 + clip_high, for negative advantages, where the clip has no effect
            (dual-clip PPO, arXiv:1912.09729; TRL's `delta`).
        level: "token", or "sequence": the ratio of a row is the geometric mean over its tokens (GSPO,
            arXiv:2507.18071, eq. 7; clip 3e-4, clip_high 4e-4).

    Returns:
        [rows, tokens].
    """
    log_ratio = log_probs - old_log_probs
    if level == "sequence":
        log_ratio = masked_mean(log_ratio, mask, dim=1)[:, None].expand_as(log_ratio)
    elif level != "token":
        raise ConfigError(f"level={level!r}", where="policy_loss", remedy="use token, sequence")
    ratio, weights = log_ratio.exp(), _per_token(advantages)
    clipped = ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    if max_ratio is not None:
        ratio = ratio.clamp(max=max_ratio)
    return -torch.minimum(ratio * weights, clipped * weights)


def cispo_loss(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, *, max_ratio: float = 5.0
) -> torch.Tensor:
    """CISPO's loss (MiniMax-M1, arXiv:2506.13585, eq. 4), one for each token: no token's gradient is clipped away.

    -min(p / p_old, max_ratio) A log p, where the first factor has no gradient. Arguments as `policy_loss`'.
    """
    ratio = (log_probs - old_log_probs).detach().exp().clamp(max=max_ratio)
    return -ratio * _per_token(advantages) * log_probs


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, clip: float | None = 0.2
) -> torch.Tensor:
    """PPO's loss of a value head, one for each token: max((v - R)^2, (clamp(v, v_old -+ clip) - R)^2) / 2.

    Args:
        values: [rows, tokens].
        old_values: [rows, tokens], when the answers were drawn.
        returns: [rows, tokens], of `generalised_advantages`.
        clip: how far a value may move at once; None: any distance.
    """
    plain = (values - returns).square()
    if clip is None:
        return plain / 2
    near = values.clamp(old_values - clip, old_values + clip)
    return torch.maximum(plain, (near - returns).square()) / 2


def _per_token(advantages: torch.Tensor) -> torch.Tensor:
    return advantages[:, None] if advantages.ndim == 1 else advantages
