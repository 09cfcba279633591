"""One optimizer step: what is divided by what, and what happens where a gradient is not finite."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from shardtune.batch import LossSum
from shardtune.batch.seeds import derive_seed, seed_generators
from shardtune.errors import ModelError
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights
from shardtune.training.step import MAX_TRIES, LossScale, check_weights, optimizer_step

ALONE = Ranks(0, 1, torch.device("cpu"))


@dataclass
class Micro:
    """A micro-batch for `Task`: rows of features and their targets."""

    x: torch.Tensor
    y: torch.Tensor

    @property
    def weights(self) -> dict[str, float]:
        return {"mse": float(len(self.x))}


@dataclass
class Task:
    """A linear model, its squared error as a sum, and all that was asked of it."""

    model: nn.Linear
    seen: list[Micro] = field(default_factory=list)
    draws: list[float] = field(default_factory=list)
    overflow_above: float = float("inf")

    def __call__(self, batch: Micro) -> dict[str, LossSum]:
        self.seen.append(batch)
        self.draws.append(float(torch.rand(())))
        total = ((self.model(batch.x) - batch.y) ** 2).sum()
        return {"mse": LossSum(_overflow(total, self.overflow_above), float(len(batch.x)))}


class _Overflow(torch.autograd.Function):
    """The identity, with a gradient that is infinite above a limit, as in fp16."""

    @staticmethod
    def forward(ctx, value, limit):
        ctx.limit = limit
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * (float("inf") if abs(float(gradient)) > ctx.limit else 1.0), None


def _overflow(total: torch.Tensor, limit: float) -> torch.Tensor:
    result = _Overflow.apply(total, limit)
    assert isinstance(result, torch.Tensor)
    return result


def task() -> Task:
    torch.manual_seed(0)
    return Task(nn.Linear(4, 2).double())


def rows(count: int, seed: int = 0) -> Micro:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return Micro(x, torch.randn(count, 2, generator=generator, dtype=torch.float64))


def take_step(made: Task, batches: list[Micro], *, clip: float | None = None, scale: LossScale | None = None, lr=0.1):
    weights = Weights(made.model, made.model, "fp64", ALONE)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=lr, weight_decay=0.1)
    denominators = {"mse": sum(batch.weights["mse"] for batch in batches)}
    result = optimizer_step(
        made, batches, denominators, weights, optimizer, ALONE, draws=(1, 2, 0), clip=clip, loss_scale=scale
    )
    return result, optimizer


def weights_of(made: Task) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in made.model.parameters()])


@pytest.mark.parametrize("clip", [None, 0.3, 1000.0])
def test_ragged_micro_batches_equal_one_big_batch_of_plain_torch(clip: float | None) -> None:
    made, plain = task(), task()
    batches = [rows(7, 1), rows(64, 2), rows(1, 3)]
    result, _ = take_step(made, batches, clip=clip)
    x, y = torch.cat([batch.x for batch in batches]), torch.cat([batch.y for batch in batches])
    loss = ((plain.model(x) - y) ** 2).sum() / len(x)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), clip or float("inf"))
    torch.optim.AdamW(plain.model.parameters(), lr=0.1, weight_decay=0.1).step()
    assert result.updated
    assert result.loss == pytest.approx(loss.item(), rel=1e-12)
    assert result.gradient_norm == pytest.approx(norm.item(), rel=1e-12)
    torch.testing.assert_close(weights_of(made), weights_of(plain), rtol=0, atol=1e-12)


def test_an_overflow_halves_the_scale_and_repeats_the_same_rows_with_the_same_draws() -> None:
    made, plain = task(), task()
    batches = [rows(3, 1), rows(5, 2)]
    scale = LossScale(value=2.0**10)
    made.overflow_above = 2.0**7 / 8  # the gradient that comes in is scale / denominator
    result, optimizer = take_step(made, batches, scale=scale)
    assert (result.scale, scale.value, scale.quiet) == (2.0**7, 2.0**9, 1)  # the next steps may not underflow
    assert made.seen == batches * 4
    assert made.draws == made.draws[:2] * 4
    wanted, _ = take_step(plain, batches)
    assert result == wanted
    torch.testing.assert_close(weights_of(made), weights_of(plain), rtol=0, atol=1e-14)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_the_scale_doubles_after_a_quiet_stretch() -> None:
    scale = LossScale(value=8.0, growth_interval=2)
    made = task()
    for used, wanted in ((8.0, 8.0), (8.0, 16.0), (16.0, 16.0), (16.0, 32.0)):
        result, _ = take_step(made, [rows(2)], scale=scale)
        assert (result.scale, scale.value) == (used, wanted)
    scale.adjust(overflowed=True)
    assert (scale.value, scale.quiet) == (16.0, 1)


def test_a_gradient_that_is_not_finite_at_any_scale_moves_neither_weights_nor_the_scale() -> None:
    made = task()
    made.overflow_above, before, scale = 0.0, weights_of(made), LossScale(quiet=7)
    result, optimizer = take_step(made, [rows(2)], scale=scale)
    assert (result.updated, result.anomaly) == (False, "nonfinite")
    assert result.problem == "the gradient was not finite at any loss scale of fp16"
    assert scale == LossScale(quiet=7)
    assert torch.equal(weights_of(made), before)
    assert not optimizer.state
    assert len(made.seen) == MAX_TRIES


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_moves_nothing(bad: float) -> None:
    made = task()
    before = weights_of(made).clone()
    poisoned = rows(3)
    poisoned.x[1, 2] = bad
    result, optimizer = take_step(made, [rows(2), poisoned])
    assert not result.updated
    assert result.problem == "the gradient was not finite"
    assert torch.equal(weights_of(made), before)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in made.model.parameters())


def test_a_step_that_is_judged_a_spike_moves_nothing_not_even_running_statistics() -> None:
    made = task()
    made.model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double()  # pyright: ignore[reportAttributeAccessIssue]
    weights = Weights(made.model, made.model, "fp64", ALONE)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=0.1, weight_decay=0.1)
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    asked: list[tuple[float, float, float]] = []

    def judge(*values: float) -> str:
        asked.append(values)  # pyright: ignore[reportArgumentType]
        return "a spike"

    batches = [rows(3, 1), rows(5, 2)]
    result = optimizer_step(
        made, batches, {"mse": 8.0}, weights, optimizer, ALONE, draws=(1, 2, 0), clip=None, judge=judge
    )
    assert (result.updated, result.anomaly, result.problem) == (False, "spike", "a spike")
    assert asked == [(result.loss, result.gradient_norm, 8.0)]
    assert not optimizer.state
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.model.state_dict().items())


def test_a_loss_that_no_parameter_has_a_part_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with sharded weights whose gradient FSDP does not reduce."""
    made = task()
    monkeypatch.setattr(made.model, "forward", lambda x: torch.zeros(len(x), 1, requires_grad=True))
    with pytest.raises(ModelError, match="no gradient for any trained parameter"):
        take_step(made, [rows(4)])


def test_a_step_without_a_target_moves_nothing() -> None:
    made = task()
    before = weights_of(made).clone()
    result, optimizer = take_step(made, [rows(0)])
    assert (result.updated, result.loss, result.gradient_norm) == (False, 0.0, 0.0)
    assert result.problem == "no row has a target"
    assert torch.equal(weights_of(made), before)
    assert not optimizer.state


def test_a_micro_batch_without_a_target_changes_nothing() -> None:
    made, plain = task(), task()
    result, _ = take_step(made, [rows(4), rows(0)])
    wanted, _ = take_step(plain, [rows(4)])
    assert result == wanted
    assert torch.equal(weights_of(made), weights_of(plain))


def test_no_gradient_is_left_over() -> None:
    made = task()
    take_step(made, [rows(4)])
    assert all(parameter.grad is None for parameter in made.model.parameters())


def test_a_loss_with_another_weight_is_refused() -> None:
    one = torch.zeros(())
    check_weights({"ce": LossSum(one, 3.0)}, {"ce": 3.0})
    with pytest.raises(ModelError, match=r"reports weight 4.0, its rows have 3.0"):
        check_weights({"ce": LossSum(one, 4.0)}, {"ce": 3.0})
    with pytest.raises(ModelError, match=r"terms \['ce', 'kl'\], the rows were given weights for \['ce'\]"):
        check_weights({"ce": LossSum(one, 3.0), "kl": LossSum(one, 3.0)}, {"ce": 3.0})
    with pytest.raises(ModelError, match="is the sum over none of them, with weight 0"):
        check_weights({}, {"ce": 3.0})


def test_draws_are_a_function_of_where_they_stand() -> None:
    places = [(1, 0, 0, 0, "train"), (1, 1, 0, 0, "train"), (1, 0, 1, 0, "train"), (1, 0, 0, 1, "train")]
    drawn = []
    for place in [*places, *places]:
        seed_generators(derive_seed(*place))
        drawn.append(float(torch.rand(())))
    assert drawn[:4] == drawn[4:]
    assert len(set(drawn)) == 4
