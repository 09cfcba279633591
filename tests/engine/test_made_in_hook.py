"""Parameters made in `on_weights_materialized`, recorded outputs and `torch.autograd.grad`: as in plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2ForCausalLM

import shardtune
from shardtune import NeedParallel, TrainEngine, nn
from shardtune.errors import ModelError
from tests.support.engine_modules import SAMPLES

ROWS = SAMPLES[:4]


class Steps:
    """Steps of a critic, in plain PyTorch and on ranks: two backward passes, then gradients by hand."""

    def both(self: Any, rows: list[list[int]]) -> list[float]:
        return [self._step(rows), self._by_hand(rows)]

    def _step(self: Any, rows: list[list[int]]) -> float:
        for ids in torch.tensor(rows).chunk(2):
            out = self(ids, output_hidden_states=True, output_attentions=True)
            loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss = loss + self.v_head(out.hidden_states[-1]).square().mean() + out.hidden_states[1].square().mean()
            if self.whole_attentions():
                loss = loss + out.attentions[0].square().mean()
            (loss / 2).backward()
        return self._update()

    def _by_hand(self: Any, rows: list[list[int]]) -> float:
        parameters, ids = list(self.parameters()), torch.tensor(rows)
        logits = self(ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss = loss + self.v_head(logits[..., :32]).square().mean() + self.lm_head.weight.square().sum() * 1e-3
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = grad
        return self._update()

    def _update(self: Any) -> float:
        norm = self.clip_grad_norm_(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def _head(self: Any) -> None:
        self.v_head = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        self.v_head.register_buffer("scale", torch.rand(3))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)


class Critic(Steps, nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self) -> None:
        torch.manual_seed(5 + self.ranks.rank)
        self._head()

    def whole_attentions(self) -> bool:
        return self.ranks.layout.tensor == 1  # tensor ranks have some heads each

    def late(self) -> None:
        self.other = torch.nn.Linear(2, 2)

    def late_and_trained(self) -> None:
        self.other = torch.nn.Linear(2, 2)
        self.optimizer.add_param_group({"params": [*self.other.parameters()]})
        raise LookupError("after that")

    def remove(self) -> None:
        del self.other
        self.optimizer.param_groups.pop()

    def too_late(self, rows: list[list[int]]) -> None:
        loss = self(torch.tensor(rows)).logits.mean()
        torch.autograd.grad(loss, list(self.parameters()))

    def other_optimizer(self) -> None:
        self.critics = [torch.nn.Linear(2, 3)]
        self.second = torch.optim.SGD([*self.parameters(), *self.critics[0].parameters()])

    def second_order(self, rows: list[list[int]]) -> None:
        parameters = list(self.parameters())
        torch.autograd.grad(self(torch.tensor(rows)).logits.mean(), parameters, create_graph=True)

    def penalty(self, rows: list[list[int]]) -> None:
        states = self.get_input_embeddings()(torch.tensor(rows)).detach().requires_grad_()
        loss = self(inputs_embeds=states).logits.square().mean()
        torch.autograd.grad(loss, states, create_graph=True)

    def once(self, rows: list[list[int]]) -> float:
        self.zero_grad()
        self(torch.tensor(rows)).logits.square().mean().backward()
        return self.clip_grad_norm_(1e9)

    def twice(self, rows: list[list[int]]) -> float:
        loss = self(torch.tensor(rows)).logits.square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return self.clip_grad_norm_(1e9)

    def buffer(self) -> torch.Tensor:
        return self.v_head.get_buffer("scale")


class PlainCritic(Steps, Qwen2ForCausalLM):
    def whole_attentions(self) -> bool:
        return True

    def clip_grad_norm_(self, norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.parameters(), norm)


class PlainTensorCritic(PlainCritic):
    def whole_attentions(self) -> bool:
        return False


def plain(model: Path, kind: type) -> tuple[list[float], dict[str, torch.Tensor]]:
    made: Any = kind.from_pretrained(model, dtype=torch.float64, attn_implementation="eager").train()
    torch.manual_seed(5)
    made._head()
    norms = made.both(ROWS)
    return norms, copy.deepcopy(made.state_dict())


def critic(model: Path) -> Any:
    with shardtune.init_empty_weights():
        return Critic.from_pretrained(model, attn_implementation="eager")


@pytest.mark.parametrize("executor", ["one", "fsdp2", "fsdp1", "ddp", "tensor"])
def test_a_head_made_in_the_hook_is_a_part_of_the_module(model: Path, two_ranks: TrainEngine, executor: str, tmp_path):
    sizes: dict[str, Any] = {"tensor_parallel_size": 2} if executor == "tensor" else {}
    sizes |= {} if executor == "one" else {"colocate_with": two_ranks, "take_turns": False}
    kind: Any = "fsdp2" if executor in ("one", "tensor") else executor
    wanted, weights = plain(model, PlainTensorCritic if executor == "tensor" else PlainCritic)
    with TrainEngine(critic(model), kind).build(**sizes) as engine:
        assert engine.both(NeedParallel(ROWS))[0] == pytest.approx(wanted, abs=1e-11)
        found = dict(engine.named_tensors())
        assert found.keys() == weights.keys()
        assert max(float((found[name] - weights[name]).abs().max()) for name in found) < 1e-10
        assert all(torch.equal(scale, weights["v_head.scale"]) for scale in engine.buffer())
        assert any("v_head.0.weight" in note for note in engine.notes) == (executor != "one")
        engine.save(tmp_path / "state")
        engine.sleep().wake()
        engine.save_pretrained(tmp_path / "saved")
        norms = engine.both(NeedParallel(ROWS))
    assert torch.equal(load_file(tmp_path / "saved" / "model.safetensors")["v_head.0.weight"], found["v_head.0.weight"])
    if executor != "tensor":
        return
    alone = TrainEngine(critic(model)).build()
    alone.load(tmp_path / "state")
    assert dict(alone.named_tensors()).keys() == found.keys()
    assert alone.both(NeedParallel(ROWS))[0][1] == pytest.approx(norms[0][1], rel=0.5)  # its loss has attentions too


def test_what_gradients_and_parameters_cannot_be_is_refused(model: Path, two_ranks: TrainEngine):
    with TrainEngine(critic(model)).build(colocate_with=two_ranks, take_turns=False) as engine:
        with pytest.raises(
            ModelError, match=r"gathered between a forward and its backward.*\n.*\n.*before the forward"
        ):
            engine.too_late(ROWS)
        with pytest.raises(ModelError, match="leave out create_graph"):
            engine.second_order(ROWS)
        with pytest.raises(ModelError, match=r"late has made the parameters other.weight, other.bias after"):
            engine.late()
        again = r"late has made the parameters other.weight, other.bias after .*, and the module still has them"
        with pytest.raises(ModelError, match=again):
            engine.whole_attentions()
    with pytest.raises(ModelError, match=r"self.second trains a tensor \[3, 2\] that is no parameter"):
        TrainEngine(critic(model)).build().other_optimizer()


def test_what_is_made_late_and_trained_is_refused_when_it_is_saved(model: Path, tmp_path: Path):
    engine = TrainEngine(critic(model)).build()
    with pytest.raises(LookupError, match="after that"):
        engine.late_and_trained()
    for read in (engine.save, engine.save_pretrained, engine.load, lambda _: list(engine.named_tensors())):
        with pytest.raises(ModelError, match=r"a method has made the parameters other.weight, other.bias after"):
            read(tmp_path / "state")
    engine.remove()
    engine.save(tmp_path / "state")


class Uneven(Critic):
    def on_weights_materialized(self) -> None:
        self.late = torch.nn.Linear(3, 2 + self.ranks.rank)


def test_ranks_that_make_different_parameters_are_refused(model: Path, two_ranks: TrainEngine):
    with shardtune.init_empty_weights():
        module = Uneven.from_pretrained(model)
    with pytest.raises(ModelError, match=r"rank 0 makes the parameters .*late.weight.*2, 3.*, rank 1 .*3, 3"):
        TrainEngine(module).build(colocate_with=two_ranks, take_turns=False)


class Averaging(nn.Fsdp2TrainModule):
    """Copies a part of itself: where it is not whole any more, or before."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.net, self.late = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), late
        if not late:
            self.ema = copy.deepcopy(self.net)

    def on_weights_materialized(self) -> None:
        if self.late:
            self.ema = copy.deepcopy(self.net)
        with torch.no_grad():
            for mine, other in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                mine.lerp_(other, 0.5)

    def difference(self, rows: torch.Tensor) -> float:
        return (self.ema(rows) - self.net(rows)).abs().max().item()


@pytest.mark.parametrize("executor", ["fsdp2", "fsdp1", "ddp"])
def test_a_copy_of_sharded_weights_is_refused(two_ranks: TrainEngine, executor: Any):
    with TrainEngine(Averaging(late=True)).build() as engine:
        assert engine.difference(torch.ones(2, 4)) == [0.0]
    with pytest.raises(ModelError, match=r"a module is copied before its weights are divided[\s\S]*in __init__"):
        TrainEngine(Averaging(late=True), executor).build(colocate_with=two_ranks, take_turns=False)
    with TrainEngine(Averaging(late=False), executor).build(colocate_with=two_ranks, take_turns=False) as engine:
        assert engine.difference(torch.ones(2, 4)) == [0.0, 0.0]


class Gained(nn.Fsdp2TrainModule):
    """Has a weight of ones and makes another, which is no copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)

    def on_weights_materialized(self) -> None:
        self.gain, self.two_gains = (torch.nn.Parameter(torch.ones(n)) for n in (4, 8))

    def sums(self, rows: torch.Tensor) -> float:
        return (self.norm(rows) * self.gain).sum().item() + self.two_gains.sum().item()


@pytest.mark.parametrize("executor", ["fsdp2", "fsdp1", "ddp"])
def test_a_parameter_of_ones_is_no_copy_of_another(two_ranks: TrainEngine, executor: Any):
    with TrainEngine(Gained(), executor).build(colocate_with=two_ranks, take_turns=False) as engine:
        assert engine.sums(torch.ones(2, 4)) == [8.0, 8.0]


class Replacing(Critic):
    def on_weights_materialized(self) -> None:
        self.lm_head = torch.nn.Linear(32, 64, bias=False).double()


def test_fsdp1_refuses_what_it_cannot_do(model: Path, two_ranks: TrainEngine):
    with TrainEngine(critic(model), "fsdp1").build(colocate_with=two_ranks, take_turns=False) as engine:
        with pytest.raises(ModelError, match=r"gradients of gradients need the module's weights"):
            engine.penalty(ROWS)
        with pytest.raises(ModelError, match=r"weights that have been freed: it is the second through one forward, or"):
            engine.twice(ROWS)
    with shardtune.init_empty_weights():
        module = Replacing.from_pretrained(model)
    with pytest.raises(ModelError, match=r"FSDP1 has joined lm_head.weight with other parameters"):
        TrainEngine(module, "fsdp1").build(colocate_with=two_ranks, take_turns=False)
    with TrainEngine(module).build(colocate_with=two_ranks, take_turns=False) as engine:
        assert dict(engine.named_tensors())["lm_head.weight"].shape == (64, 32)


class Routed(nn.HuggingFaceFsdp2TrainModule, MixtralForCausalLM):
    def balance(self, rows: list[list[int]]) -> float:
        return self(torch.tensor(rows), output_router_logits=True).aux_loss.item()


def test_a_routers_balance_loss_is_that_of_one_process(two_ranks: TrainEngine):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=64, num_hidden_layers=2, num_local_experts=4, **sizes)
    torch.manual_seed(0)
    module = Routed(config)
    wanted = module.balance(ROWS)
    with TrainEngine(module).build(colocate_with=two_ranks, take_turns=False) as engine:
        assert engine.balance(ROWS) == pytest.approx([wanted, wanted], abs=1e-6)
    assert wanted > 1.0


class Preferring(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """A loss that is no sum over tokens: of each sequence's log-probability."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def _each(self, ids: torch.Tensor) -> torch.Tensor:
        targets = self.next_tokens(ids)
        logps = -F.cross_entropy(self(ids).logits.transpose(1, 2), targets, reduction="none", ignore_index=-100)
        return -F.logsigmoid(self.sum_over_sequence(logps.sum(1)) / 10)

    def plainly(self, ids: torch.Tensor) -> float:
        return self._done(self._each(ids).mean())

    def by_mean(self, ids: torch.Tensor) -> float:
        each = self._each(ids)
        return self._done(self.mean_over_ranks(each.sum(), len(each)))

    def by_weights(self, ids: torch.Tensor, weights: torch.Tensor) -> float:
        weights = weights if weights.ndim == 1 else weights.sum(1)
        return self._done((self._each(ids) * weights).sum())

    def _done(self, loss: torch.Tensor) -> float:
        loss.backward()
        norm = self.clip_grad_norm_(1e9)
        self.optimizer.zero_grad()
        return norm


def test_sums_over_shared_sequences(model: Path, two_ranks: TrainEngine):
    with shardtune.init_empty_weights():
        module = Preferring.from_pretrained(model)
    data = NeedParallel(torch.tensor(SAMPLES[:3]), type="seq")
    wanted = TrainEngine(module).build().plainly(data)[0]
    for sizes in ({"sequence_parallel_size": 2}, {}):
        with TrainEngine(module).build(colocate_with=two_ranks, take_turns=False, **sizes) as engine:
            for method in ("plainly", "by_mean", "by_weights"):
                assert getattr(engine, method)(data)[0] == pytest.approx(wanted, abs=1e-11), method
