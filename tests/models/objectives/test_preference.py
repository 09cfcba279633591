"""Preference losses against their papers' formulas, written out with probabilities, in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from shardtune.errors import ConfigError
from shardtune.models.objectives.preference import PAIR_LOSSES
from shardtune.nn import functional as pieces

PAIRS, BETA = 6, 0.3


def drawn() -> list[torch.Tensor]:
    """Log-probabilities of chosen and rejected answers, by the policy and by the reference."""
    draw = torch.Generator().manual_seed(0)
    return [(-0.2 - torch.rand(PAIRS, generator=draw, dtype=torch.float64) * 4).requires_grad_() for _ in range(4)]


def sigma(value: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-value).exp())


def compare(found: torch.Tensor, wanted: torch.Tensor, of: list[torch.Tensor]) -> None:
    assert found.shape == (PAIRS,)
    assert (found - wanted).abs().max() < 1e-13
    for ours, theirs in zip(
        *(torch.autograd.grad(loss.sum(), of, retain_graph=True) for loss in (found, wanted)), strict=True
    ):
        assert (ours - theirs).abs().max() < 1e-13


# By the name of the loss, from log-ratios c and r, and the smoothing e.
FORMULAS: dict[str, tuple[float, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]]] = {
    "sigmoid": (0.0, lambda c, r, e: -sigma(BETA * (c - r)).log()),
    "robust": (
        0.2,
        lambda c, r, e: -((1 - e) * sigma(BETA * (c - r)).log() - e * sigma(BETA * (r - c)).log()) / (1 - 2 * e),
    ),
    "hinge": (0.0, lambda c, r, e: torch.maximum(1 - BETA * (c - r), torch.zeros(()))),
    "ipo": (0.0, lambda c, r, e: (c - r - 1 / (2 * BETA)) ** 2),
    "exo_pair": (
        0.1,
        lambda c, r, e: (
            sigma(BETA * (c - r)) * (sigma(BETA * (c - r)) / (1 - e)).log()
            + sigma(BETA * (r - c)) * (sigma(BETA * (r - c)) / e).log()
        ),
    ),
    "nca_pair": (
        0.0,
        lambda c, r, e: -sigma(BETA * c).log() - (sigma(-BETA * c).log() + sigma(-BETA * r).log()) / 2,
    ),
    "bco_pair": (0.0, lambda c, r, e: -(sigma(BETA * c) * sigma(-BETA * r)).log()),
    "sppo_hard": (0.0, lambda c, r, e: (c - 1 / BETA * 0.5) ** 2 + (r + 1 / BETA * 0.5) ** 2),
    "apo_zero": (0.0, lambda c, r, e: 1 - sigma(BETA * c) + sigma(BETA * r)),
    "apo_down": (0.0, lambda c, r, e: sigma(BETA * c) + 1 - sigma(BETA * (c - r))),
}


def test_losses_of_pairs_with_a_reference() -> None:
    assert FORMULAS.keys() == PAIR_LOSSES.keys()
    for name, (smoothing, formula) in FORMULAS.items():
        chosen, rejected, ref_chosen, ref_rejected = tensors = drawn()
        found = pieces.dpo_loss(*tensors, beta=BETA, loss_type=name, label_smoothing=smoothing)
        compare(found, formula(chosen - ref_chosen, rejected - ref_rejected, smoothing), tensors[:2])
    chosen, rejected, ref_chosen, ref_rejected = tensors = drawn()
    margin = BETA * (chosen - ref_chosen - rejected + ref_rejected)
    smoothed = -0.9 * sigma(margin).log() - 0.1 * sigma(-margin).log()
    compare(pieces.dpo_loss(*tensors, beta=BETA, label_smoothing=0.1), smoothed, tensors[:2])


def test_losses_without_a_reference() -> None:
    chosen, rejected = tensors = drawn()[:2]
    compare(pieces.cpo_loss(*tensors, beta=BETA), -sigma(BETA * (chosen - rejected)).log(), tensors)
    compare(
        pieces.simpo_loss(*tensors, beta=2.5, gamma=0.6, label_smoothing=0.1),
        -0.9 * sigma(2.5 * (chosen - rejected) - 0.6).log() - 0.1 * sigma(0.6 - 2.5 * (chosen - rejected)).log(),
        tensors,
    )
    odds = [value.exp() / (1 - value.exp()) for value in tensors]
    compare(pieces.orpo_loss(*tensors, beta=BETA), -BETA * sigma((odds[0] / odds[1]).log()).log(), tensors)
    near = torch.tensor([-1e-12], dtype=torch.float64)
    assert torch.isfinite(pieces.orpo_loss(near, 2 * near)).all()


def test_kto_and_reward_models() -> None:
    policy, reference, *_ = tensors = drawn()
    desirable = torch.arange(PAIRS) % 2 == 0
    ratio = policy - reference
    wanted = torch.stack(
        [
            1.5 * (1 - sigma(BETA * (r - 0.4))) if good else 0.5 * (1 - sigma(BETA * (0.4 - r)))
            for r, good in zip(ratio, desirable, strict=True)
        ]
    )
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    compare(pieces.kto_loss(policy, reference, desirable, 0.4, beta=BETA, **weights), wanted, tensors[:1])
    margin = torch.arange(PAIRS) / 4
    wanted = -sigma(policy - reference - margin).log() + 0.01 * (policy + reference) ** 2
    compare(pieces.reward_loss(policy, reference, margin=margin, center=0.01), wanted, tensors[:2])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss_type": "sigmod"}, "there is no loss 'sigmod'"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "'hinge' has no label_smoothing of 0.1"),
        ({"loss_type": "exo_pair"}, "'exo_pair' has no label_smoothing of 0.0"),
        ({"label_smoothing": 0.5}, "'sigmoid' has no label_smoothing of 0.5"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        pieces.dpo_loss(*drawn(), **options)
    assert math.isclose(float(pieces.dpo_loss(*([torch.zeros(1)] * 4))), math.log(2), rel_tol=1e-6)
