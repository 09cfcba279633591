"""The head's loss and gradients against whole fp32 logits, and the memory it takes; the router's balance loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from shardtune.config import ActorConfig
from shardtune.config.user_code import import_file
from shardtune.errors import ConfigError
from shardtune.models import head_gradient
from shardtune.models import loss as loss_module
from shardtune.models.chosen_loss import chosen_loss
from shardtune.models.loss import (
    IDENTITY,
    PLAIN,
    CrossEntropy,
    LogitTransform,
    TokenLoss,
    head_cross_entropy,
    linear_cross_entropy,
    router_balance,
)
from tests.support.largest_tensor import Largest

ROWS, WIDTH, VOCABULARY = 37, 16, 50
TRANSFORMS = [IDENTITY, LogitTransform(scale=0.25), LogitTransform(softcap=5.0), LogitTransform(0.5, 3.0)]
REGULARISED = [CrossEntropy(0.1), CrossEntropy(z=1e-2), CrossEntropy(0.3, 0.1)]


def inputs(dtype: torch.dtype, rows: int = ROWS, *, bias: bool = True) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    return {"hidden": draw(rows, WIDTH), "weight": draw(VOCABULARY, WIDTH), "bias": draw(VOCABULARY) if bias else None}


def targets_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(rows, generator=generator) * 2
    weights[::5] = 0.0
    return torch.randint(VOCABULARY, (rows,), generator=generator), weights


def with_all_logits(
    values: dict, transform: LogitTransform, *, logits_dtype: torch.dtype, loss: CrossEntropy = PLAIN
) -> torch.Tensor:
    """The loss by whole logits in some dtype: what is compared with."""
    targets, weights = targets_of(len(values["hidden"]))
    logits = transform(F.linear(values["hidden"], values["weight"], values["bias"]).to(logits_dtype))
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=loss.smoothing)
    losses = losses + loss.z * torch.logsumexp(logits, -1) ** 2
    return (losses * weights.to(logits_dtype)).sum()


def by_linear(values: dict, transform: LogitTransform, loss: CrossEntropy = PLAIN) -> torch.Tensor:
    targets, weights = targets_of(len(values["hidden"]))
    return linear_cross_entropy(
        values["hidden"], values["weight"], targets, weights, bias=values["bias"], transform=transform, loss=loss
    )[0]


def by_head(values: dict, transform: LogitTransform, loss: TokenLoss = PLAIN) -> torch.Tensor:
    targets, weights = targets_of(len(values["hidden"]))

    def head(rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, values["weight"], values["bias"])

    settings: dict[str, Any] = {"transform": transform, "token_loss": loss}
    return head_cross_entropy(values["hidden"], head, VOCABULARY, targets, weights, **settings)[0]


def gradients(total: torch.Tensor, values: dict) -> list[torch.Tensor]:
    """Of 0.7 times the loss: a backward pass that ignores what comes from above would show."""
    return list(torch.autograd.grad(total * 0.7, [value for value in values.values() if value is not None]))


@pytest.fixture(
    params=[1, 3 * VOCABULARY, loss_module.LOGITS_PER_CHUNK["cpu"]], ids=["row by row", "uneven", "one chunk"]
)
def chunks(request, monkeypatch) -> None:
    monkeypatch.setitem(loss_module.LOGITS_PER_CHUNK, "cpu", request.param)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("path", [by_linear, by_head])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)], ids=str)
def test_loss_and_gradients_equal_those_of_whole_logits(
    path: Callable, transform: LogitTransform, bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    values = inputs(dtype, bias=bias)
    wanted = with_all_logits(values, transform, logits_dtype=dtype)
    got = path(values, transform)
    assert got.dtype == dtype
    assert abs((got - wanted).item()) <= tolerance * abs(wanted.item())
    for ours, theirs in zip(gradients(got, values), gradients(wanted, values), strict=True):
        assert float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("loss", REGULARISED, ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("path", [by_linear, by_head])
def test_smoothing_and_z_loss_equal_those_of_whole_logits(
    path: Callable, transform: LogitTransform, loss: CrossEntropy
) -> None:
    values = inputs(torch.float64)
    wanted = with_all_logits(values, transform, logits_dtype=torch.float64, loss=loss)
    plain = with_all_logits(values, transform, logits_dtype=torch.float64)
    got = path(values, transform, loss)
    assert abs(float((got - wanted).detach())) <= 1e-13 * abs(float(wanted.detach()))
    assert abs(float((got - plain).detach())) > 1e-2
    for ours, theirs in zip(gradients(got, values), gradients(wanted, values), strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-13 * float(theirs.abs().max())


@pytest.mark.parametrize("path", [by_linear, by_head])
def test_no_targets_have_no_loss_however_it_is_regularised(path: Callable) -> None:
    values = inputs(torch.float32, 0)
    total = path(values, IDENTITY, REGULARISED[-1])
    assert float(total.detach()) == 0.0
    assert not any(gradient.any() for gradient in gradients(total, values))


@pytest.mark.parametrize("path", [by_linear, by_head])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_half_precision_is_no_worse_than_with_fp32_logits(
    path: Callable, dtype: torch.dtype, transform: LogitTransform
) -> None:
    """Both against fp64 on the same (rounded) inputs."""
    half = inputs(dtype, 400)
    exact = {name: value.detach().double().requires_grad_() for name, value in half.items() if value is not None}
    truth = with_all_logits(exact, transform, logits_dtype=torch.float64)
    usual = with_all_logits(half, transform, logits_dtype=torch.float32)
    got = path(half, transform)
    assert got.dtype == torch.float32
    assert abs(got.item() - truth.item()) <= max(abs(usual.item() - truth.item()), 1e-6 * abs(truth.item()))
    true_gradients = gradients(truth, exact)
    for ours, theirs, true in zip(gradients(got, half), gradients(usual, half), true_gradients, strict=True):
        assert ours.dtype == dtype
        scale = float(true.abs().max())
        # In bfloat16 the gradient of the logits is rounded before its products, as on a GPU, and on a CPU each product;
        # with logits in bfloat16 the error would be one and a half times to twice that with fp32 ones.
        rounded = dtype == torch.bfloat16 and path is by_linear and transform is not IDENTITY
        limit = 1.25 if rounded else 1.05
        assert float((ours - true).norm()) <= limit * float((theirs - true).norm()) + 1e-6 * scale


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 has no such function")
def test_torchs_own_sum_in_bf16_would_not_do() -> None:
    """Why there is a function of our own: the reference itself must tell the two apart."""
    half = inputs(torch.bfloat16, 400, bias=False)
    targets, _ = targets_of(400)
    truth = F.cross_entropy(half["hidden"].double() @ half["weight"].double().T, targets, reduction="sum")
    torchs = F.linear_cross_entropy(half["hidden"], half["weight"], targets, reduction="sum")
    ours, _ = linear_cross_entropy(half["hidden"], half["weight"], targets, torch.ones(400))
    assert abs(ours.item() / truth.item() - 1) < 1e-6 < abs(torchs.item() / truth.item() - 1)


@pytest.mark.parametrize("path", [by_linear, by_head])
def test_no_targets_give_zero_and_zero_gradients_for_every_weight(path: Callable) -> None:
    values = inputs(torch.float32, 0)
    total = path(values, IDENTITY)
    assert float(total.detach()) == 0.0
    for gradient in gradients(total, values):
        assert not gradient.any()


@pytest.mark.parametrize("path", [by_linear, by_head])
def test_targets_that_fit_perfectly_still_count(path: Callable) -> None:
    """Weights say what counts, not the loss: a well-fitted token has loss 0 and weight 1."""
    values = inputs(torch.float32)
    targets, weights = targets_of(ROWS)
    with torch.no_grad():
        values["hidden"].zero_()
        values["weight"].zero_()
        values["bias"].copy_(torch.where(torch.arange(VOCABULARY) == targets[1], 100.0, 0.0))
    others = int((weights[targets != targets[1]] > 0).sum())
    total = float(path(values, IDENTITY).detach())
    assert others > 0
    assert total == pytest.approx(float(weights[targets != targets[1]].sum()) * 100, rel=1e-6)


@pytest.mark.usefixtures("chunks")
def test_the_loss_of_each_target_is_kept_and_gradients_stay() -> None:
    values = inputs(torch.float64)
    targets, weights = targets_of(ROWS)
    each = torch.zeros(ROWS, dtype=torch.float64)

    def head(rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, values["weight"], values["bias"])

    total = head_cross_entropy(values["hidden"], head, VOCABULARY, targets, weights, each=each)[0]
    losses = F.cross_entropy(head(values["hidden"]), targets, reduction="none") * weights
    assert torch.allclose(each, losses.detach(), atol=1e-13)
    for found, wanted in zip(gradients(total, values), gradients(losses.sum(), values), strict=True):
        assert torch.allclose(found, wanted, atol=1e-13)


@pytest.mark.usefixtures("chunks")
def test_correct_predictions_are_counted_once_each_whatever_their_weight() -> None:
    values = inputs(torch.float32)
    targets, weights = targets_of(ROWS)
    best = F.linear(values["hidden"], values["weight"]).argmax(-1)
    targets = torch.where(torch.arange(ROWS) % 2 == 0, best, targets)
    wanted = int(((best == targets) & (weights > 0)).sum())

    def head(rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, values["weight"])

    arguments: dict[str, Any] = {"targets": targets, "target_weights": weights, "count_correct": True}
    assert int(linear_cross_entropy(values["hidden"], values["weight"], **arguments)[1]) == wanted
    assert int(head_cross_entropy(values["hidden"], head, VOCABULARY, **arguments)[1]) == wanted
    with torch.no_grad():
        assert int(linear_cross_entropy(values["hidden"], values["weight"], **arguments)[1]) == wanted


@pytest.mark.parametrize("path", [by_linear, by_head])
def test_memory_does_not_grow_with_rows_times_vocabulary(path: Callable, monkeypatch) -> None:
    limit = 40 * VOCABULARY
    monkeypatch.setitem(loss_module.LOGITS_PER_CHUNK, "cpu", limit)
    largest = {}
    for rows in (100, 1600):
        values = inputs(torch.float32, rows)
        with Largest() as seen:
            gradients(path(values, LogitTransform(0.5, 3.0)), values)
        largest[rows] = seen.elements
        assert seen.elements <= max(limit, rows * WIDTH) < rows * VOCABULARY
    with Largest() as seen:  # the measure itself must see whole logits
        with_all_logits(inputs(torch.float32, 1600), IDENTITY, logits_dtype=torch.float32)
    assert seen.elements == 1600 * VOCABULARY


def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the gradient of any weight counts as large; 7 of its rows are summed at a time."""
    monkeypatch.setattr(loss_module, "HELD_BYTES", 0)
    monkeypatch.setattr(head_gradient, "BLOCK_BYTES", 7 * WIDTH * 8)
    monkeypatch.setitem(loss_module.LOGITS_PER_CHUNK, "cpu", 3 * VOCABULARY)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("loss", [PLAIN, *REGULARISED, CrossEntropy(0.2, 0.1, by_probability=True)], ids=str)
def test_the_gradient_of_a_large_head_is_the_same_by_blocks(
    transform: LogitTransform, loss: CrossEntropy, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = inputs(torch.float64)
    whole = gradients(by_linear(values, transform, loss) * 0.3, values)
    in_blocks(monkeypatch)
    for ours, theirs in zip(gradients(by_linear(values, transform, loss) * 0.3, values), whole, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-13 * float(theirs.abs().max())


def test_the_gradient_of_a_large_head_is_never_held_nor_whole_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    values = inputs(torch.bfloat16, 10)
    whole = gradients(by_linear(values, IDENTITY), values)
    in_blocks(monkeypatch)
    total: Any = by_linear(values, IDENTITY)
    held = [tensor for tensor in total.grad_fn.saved_tensors if tensor is not None and tensor.dtype == torch.float32]
    assert max(tensor.numel() for tensor in held) <= 10 * WIDTH
    with Largest(torch.float32) as seen:
        found = gradients(total, values)
    assert seen.elements <= max(3 * VOCABULARY, 2 * 7 * WIDTH) < VOCABULARY * WIDTH
    for ours, theirs in zip(found, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-9)


def test_the_head_of_a_frozen_or_unrecorded_pass_keeps_nothing() -> None:
    values = inputs(torch.float32, bias=False)
    targets, weights = targets_of(ROWS)
    frozen = values["weight"].detach()
    total, _ = linear_cross_entropy(values["hidden"], frozen, targets, weights)
    assert [gradient.shape for gradient in torch.autograd.grad(total, [values["hidden"]])] == [(ROWS, WIDTH)]
    with torch.no_grad():
        assert not linear_cross_entropy(values["hidden"], values["weight"], targets, weights)[0].requires_grad


# A loss of the user's own.

FOCAL = """
import torch.nn.functional as F

SIZES = []

def focal(logits, targets):
    SIZES.append(tuple(logits.shape))
    likelihood = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return -((1 - likelihood.exp()) ** 2) * likelihood

def mean(logits, targets):
    return F.cross_entropy(logits, targets)

def detached(logits, targets):
    return logits.detach().sum(-1)

def number(logits, targets):
    return 1.0

def counted(logits, targets):
    return targets

def lacking(logits):
    return logits

def failing(logits, targets):
    return logits.gather(1, targets[:, None].float())
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], TokenLoss]:
    """The loss of a target by the name of its function in a file."""
    file = tmp_path / "mine.py"
    file.write_text(FOCAL)

    def load(name: str) -> TokenLoss:
        loss = chosen_loss(ActorConfig(loss=f"{file}:{name}"))
        assert loss is not None
        return loss

    return load


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_a_loss_of_ones_own_is_exact_chunk_by_chunk(own: Callable[[str], TokenLoss], transform: LogitTransform) -> None:
    values = inputs(torch.float64)
    targets, weights = targets_of(ROWS)
    chances = transform(F.linear(values["hidden"], values["weight"], values["bias"])).softmax(-1)
    chosen = chances[torch.arange(ROWS), targets]
    wanted = (-((1 - chosen) ** 2) * chosen.log() * weights.double()).sum()
    got = by_head(values, transform, own("focal"))
    assert abs(float((got - wanted).detach())) <= 1e-13 * float(wanted.detach())
    for ours, theirs in zip(gradients(got, values), gradients(wanted, values), strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-13 * float(theirs.abs().max())


def test_it_never_sees_all_logits_nor_none(own: Callable[[str], TokenLoss], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(loss_module.LOGITS_PER_CHUNK, "cpu", 10 * VOCABULARY)
    focal = own("focal")
    for rows in (ROWS, 0):
        values = inputs(torch.float32, rows)
        gradients(by_head(values, IDENTITY, focal), values)
    module = import_file(tmp_path / "mine.py", "actor.loss")
    assert set(vars(module)["SIZES"]) == {(10, VOCABULARY), (7, VOCABULARY)}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mean", r"mean returned \[\] of torch.float32 for 37 targets"),
        ("detached", r"detached returned \[37\] of torch.float32 without a graph"),
        ("number", r"number returned float for"),
        ("counted", r"counted returned \[37\] of torch.int64"),
        ("lacking", r"lacking takes other arguments(?s:.*)called as lacking\(outputs, targets\)"),
        ("missing", r"no function or class 'missing'"),
        ("failing", r"failing failed: RuntimeError(?s:.*)mine.py:27"),
    ],
)
def test_a_loss_that_is_none_is_named(own: Callable[[str], TokenLoss], name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        by_head(inputs(torch.float32), IDENTITY, own(name))
    assert "actor.loss" in str(raised.value)


def test_nothing_is_chosen_where_nothing_is_asked_for() -> None:
    assert chosen_loss(ActorConfig()) is None
    assert chosen_loss(ActorConfig(label_smoothing=0.1)) == CrossEntropy(0.1)
    assert chosen_loss(ActorConfig(z_loss=1e-4)) == CrossEntropy(z=1e-4)


# The router's balance.


def router(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(tokens, 5, generator=generator).to(dtype).requires_grad_() for _ in range(3))


def test_balance_of_one_document_is_that_of_transformers() -> None:
    logits = router(17, torch.float32)
    ours = router_balance(logits, torch.tensor([0, 17], dtype=torch.int32), torch.ones(1), top_k=2)
    theirs = load_balancing_loss_func(logits, 5, 2)
    assert isinstance(theirs, torch.Tensor)
    torch.testing.assert_close(ours, theirs)
    for mine, their in zip(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits), strict=True):
        torch.testing.assert_close(mine, their)


def test_balance_of_packed_documents_is_the_sum_of_theirs_and_not_that_of_the_batch() -> None:
    logits = router(30)
    cuts = [0, 4, 5, 19, 30]
    packed = router_balance(logits, torch.tensor(cuts, dtype=torch.int32), torch.ones(4), top_k=2)
    alone = [
        router_balance(
            tuple(one[a:b] for one in logits), torch.tensor([0, b - a], dtype=torch.int32), torch.ones(1), top_k=2
        )
        for a, b in itertools.pairwise(cuts)
    ]
    torch.testing.assert_close(packed, torch.stack(alone).sum())
    whole = router_balance(logits, torch.tensor([0, 30], dtype=torch.int32), torch.ones(1), top_k=2)
    assert abs(packed.item() / 4 - whole.item()) > 0.05


def test_a_filler_adds_no_balance() -> None:
    logits = router(6)
    cuts = torch.tensor([0, 5, 6], dtype=torch.int32)
    with_filler = router_balance(logits, cuts, torch.tensor([1.0, 0.0]), top_k=2)
    alone = router_balance(tuple(one[:5] for one in logits), cuts[:2], torch.ones(1), top_k=2)
    torch.testing.assert_close(with_filler, alone)
