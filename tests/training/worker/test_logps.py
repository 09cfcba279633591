"""Log-probabilities of targets: at the shift, one for each, whatever the model is certain of."""

import pytest
import torch

from shardtune.training.worker.logps import get_batch_logps, target_weight

LOGITS = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([[4, 1, 2, -100, 3], [-100, -100, 6, 0, -100], [-100] * 5])


def by_hand(row: int) -> list[float]:
    """The log-probability of each target of a row: the place before it speaks of it."""
    of = LOGITS.log_softmax(-1)
    return [float(of[row, t - 1, LABELS[row, t]]) for t in range(1, 5) if LABELS[row, t] >= 0]


def test_each_target_has_its_log_probability_at_the_shift():
    found = get_batch_logps(LOGITS, LABELS)
    assert found.dtype == torch.float64
    assert found.shape == (3, 4)
    for row in range(3):
        assert found[row][LABELS[row, 1:] >= 0].tolist() == pytest.approx(by_hand(row), abs=1e-14)
    assert not found[LABELS[:, 1:] < 0].any()
    assert len(by_hand(0)) == 3  # the first label is not one
    assert target_weight(LABELS) == 5


def test_a_loss_as_halos_writes_it_is_the_mean_over_targets():
    """Not a sum over rows: the mask of a [rows, tokens - 1] result counts targets."""
    logps = get_batch_logps(LOGITS, LABELS)
    mask = (logps != 0).float()
    wanted = -sum(sum(by_hand(row)) for row in range(3)) / 5
    assert float((-logps / mask.sum()).sum()) == pytest.approx(wanted, abs=1e-12)


def test_targets_may_weigh_differently():
    weights = torch.full(LABELS.shape, 0.25)
    weights[0, 4] = 2.0
    first, second, last = by_hand(0)
    found = (get_batch_logps(LOGITS, LABELS) * weights[:, 1:]).sum(-1)
    assert float(found[0]) == pytest.approx(0.25 * (first + second) + 2 * last, abs=1e-14)
    assert target_weight(LABELS, weights) == 2.5 + 2 * 0.25


def test_a_certain_target_counts():
    """Its log-probability is exactly 0, and it is a target all the same (a denominator of non-zeros would lose it)."""
    certain = LOGITS.clone()
    certain[0, 0, 1] = 1e4
    assert get_batch_logps(certain, LABELS)[0].tolist() == pytest.approx([0.0, by_hand(0)[1], 0.0, by_hand(0)[2]])
    assert target_weight(LABELS) == 5


def test_the_gradient_reaches_the_logits_of_targets_alone():
    logits = LOGITS.clone().requires_grad_()
    get_batch_logps(logits, LABELS).sum().backward()
    assert logits.grad is not None
    reached = logits.grad.abs().sum(-1) > 0
    assert reached.tolist() == [[True, True, False, True, False], [False, True, True, False, False], [False] * 5]


def test_rows_without_any_target_give_zero_and_a_gradient_of_zero():
    logits = LOGITS.clone().requires_grad_()
    found = get_batch_logps(logits, torch.full_like(LABELS, -100))
    assert not found.any()
    found.sum().backward()
    assert logits.grad is not None
    assert not logits.grad.any()


def test_half_precision_is_summed_in_fp32():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 600, 11, generator=generator).bfloat16()
    labels = torch.randint(11, (2, 600), generator=generator)
    found = get_batch_logps(logits, labels)
    assert found.dtype == torch.float32
    found = found.sum(-1)
    torch.testing.assert_close(found.double(), get_batch_logps(logits.double(), labels).sum(-1), rtol=1e-6, atol=0)


def test_shapes_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match=r"\[3, 4, 7\] do not belong to labels of shape \[3, 5\]"):
        get_batch_logps(LOGITS[:, :4], LABELS)
