"""Advantages, clipped losses and masked means against loops over rows and tokens, in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardtune.errors import ConfigError
from shardtune.nn import functional as pieces

ROWS, TOKENS = 4, 5
LENGTHS = (5, 2, 0, 3)
"""Tokens that count; a row may have none."""
MASK = torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]


def drawn(number: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    return [torch.randn(ROWS, TOKENS, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(number)]


def compare(found: torch.Tensor, wanted: torch.Tensor, of: torch.Tensor) -> None:
    assert (found - wanted).abs().max() < 1e-13
    gradients = [torch.autograd.grad(loss.sum(), of, retain_graph=True)[0] for loss in (found, wanted)]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-13


def counted(values: torch.Tensor) -> torch.Tensor:
    return torch.where(MASK, values, 0.0)


def test_means_over_what_counts() -> None:
    (values,) = drawn(1)
    rows = [row[:length] for row, length in zip(values, LENGTHS, strict=True)]
    broken = torch.where(MASK, values, torch.nan)
    compare(pieces.masked_mean(broken, MASK), torch.cat(rows).mean(), values)
    means = torch.stack([row.mean() if len(row) else row.sum() for row in rows])
    compare(pieces.masked_mean(broken, MASK, dim=1), means, values)
    compare(pieces.masked_sum(broken, MASK, dim=1), torch.stack([row.sum() for row in rows]), values)
    flat = torch.cat(rows)
    white = pieces.masked_whiten(broken, MASK)
    compare(white[MASK], (flat - flat.mean()) / (flat.var() + 1e-8).sqrt(), values)
    compare(pieces.masked_whiten(broken, MASK, shift_mean=False)[MASK], white[MASK] + flat.mean(), values)
    assert not white[~MASK].any()
    for per, length, total, weight in (
        ("token", None, flat.sum(), sum(LENGTHS)),
        ("sequence", None, means.sum(), ROWS),
        ("length", 7, flat.sum(), ROWS * 7),
    ):
        found = pieces.loss_sum(broken, MASK, per, length=length)  # pyright: ignore[reportArgumentType]
        assert found.weight == weight
        compare(found.total, total, values)
    with pytest.raises(ConfigError, match="per='length' with length=None"):
        pieces.loss_sum(values, MASK, "length")


def test_estimates_of_a_divergence() -> None:
    """Their mean over the policy's own draws: of k1 and k3 the divergence, by enumeration of three tokens."""
    policy, reference = (torch.tensor(p, dtype=torch.float64).log() for p in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]))
    exact = sum(math.exp(p) * (p - q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    for estimator in ("k1", "k3"):
        assert abs(float((policy.exp() * pieces.kl_estimate(policy, reference, estimator)).sum()) - exact) < 1e-15
    assert torch.allclose(pieces.kl_estimate(policy, reference, "k2"), (policy - reference) ** 2 / 2)
    assert (pieces.kl_estimate(policy, reference) >= 0).all()
    with pytest.raises(ConfigError, match="there is no estimator 'k4'"):
        pieces.kl_estimate(policy, reference, "k4")  # pyright: ignore[reportArgumentType]


def test_advantages_of_groups() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    third, spread = 1 / 3, math.sqrt(1 / 3)
    centred = [1 - third, -third, -third, 0.0, 0.0, 0.0]
    assert pieces.group_advantages(rewards, 3, scale="none").tolist() == pytest.approx(centred, abs=1e-15)
    scaled = [value / (spread + 1e-4) for value in centred]
    assert pieces.group_advantages(rewards, 3).tolist() == pytest.approx(scaled, abs=1e-15)
    over_all = [value / (math.sqrt(4 / 3 / 5) + 1e-4) for value in centred]
    assert pieces.group_advantages(rewards, 3, scale="batch").tolist() == pytest.approx(over_all, abs=1e-15)
    assert pieces.leave_one_out_advantages(rewards, 3).tolist() == pytest.approx([1, -0.5, -0.5, 0, 0, 0], abs=1e-15)
    for size in (1, 4):
        with pytest.raises(ConfigError, match=f"are no groups of {size}"):
            pieces.group_advantages(rewards, size)


def test_generalised_advantages() -> None:
    """By the sum over future residuals; a token in the middle that does not count is passed over."""
    rewards, values = (tensor.detach() for tensor in drawn(2))
    mask = MASK.clone()
    mask[0, 2] = False
    gamma, lam = 0.9, 0.8
    advantages, returns = pieces.generalised_advantages(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(ROWS):
        places = [place for place in range(TOKENS) if mask[row, place]]
        v = [float(values[row, place]) for place in places] + [0.0]
        deltas = [float(rewards[row, place]) + gamma * v[i + 1] - v[i] for i, place in enumerate(places)]
        for i, place in enumerate(places):
            wanted = sum((gamma * lam) ** (later - i) * deltas[later] for later in range(i, len(places)))
            assert float(advantages[row, place]) == pytest.approx(wanted, abs=1e-14)
            assert float(returns[row, place]) == pytest.approx(wanted + v[i], abs=1e-14)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def clipped(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float, most: float) -> torch.Tensor:
    """Of one token, as PPO's paper draws it: flat where a step would go on in the direction that it went."""
    if advantage >= 0:
        return -advantage * (ratio if ratio < 1 + high else ratio.detach() * 0 + 1 + high)
    flat = ratio.detach() * 0
    return -advantage * (flat + 1 - low if ratio < 1 - low else ratio if ratio < most else flat + most)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("per_token", [False, True])
def test_clipped_losses(level: Any, per_token: bool) -> None:
    log_probs, old, advantages = drawn(3)
    old, advantages = old.detach(), advantages.detach()
    given = advantages if per_token else advantages[:, 0]
    options = {"clip": 0.2, "clip_high": 0.28, "max_ratio": 1.6}
    found = pieces.policy_loss(log_probs, old, given, MASK, level=level, **options)
    wanted = torch.zeros(ROWS, TOKENS, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        for place in range(length):
            apart = log_probs[row] - old[row]
            ratio = (apart[place] if level == "token" else apart[:length].mean()).exp()
            advantage = advantages[row, place if per_token else 0]
            wanted[row, place] = clipped(ratio, advantage, 0.2, 0.28, 1.6)
    compare(counted(found), wanted, log_probs)


def test_other_losses() -> None:
    log_probs, old, advantages = drawn(3)
    weight = (log_probs - old).exp().detach().clamp(max=1.1)
    compare(pieces.cispo_loss(log_probs, old, advantages, max_ratio=1.1), -weight * advantages * log_probs, log_probs)
    values, before, returns = drawn(3)
    step = values - before
    step = torch.where(step.abs() < 0.3, step, 0.3 * step.sign())
    worse = torch.maximum((values - returns) ** 2, (before + step - returns) ** 2) / 2
    compare(pieces.value_loss(values, before, returns, clip=0.3), worse, values)
    compare(pieces.value_loss(values, before, returns, clip=None), (values - returns) ** 2 / 2, values)


@pytest.mark.parametrize(
    "call",
    [
        lambda rows: pieces.policy_loss(*rows, MASK, level="row"),
        lambda rows: pieces.group_advantages(rows[0].flatten(), 5, scale="std"),
    ],
)
def test_what_cannot_be_meant_is_refused(call: Callable) -> None:
    with pytest.raises(ConfigError):
        call(drawn(3))
