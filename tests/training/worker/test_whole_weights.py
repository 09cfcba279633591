"""Weights that code of a user reads, and hooks on their gradients: the same on any ranks, or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shardtune import Adapter, Batch, FSDPSftWorker, LossSum, Sample
from shardtune.config import load_recipe
from shardtune.errors import ModelError, ShardtuneError
from shardtune.parallel.gradient_hooks import refuse_gradient_hooks
from shardtune.training.worker.adapter_worker import SFTWorker
from tests.support.dist.ranks import run_ranks

SETTINGS: dict[str, Any] = {
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "fsdp_config": {"wrap": ["Linear"]},
    "optim": {"name": "SGD", "lr": 0.1, "weight_decay": 0.0},
}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()


class Worker(FSDPSftWorker):
    """Logs norms of the weights in training and in evaluation."""

    def model_provider_func(self) -> nn.Module:
        return net()

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        rows: Any = [{"x": row.double()} for row in torch.arange(32).reshape(8, 4) % 5]
        return DataLoader(rows, batch_size=2), {"num_samples": 8}

    def get_train_model_output(self, batch: Any) -> torch.Tensor:
        return self.model(batch["x"]).square().mean()

    def get_eval_model_output(self, batch: Any) -> Any:
        weight = self.model.get_parameter("1.weight")
        count = len(batch["x"])
        return {
            "square": (float(weight.pow(2).sum()) * count, count),
            "norm": (weight.norm().item() * count, count),
            "sign": (float(bool(weight.sum() > 0)) * count, count),
        }


def worker(kind: type[Worker] = Worker, **changes: Any) -> Worker:
    actor = {**SETTINGS, "worker": f"{__file__}:{kind.__name__}", "model": {"precision": "fp64"}, **changes}
    runner = {"device": "cpu", "max_steps": 2, "logger": {"log_path": "runs"}}
    data = {"train_data_paths": "made", "eval_data_paths": "made"}
    return kind(load_recipe({"actor": actor, "data": data, "runner": runner}))


def evaluated() -> dict[str, float]:
    made = worker()
    made.setup()
    return made.run_eval()


def expected() -> dict[str, float]:
    weight = net().get_parameter("1.weight").detach()
    return {"square": float(weight.pow(2).sum()), "norm": float(weight.norm()), "sign": float(weight.sum() > 0)}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.lengthy)])
def test_numbers_that_are_read_of_weights_are_those_of_whole_weights(ranks: int) -> None:
    for found in run_ranks(evaluated, ranks) if ranks > 1 else [evaluated()]:
        assert {name: found[f"eval/{name}"] for name in expected()} == pytest.approx(expected(), rel=1e-12)


class Measured(Adapter):
    """The same in an adapter's metrics; with `penalty` its loss reads a weight itself."""

    unit_classes = ("Linear",)

    def build(self) -> nn.Module:
        return net()

    def encode(self, row: Mapping[str, Any]) -> Sample:
        return Sample(fields={"x": np.asarray(row["x"], np.float64)})

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, LossSum]:
        total = model(batch["x"]).square().sum()
        if self.recipe.actor.model.model_type == "penalty":
            total = total + len(batch.rows) * model.get_parameter("1.weight").square().sum()
        return {"loss": LossSum(total, len(batch.rows))}

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float, float]]:
        weight, count = model.get_parameter("1.weight"), len(batch.rows)
        return {"square": (float(weight.pow(2).sum()) * count, count)}


def adapted(penalty: bool, backend: str = "fsdp") -> dict[str, float]:
    rows = [{"x": [float(number % 5), 1.0, 2.0, 3.0]} for number in range(8)]
    model = {"adapter": f"{__file__}:Measured", "precision": "fp64", "from_scratch": True}
    if penalty:
        model["model_type"] = "penalty"
    runner = {"device": "cpu", "max_steps": 2, "logger": {"log_path": "runs"}}
    recipe = load_recipe(
        {
            "actor": {**SETTINGS, "training_backend": backend, "model": model},
            "data": {"num_workers": 0},
            "runner": runner,
        },
        in_memory=("data.train_data_paths", "data.eval_data_paths"),
    )
    made = SFTWorker(recipe, train_data=rows, eval_data=rows, report=lambda text: None)
    made.setup()
    found = made.run_eval()
    made.run_training()
    return found


@pytest.mark.lengthy
def test_an_adapters_metrics_read_whole_weights() -> None:
    one = adapted(penalty=False)["eval/square"]
    for found in run_ranks(adapted, 2, False):
        assert found["eval/square"] == pytest.approx(one, rel=1e-12)


def refused(run: Callable[..., object], *args: object) -> str:
    with pytest.raises(ShardtuneError) as error:
        run(*args)
    return str(error.value)


def refusals() -> list[str]:
    return [refused(adapted, True, backend) for backend in ("fsdp", "fsdp1")]


@pytest.mark.lengthy
def test_a_loss_that_reads_a_part_of_a_weight_is_refused() -> None:
    for sharded, flat in run_ranks(refusals, 2):
        assert sharded.startswith("the loss reads a parameter itself, of which each rank has a part")
        assert "a unit (actor.fsdp_config.wrap:" in sharded
        assert flat.startswith("the loss reads the parameter 1.weight itself, of which each rank has a part")


class Hooked(Worker):
    def model_provider_func(self) -> nn.Module:
        made = net()
        made.get_parameter("1.weight").register_hook(lambda grad: grad * 0)
        return made


class HookedLater(Worker):
    def setup(self, *given: Any, **named: Any) -> None:
        super().setup(*given, **named)
        self.model.get_parameter("1.weight").register_post_accumulate_grad_hook(lambda parameter: None)


def prepared(name: str) -> None:
    made = worker({"Hooked": Hooked, "HookedLater": HookedLater}[name])
    made.setup()
    refuse_gradient_hooks(made.weights.parameters.items(), made.ranks)


@pytest.mark.parametrize("name", ["Hooked", "HookedLater"])
@pytest.mark.lengthy
def test_hooks_on_gradients_of_parts_are_refused(name: str) -> None:
    prepared(name)  # one rank has whole parameters, whose hooks are called
    for message in run_ranks(refused, 2, prepared, name):
        assert message.startswith("a hook on the gradient of 1.weight")
        assert "the parameter is held in parts" in message


def test_hooks_on_gradients_of_a_model_without_values_are_refused() -> None:
    with torch.device("meta"):
        empty = net()
    empty.get_parameter("2.weight").register_hook(lambda grad: grad)
    with pytest.raises(ModelError, match=r"a hook on the gradient of 2\.weight .* the model is built without values"):
        refuse_gradient_hooks(empty.named_parameters(), worker().ranks)


class Container(Worker):
    def model_provider_func(self) -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(4, 1)}).double()


def contained() -> None:
    made = worker(Container, fsdp_config={})
    made.setup()


@pytest.mark.lengthy
def test_a_container_without_a_forward_is_refused() -> None:
    for message in run_ranks(refused, 2, contained):
        assert message.startswith("the model is a ModuleDict, which has no forward")
