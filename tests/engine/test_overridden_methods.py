"""Whatever public method of a class of `shardtune.nn` a user overrides, it is called, with the documented arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import Qwen2ForCausalLM

import shardtune
from shardtune import NeedParallel, TrainEngine, nn
from tests.support.engine_modules import SAMPLES, make

CLASSES = (
    nn.BaseTrainModule,
    nn.BaseHuggingFaceTrainModule,
    nn.Fsdp2TrainModule,
    nn.HuggingFaceFsdp2TrainModule,
    nn.LoraTrainModule,
)
PUBLIC = {name for kind in CLASSES for name in vars(kind) if not name.startswith("_")}
Calls = list[tuple[str, tuple[Any, ...]]]
"""What was called, and its arguments."""


def recording(kind: type, calls: Calls, names: set[str]) -> type:
    """A class derived from `kind` that overrides these public names, notes each call and does what `kind` does."""

    def overriding(name: str, own: object) -> object:
        if isinstance(own, property):
            return property(lambda self: (calls.append((name, ())), getattr(super(made, self), name))[1])

        def method(self: Any, *args: Any) -> Any:
            calls.append((name, args))
            return getattr(super(made, self), name)(*args)

        def of_class(cls: Any, *args: Any) -> Any:
            calls.append((name, args))
            return getattr(super(made, cls), name)(*args)

        return classmethod(of_class) if isinstance(own, classmethod) else method

    found = {name: next(vars(base)[name] for base in kind.__mro__ if name in vars(base)) for name in names}
    made = type(f"Recording{kind.__name__}", (kind,), {name: overriding(name, own) for name, own in found.items()})
    return made


class Model(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def step(self, rows: list[list[int]]) -> float:
        ids = torch.tensor(rows, device=self.device)
        targets = self.next_tokens(ids)
        total = torch.nn.functional.cross_entropy(
            self(ids).logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100
        )
        self.mean_over_ranks(self.sum_over_sequence(total) / self.ranks.world_size, (targets >= 0).sum()).backward()
        self.clip_grad_norm_(1.0)
        self.optimizer.step()
        return total.item()


class Adapted(nn.LoraTrainModule, Qwen2ForCausalLM):
    on_weights_materialized, step = Model.on_weights_materialized, Model.step


class Plain(nn.Fsdp2TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])

    def materialization_source(self) -> dict[str, torch.Tensor]:
        return {name: torch.full(p.shape, 0.5) for name, p in self.named_parameters()}

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))

    def step(self, rows: list[list[float]]) -> float:
        x = torch.tensor(rows, device=self.device)
        loss = self.mean_over_ranks(
            self.sum_over_sequence(self(x).sum()) / self.ranks.world_size, self.next_tokens(x).numel()
        )
        loss.backward()
        self.clip_grad_norm_(1.0)
        self.optimizer.step()
        return loss.item()


def run(engine: TrainEngine, data: object, folder: Path) -> None:
    """All that an engine does with a module."""
    engine.step(NeedParallel(data))
    engine.save(folder / "state")
    engine.load(folder / "state")
    list(engine.named_tensors())
    engine.save_pretrained(folder / "directory")
    engine.close()


def check_tensor_hooks(calls: Calls, first: str, prefix: str = "") -> None:
    """The arguments of the hooks that get tensors: names and forms first, then values, of the source and of the
    module."""
    taken = [args for name, args in calls if name == "preprocess_input_named_parameters"]
    names, tensors = zip(*taken, strict=True)
    assert first in names
    assert tensors[0].is_meta
    given = [args for name, args in calls if name == "postprocess_output_named_parameters"]
    assert given
    for name, tensor, full in given:
        assert name.startswith(prefix)
        assert isinstance(tensor, DTensor) or callable(tensor.full_tensor)
        assert isinstance(full, Mapping)
        assert full[name] is tensor


NOT_OF_PLAIN = {"from_pretrained", "is_custom_code"}


@pytest.mark.lengthy
@pytest.mark.parametrize("executor", ["fsdp2", "fsdp1", "ddp"])
def test_all_of_a_transformers_model(model: Path, tmp_path: Path, executor: Any):
    calls: Calls = []
    run(TrainEngine(make(model, recording(Model, calls, PUBLIC)), executor).build(), SAMPLES, tmp_path)
    assert {name for name, _ in calls} == PUBLIC
    check_tensor_hooks(calls, "model.layers.0.mlp.up_proj.weight")
    assert ("materialization_source", ()) in calls
    assert [args for name, args in calls if name == "clip_grad_norm_"] == [(1.0,)]


@pytest.mark.lengthy
def test_all_of_an_adapted_model(model: Path, tmp_path: Path):
    calls: Calls = []
    kind = recording(Adapted, calls, PUBLIC)
    with shardtune.init_empty_weights():
        wrapped = peft.get_peft_model(make(model, kind), peft.LoraConfig(r=2, target_modules=["up_proj"]))
    run(TrainEngine(wrapped).build(), SAMPLES, tmp_path)
    assert {name for name, _ in calls} == PUBLIC
    check_tensor_hooks(calls, "model.layers.0.mlp.up_proj.weight", "base_model.model.")


def test_all_of_a_plain_module(tmp_path: Path):
    calls: Calls = []
    with shardtune.init_empty_weights():
        module = recording(Plain, calls, PUBLIC - NOT_OF_PLAIN)()
    run(TrainEngine(module).build(), [[1.0, 2.0], [3.0, 4.0]], tmp_path)
    assert {name for name, _ in calls} == PUBLIC - NOT_OF_PLAIN
    check_tensor_hooks(calls, "blocks.0.weight")


HOOKS = {*vars(nn.LoraTrainModule), "materialization_source", "non_split_modules", "tensor_plan"} & PUBLIC


@pytest.mark.lengthy
@pytest.mark.parametrize("name", sorted(HOOKS))
def test_each_alone(model: Path, tmp_path: Path, name: str):
    """One override does not depend on another."""
    calls: Calls = []
    run(TrainEngine(make(model, recording(Model, calls, {name}))).build(), SAMPLES, tmp_path)
    assert calls


class OnRanks(Model):
    """Records on each rank, where the caller cannot look."""

    called: list[str]

    def on_weights_materialized(self) -> None:
        super().on_weights_materialized()
        self._note("on_weights_materialized")

    def materialization_source(self) -> Any:
        self._note("materialization_source")
        return super().materialization_source()

    @property
    def non_split_modules(self) -> set[type[torch.nn.Module]]:
        self._note("non_split_modules")
        return super().non_split_modules

    @property
    def tensor_plan(self) -> Mapping[str, str]:
        self._note("tensor_plan")
        return super().tensor_plan

    def preprocess_input_named_parameters(self, name: str, param: torch.Tensor) -> tuple[str, torch.Tensor]:
        self._note("preprocess_input_named_parameters")
        return name, param + 1 if name == "model.norm.weight" else param

    def postprocess_output_named_parameters(self, name: str, param: Any, full_state_dict: Any) -> Any:
        self._note("postprocess_output_named_parameters")
        assert all(isinstance(tensor, DTensor) for tensor in full_state_dict.values())
        return name, param.full_tensor()

    def _note(self, name: str) -> None:
        vars(self).setdefault("called", []).append(name)

    def noted(self) -> list[str]:
        return sorted(set(self.called))


@pytest.mark.lengthy
@pytest.mark.parametrize("executor", ["fsdp2", "fsdp1"])
def test_hooks_on_two_ranks(model: Path, executor: Any):
    before = Qwen2ForCausalLM.from_pretrained(model).model.norm.weight
    with TrainEngine(make(model, OnRanks), executor).build(data_parallel_size=2) as engine:
        tensors = dict(engine.named_tensors())
        noted = engine.noted()
    assert torch.equal(tensors["model.norm.weight"], before + 1)
    assert noted == [[name for name in sorted(vars(OnRanks)) if name in PUBLIC]] * 2


# -- A tensor of the source may be changed in every way that torch has -------------------------------------------------

CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a new tensor": lambda tensor: tensor * 3,
    "in place": lambda tensor: tensor.mul_(3),
    "through a view": lambda tensor: (tensor[:].mul_(3), tensor)[1],
    "through data": lambda tensor: (tensor.data.mul_(3), tensor)[1],
    "only where there are values": lambda tensor: tensor if tensor.is_meta else tensor * 3,
}


@pytest.mark.parametrize("functions", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_the_input_hook_does_counts(change: str, functions: bool):
    class Changed(Plain):
        def materialization_source(self) -> Any:
            made = super().materialization_source()
            return {name: (lambda tensor=tensor: tensor) for name, tensor in made.items()} if functions else made

        def preprocess_input_named_parameters(self, name: str, param: torch.Tensor) -> tuple[str, torch.Tensor]:
            return name, CHANGES[change](param)

    with shardtune.init_empty_weights():
        module = Changed()
    tensors = dict(TrainEngine(module).build().named_tensors())
    assert all(torch.equal(tensor, torch.full_like(tensor, 1.5)) for tensor in tensors.values())
