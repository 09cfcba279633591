"""Weights from one engine to another, and from a directory: bitwise the same, whatever the layouts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import Qwen2ForCausalLM

import shardtune
from shardtune import NeedParallel, TrainEngine, nn
from shardtune.errors import CheckpointError, ModelError, ParallelError
from tests.support.engine_modules import SAMPLES, Trained, make, steps
from tests.support.peft_versions import adds_adapters


class Frozen(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    def logits(self, input_ids: list[list[int]]) -> torch.Tensor:
        return self(torch.tensor(input_ids)).logits


class Adapted(nn.LoraTrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.01)


class Renaming(nn.Fsdp2TrainModule):
    """Of a user's own, with names and values of its own in exports."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 5)
        self.register_buffer("count", torch.arange(4))
        self.scale = scale

    def preprocess_input_named_parameters(self, name: str, param: torch.Tensor) -> tuple[str, torch.Tensor]:
        return name.removeprefix("out."), param / self.scale if param.is_floating_point() else param

    def postprocess_output_named_parameters(self, name: str, param: Any, full_state_dict: Any) -> Any:
        whole = param.full_tensor()
        return f"out.{name}", whole * self.scale if whole.is_floating_point() else whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def adapted(model: Path, rank: int = 2) -> Any:
    with shardtune.init_empty_weights():
        module: Any = Adapted.from_pretrained(model)
        module.add_adapter(peft.LoraConfig(r=rank, target_modules=["q_proj", "down_proj"]))
    return module


def check(one: TrainEngine, other: TrainEngine, dtype: torch.dtype | None = None) -> None:
    wanted, found = dict(one.named_tensors(dtype)), dict(other.named_tensors())
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name].to(found[name].dtype), found[name]) for name in wanted)


@pytest.fixture(scope="module")
def two(model: Path) -> Iterator[TrainEngine]:
    with TrainEngine(make(model)).build(data_parallel_size=2) as engine:
        yield engine


@adds_adapters
def test_from_layout_to_layout(model: Path, two: TrainEngine):
    """Ranks of their own and shared ones, one and two, each way of sharding; the whole chain keeps every bit."""
    alone: Any = TrainEngine(make(model)).build()
    steps(alone, "step_by_mean", NeedParallel(SAMPLES))
    layouts: list[tuple[Any, dict[str, int]]] = [("fsdp1", {}), ("ddp", {}), ("fsdp2", {"tensor_parallel_size": 2})]
    built = [
        TrainEngine(make(model, Frozen), executor).build(colocate_with=two, take_turns=False, **sizes)
        for executor, sizes in layouts
    ]
    chain = [alone, two, *built, TrainEngine(make(model, Frozen)).build(colocate_with=two, take_turns=False)]
    for before, after in pairwise(chain):
        before.push_weights(after)
    check(alone, chain[-1])
    back: Any = TrainEngine(make(model, Frozen)).build()
    chain[-1].push_weights(back)
    check(alone, back)
    assert torch.equal(back.logits(SAMPLES)[0], alone.logits(SAMPLES)[0])
    two.push_weights(chain[-1], torch.bfloat16)  # from part to part, without a whole tensor
    check(two, chain[-1], torch.bfloat16)
    for engine in (alone, built[0]):
        with pytest.raises(ParallelError, match="is given its own weights, which it has"):
            engine.push_weights(engine)
    adapter = TrainEngine(adapted(model)).build(colocate_with=two, take_turns=False)
    for engine in (built[0], back):
        adapter.push_weights(engine)
        check(adapter, engine)


@adds_adapters
@pytest.mark.lengthy
def test_an_adapter_is_merged_or_the_other_has_the_same(model: Path, tmp_path: Path):
    adapter, twin = TrainEngine(adapted(model)).build(), TrainEngine(adapted(model)).build()
    plain = TrainEngine(make(model, Frozen)).build()
    with pytest.raises(ModelError, match="has a low-rank adapter, which would be added"):
        plain.push_weights(twin)
    with pytest.raises(ModelError, match="different adapters"):
        adapter.push_weights(TrainEngine(adapted(model, 3)).build())
    adapter.push_weights(plain, torch.bfloat16)
    check(adapter, plain, torch.bfloat16)
    adapter.save_pretrained(tmp_path, torch.float64)
    fresh = TrainEngine(adapted(model)).build()
    fresh.load(tmp_path)
    check(adapter, fresh)
    with pytest.raises(CheckpointError, match="it holds an adapter, and the module has none"):
        plain.load(tmp_path)


def test_a_class_renames_and_changes_what_comes(model: Path):
    torch.manual_seed(2)
    one, other = TrainEngine(Renaming(2.0)).build(), TrainEngine(Renaming(4.0)).build()
    one.push_weights(other)
    check(one, other)
    with pytest.raises(ModelError, match="the weights do not fit Frozen"):
        TrainEngine(torch_only()).build().push_weights(TrainEngine(make(model, Frozen)).build())


class Plain(nn.Fsdp2TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def torch_only() -> Plain:
    return Plain()


def test_load_takes_a_saved_directory(model: Path, two: TrainEngine, tmp_path: Path):
    trained: Any = TrainEngine(make(model)).build()
    steps(trained, "step_by_mean", NeedParallel(SAMPLES))
    trained.save_pretrained(tmp_path / "model", torch.float64)
    for executor in ("fsdp1", "fsdp2"):
        engine = TrainEngine(make(model, Trained), executor).build(colocate_with=two, take_turns=False)
        engine.load(tmp_path / "model")
        check(trained, engine)
    one, other = TrainEngine(Plain()).build(), TrainEngine(Plain()).build()
    one.save_pretrained(tmp_path / "plain")
    other.load(tmp_path / "plain")
    check(one, other)
