"""A user's own loop in half precision: what it does with gradients at the model's parameters counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from shardtune.config import load_recipe
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights
from shardtune.training.worker.reported import training_method
from tests.training.worker import test_base as own

Loop = Callable[[nn.Module, Weights, Callable[[], None]], None]


def halved(model: nn.Module, _: Weights, backward: Callable[[], None]) -> None:
    backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def replaced(model: nn.Module, weights: Weights, backward: Callable[[], None]) -> None:
    backward()
    weights.settle_gradients()
    backward()  # on top of what there is
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)


def made(model: nn.Module, _: Weights, backward: Callable[[], None]) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)


def cleared_by_model(model: nn.Module, _: Weights, backward: Callable[[], None]) -> None:
    backward()
    model.zero_grad()
    backward()


def cleared_by_optimizer(_: nn.Module, weights: Weights, backward: Callable[[], None]) -> None:
    backward()
    for parameter in weights.parameters.values():
        parameter.grad = None
    backward()


def twice(_: nn.Module, weights: Weights, backward: Callable[[], None]) -> None:
    backward()
    backward()


@pytest.mark.parametrize(
    ("loop", "factor"),
    [(halved, 0.5), (replaced, None), (made, None), (cleared_by_model, 1.0), (cleared_by_optimizer, 1.0), (twice, 2.0)],
)
def test_both_parameters_have_one_gradient(loop: Loop, factor: float | None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    weights = Weights(model, model, "bf16", Ranks(0, 1, torch.device("cpu")))
    inputs = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.bfloat16)

    def backward() -> None:
        model(inputs).sum().backward()

    with weights.showing_gradients():
        loop(model, weights, backward)
        weights.settle_gradients()
        found = weights.parameters["weight"].grad
        assert found is not None
        assert found.dtype == torch.float32
        assert found is model.weight.grad
        expected = torch.full((2, 3), 0.25) if factor is None else factor * inputs.float().expand(2, 3)
        assert torch.equal(found, expected)
    assert model.weight.grad is None
    assert weights.parameters["weight"].grad is found


class Clipping(own.Task):
    """Clips by torch's own function, clears by the model, and returns the norm that is left."""

    def run_training(self) -> dict[str, float]:
        self.model.zero_grad()
        self.get_train_model_output(next(iter(self.data_iter))).backward()
        before = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        left = self.clip_grad_norm_(10.0)
        self.optimizer.step()
        return {"before": float(before), "left": left}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_torchs_own_clipping_counts_in_every_precision(tmp_path: Path, precision: str) -> None:
    values = own.recipe(str(tmp_path)).to_dict()
    values["actor"]["model"]["precision"] = precision
    worker = Clipping(load_recipe(values))
    worker.setup()
    for _ in range(2):
        metrics = training_method(worker)()
        assert metrics["train/before"] > 0.02
        assert metrics["train/left"] == pytest.approx(0.01, rel=1e-3)
