"""Methods of an engine that differentiate a gradient: as in plain PyTorch, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap
from transformers import Qwen2ForCausalLM

import shardtune
from shardtune import NeedParallel, TrainEngine, nn
from shardtune.errors import ModelError
from tests.support.engine_modules import SAMPLES

ROWS = SAMPLES[:4]


class Steps:
    """Steps whose loss has a penalty on its gradient for the embeddings, in plain PyTorch and on ranks."""

    def learn(self: Any, rows: list[list[int]]) -> list[float]:
        return [self._step(rows), self._step(rows)]

    def _step(self: Any, rows: list[list[int]]) -> float:
        for ids in torch.tensor(rows).chunk(2):
            loss, states = self._loss(ids)
            (slope,) = torch.autograd.grad(loss, states, create_graph=True)
            with torch.no_grad():
                self(inputs_embeds=states)  # between the passes: what is gathered stays so
            ((loss + slope.square().sum()) / len(ids) / 20).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5) if self.plain else self.clip_grad_norm_(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def _loss(self: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.get_input_embeddings()(ids).detach().requires_grad_()
        logits = self(inputs_embeds=states).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"), states

    def differentiate(self: Any, rows: list[list[int]]) -> None:
        loss, states = self._loss(torch.tensor(rows))
        torch.autograd.grad(loss, states, create_graph=True)

    def fail(self: Any, rows: list[list[int]]) -> None:
        self.differentiate(rows)
        raise ValueError("on purpose")

    def grown(self: Any, rows: list[list[int]]) -> float:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1.1)
        return float(self._loss(torch.tensor(rows))[0].detach())

    def keep_graph(self: Any, rows: list[list[int]]) -> None:
        self._loss(torch.tensor(rows))[0].backward(create_graph=True)


class Learner(Steps, nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    plain = False

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)


class PlainLearner(Steps, Qwen2ForCausalLM):
    plain = True


def learner(model: Path) -> Any:
    with shardtune.init_empty_weights():
        return Learner.from_pretrained(model, attn_implementation="eager")


@pytest.mark.parametrize("executor", ["fsdp2", "ddp"])
def test_a_penalty_on_a_gradient_is_that_of_plain_pytorch(model: Path, two_ranks: TrainEngine, executor: Any) -> None:
    alone: Any = PlainLearner.from_pretrained(model, dtype=torch.float64, attn_implementation="eager").train()
    alone.optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    order = [ROWS[0], ROWS[2], ROWS[1], ROWS[3]]  # a rank has rows in their order, of which it takes one at a time
    wanted = alone.learn(order)
    with TrainEngine(learner(model), executor).build(colocate_with=two_ranks, take_turns=False) as engine:
        for found in engine.learn(NeedParallel(ROWS)):
            assert found == pytest.approx(wanted, rel=1e-11)
        tensors, expected = dict(engine.named_tensors()), alone.state_dict()
        assert max(float((tensors[name] - expected[name]).abs().max()) for name in tensors) < 1e-12


def test_weights_that_a_graph_without_a_pass_has_kept_are_not_those_of_the_next_call(
    model: Path, two_ranks: TrainEngine
) -> None:
    alone: Any = PlainLearner.from_pretrained(model, dtype=torch.float64, attn_implementation="eager").train()
    wanted = alone.grown(ROWS)
    with TrainEngine(learner(model)).build(colocate_with=two_ranks, take_turns=False) as engine:
        with pytest.raises(ValueError, match="on purpose"):
            engine.fail(ROWS)
        assert engine.grown(ROWS) == pytest.approx([wanted] * 2, rel=1e-12)


def test_a_graph_of_the_weights_gradients_is_refused(model: Path, two_ranks: TrainEngine) -> None:
    with TrainEngine(learner(model)).build(colocate_with=two_ranks, take_turns=False) as engine:
        with pytest.raises(ModelError, match="a gradient of weights, which ranks sum, has first derivatives only"):
            engine.keep_graph(ROWS)
        before = engine.learn(NeedParallel(ROWS))
        assert before[0] == before[1]  # and the engine goes on


def test_fsdp1_and_tensor_ranks_refuse_it(model: Path, two_ranks: TrainEngine) -> None:
    for executor, sizes in (("fsdp1", {}), ("fsdp2", {"tensor_parallel_size": 2})):
        made = TrainEngine(learner(model), executor).build(colocate_with=two_ranks, take_turns=False, **sizes)
        with made as engine, pytest.raises(ModelError, match=r"gradients of gradients need|has first derivatives only"):
            engine.differentiate(ROWS)


class Sloped(nn.Fsdp2TrainModule):
    """The slope of its output for each row, by transforms of `torch.func`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.net(rows)

    def each(self, rows: torch.Tensor) -> torch.Tensor:
        return vmap(lambda row: self(row[None])[0])(rows)

    def slopes(self, rows: torch.Tensor) -> torch.Tensor:
        return vmap(grad(lambda row: self(row[None]).square().sum()))(rows)

    def slopes_of_part(self, rows: torch.Tensor) -> torch.Tensor:
        return vmap(grad(lambda row: self.net(row[None]).square().sum()))(rows)


@pytest.mark.parametrize("executor", ["fsdp2", "ddp", "fsdp1"])
def test_transforms_of_torch_func_give_the_slopes_of_each_row(two_ranks: TrainEngine, executor: Any) -> None:
    module, rows = Sloped().double(), torch.arange(12, dtype=torch.float64).sin().view(4, 3)
    inputs = rows.clone().requires_grad_()
    (expected,) = torch.autograd.grad(module.net(inputs).square().sum(), inputs)
    with TrainEngine(module, executor).build(colocate_with=two_ranks, take_turns=False) as engine:
        torch.testing.assert_close(torch.cat(engine.each(NeedParallel(rows))), module.net(rows).detach())
        for slopes in (engine.slopes, engine.slopes_of_part):
            if executor == "fsdp1":
                with pytest.raises(ModelError, match=r"fsdp1 cannot gather weights while torch.func differentiates"):
                    slopes(NeedParallel(rows))
            else:
                torch.testing.assert_close(torch.cat(slopes(NeedParallel(rows))), expected)
