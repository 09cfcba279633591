"""Log-probabilities and entropies against whole log-softmaxes: values, gradients, memory; on ranks of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardtune.errors import ModelError
from shardtune.models import loss as loss_module
from shardtune.models.loss import LogitTransform
from shardtune.nn import functional as pieces
from tests.support.largest_tensor import Largest

ROWS, TOKENS, WIDTH, VOCABULARY = 3, 7, 8, 50


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens at a time."""
    monkeypatch.setitem(loss_module.LOGITS_PER_CHUNK, "cpu", 4 * VOCABULARY)


def inputs(dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    shapes = {"hidden": (ROWS, tokens, WIDTH), "weight": (VOCABULARY, WIDTH), "bias": (VOCABULARY,)}
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def targets_of(tokens: int = TOKENS) -> torch.Tensor:
    targets = torch.randint(VOCABULARY, (ROWS, tokens), generator=torch.Generator().manual_seed(1))
    targets[0, 2:4] = targets[1, 0] = targets[:, -1] = -100
    return targets


def whole(logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    found = (logits / temperature).log_softmax(-1)
    counted = targets >= 0
    chosen = found.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return torch.where(counted, chosen, 0.0), torch.where(counted, -(found.exp() * found).sum(-1), 0.0)


def combined(scores: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A loss in which every token counts otherwise, as in a method."""
    draw = torch.Generator().manual_seed(2)
    first, second = (torch.randn(scores[0].shape, generator=draw).to(scores[0].dtype) for _ in range(2))
    return (first * scores[0]).sum() + (second * scores[1]).sum()


def check(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor], of: Any) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).abs().max() < 1e-13
    for ours, theirs in zip(
        *(torch.autograd.grad(combined(scores), of, retain_graph=True) for scores in (found, wanted)), strict=True
    ):
        assert (ours - theirs).abs().max() < 1e-12


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.5, 3.0)], ids=["plain", "softcap"])
def test_values_and_gradients_are_those_of_whole_logits(transform: LogitTransform, temperature: float) -> None:
    values, targets = inputs(), targets_of()
    logits = transform(F.linear(values["hidden"], values["weight"], values["bias"]))
    wanted = whole(logits, targets, temperature)
    given: dict[str, Any] = {"temperature": temperature, "scale": transform.scale, "softcap": transform.softcap}
    tensors = (values["hidden"], values["weight"], targets, values["bias"])
    check(pieces.linear_log_probs_and_entropy(*tensors, **given), wanted, list(values.values()))
    assert torch.equal(
        pieces.linear_log_probs(*tensors, **given), pieces.linear_log_probs_and_entropy(*tensors, **given)[0]
    )
    check(pieces.log_probs_and_entropy(logits, targets, temperature=temperature), wanted, logits)
    alone = pieces.log_probs(logits, targets, temperature=temperature)
    assert torch.equal(alone, pieces.log_probs_and_entropy(logits, targets, temperature=temperature)[0])
    assert torch.autograd.grad(alone.sum(), logits)[0].shape == logits.shape


def test_excluded_tokens_and_ranks_without_targets() -> None:
    values = inputs()
    logits = torch.randn(2, 5).double()
    logits[:, 3] = -torch.inf
    logits.requires_grad_()
    found = pieces.entropy(logits)
    kept = logits[:, [0, 1, 2, 4]].log_softmax(-1)
    assert (found + (kept.exp() * kept).sum(-1)).abs().max() < 1e-14
    assert torch.isfinite(torch.autograd.grad(found.sum(), logits)[0]).all()
    none = pieces.linear_log_probs(values["hidden"], values["weight"], torch.full((ROWS, TOKENS), -100))
    gradient = torch.autograd.grad(none.sum(), [values["hidden"], values["weight"]])
    assert not none.any()
    assert not any(grad.any() for grad in gradient)
    with torch.no_grad():
        assert not pieces.linear_log_probs(values["hidden"], values["weight"], targets_of()).requires_grad


def test_half_precision_is_summed_in_fp32() -> None:
    """Against logits in fp32: rounded logits would be off by 1e-2, their gradient by more."""
    values, targets = inputs(torch.bfloat16), targets_of()
    found = pieces.linear_log_probs(values["hidden"], values["weight"], targets)
    exact = {name: tensor.detach().float().requires_grad_() for name, tensor in values.items()}
    wanted = whole(F.linear(exact["hidden"], exact["weight"]), targets)[0]
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 1e-5
    for name in ("hidden", "weight"):
        ours, theirs = (
            torch.autograd.grad(of.sum(), tensors[name], retain_graph=True)[0]
            for of, tensors in ((found, values), (wanted, exact))
        )
        assert (ours.float() - theirs).abs().max() < 2**-7 * theirs.abs().max()


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    values, targets = inputs(torch.float32, 200), targets_of(200)
    with Largest() as seen:
        found = pieces.linear_log_probs_and_entropy(values["hidden"], values["weight"], targets)
        combined(found).backward()
    assert seen.elements <= max(4 * VOCABULARY, ROWS * 200 * WIDTH) < ROWS * 200 * VOCABULARY / 5


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda v: pieces.log_probs(v["hidden"], targets_of()[:, 1:]), r"logits of shape \[3, 7, 8\] do not belong to"),
        (lambda v: pieces.entropy(v["hidden"], temperature=0.0), "the temperature is 0.0"),
    ],
)
def test_what_cannot_be_meant_is_refused(call: Callable, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        call(inputs())
