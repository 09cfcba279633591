"""What a dry run refuses of a worker's own model, and a model that has layers of PEFT already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import shardtune
from shardtune import Adapter, Batch, FSDPSftWorker, LossSum, Sample
from shardtune.errors import ConfigError, ParallelError
from shardtune.run.dry_run import dry_run

LORA = peft.LoraConfig(r=1, target_modules=["0"])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1), nn.Flatten(0))


def injected() -> nn.Module:
    return peft.inject_adapter_in_model(LORA, net())


def wrapped() -> Any:
    return peft.get_peft_model(net(), LORA)  # pyright: ignore[reportArgumentType] (any module will do)


def within() -> nn.Module:
    return nn.Sequential(wrapped())


class Own(FSDPSftWorker):
    def model_provider_func(self) -> nn.Module:
        return net().double()

    def build_dataloader(self, data_paths: list[str], eval_dataset: bool = False) -> tuple[Any, dict[str, Any]]:
        return DataLoader([{"x": torch.ones(1).double()}] * 8, batch_size=2), {"num_samples": 8}  # pyright: ignore

    def get_train_model_output(self, batch: Any) -> torch.Tensor:
        return self.model(batch["x"]).square().mean()

    def get_eval_model_output(self, batch: Any) -> int:
        return 0


class Injecting(Own):
    def model_provider_func(self) -> nn.Module:
        return injected().double()


class Wrapping(Own):
    def model_provider_func(self) -> nn.Module:
        return wrapped().double()


class Adapted(Adapter):
    make: Callable[[], nn.Module] = staticmethod(wrapped)

    def build(self) -> nn.Module:
        return self.make()

    def encode(self, row: Mapping[str, float]) -> Sample:
        return Sample(fields={"x": np.array([row["x"]])})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        return LossSum(model(batch["x"]).square().sum(), len(batch.rows))


class AdaptedInjected(Adapted):
    make = staticmethod(injected)


class AdaptedWithin(Adapted):
    make = staticmethod(within)


def recipe(folder: Path, **actor: Any) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text('{"x": 1.0}\n' * 8)
    model = {"precision": "fp64", **actor.pop("model", {})}
    return {
        "actor": {"micro_batch_size": 2, "global_batch_size": 4, **actor, "model": model},
        "data": {
            "train_data_paths": str(folder / "rows.jsonl"),
            "cache_dir": str(folder / "cache"),
            "num_workers": 0,
        },
        "runner": {"device": "cpu", "max_steps": 1, "logger": {"log_path": str(folder)}},
    }


@pytest.mark.parametrize(
    ("axis", "says"),
    [
        ("sequence", "Own cannot share sequences among ranks"),
        ("tensor", "Sequential declares no plan for tensor parallelism"),
        ("expert", "Sequential declares no experts"),
    ],
)
def test_a_dry_run_refuses_the_layouts_that_ranks_refuse(tmp_path: Path, axis: str, says: str) -> None:
    values = recipe(tmp_path, worker=f"{__file__}:Own", parallel={axis: 2})
    values["runner"]["nproc_per_node"] = 2
    with pytest.raises(ParallelError, match=says):
        dry_run(values)


def test_a_dry_run_takes_the_layouts_that_ranks_take(tmp_path: Path) -> None:
    values = recipe(tmp_path, worker=f"{__file__}:Own")
    values["runner"]["nproc_per_node"] = 2
    assert "train/loss" in dry_run(values)


@pytest.mark.parametrize("is_lora", [False, True])
@pytest.mark.parametrize("name", ["Injecting", "Wrapping", "Adapted", "AdaptedInjected", "AdaptedWithin"])
def test_layers_of_peft_are_added_by_the_recipe_alone(tmp_path: Path, name: str, is_lora: bool) -> None:
    file = f"{__file__}:{name}"
    model = {"is_lora": is_lora, **({"lora": {"target_modules": ["0"]}} if is_lora else {})}
    values = (
        recipe(tmp_path, model={**model, "adapter": file})
        if name.startswith("Adapted")
        else recipe(tmp_path, worker=file, model=model)
    )
    with pytest.raises(ConfigError, match=r"has layers of PEFT already: .*0") as told:
        shardtune.train(values)
    assert "is_lora: true adds them" in str(told.value.remedy)
