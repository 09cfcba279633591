"""Methods that call parts of their module, use its weights directly, or generate: all executors as in plain PyTorch."""

from __future__ import annotations

import copy
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, Qwen2ForCausalLM

from shardtune import NeedParallel, TrainEngine, nn
from shardtune.engine.generation import has_own_code
from shardtune.errors import ModelError
from shardtune.nn.functional import linear_log_probs
from shardtune.parallel.torch_private.processes import collectives_issued
from tests.support.chosen import slow_except
from tests.support.engine_modules import RATE, SAMPLES, make


class Scored(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.Adam(self.parameters(), lr=RATE, weight_decay=0.1, foreach=True)

    def _last(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids).last_hidden_state

    def scores(self, input_ids: list[list[int]]) -> torch.Tensor:
        with torch.no_grad():
            return self.lm_head(self._last(torch.tensor(input_ids)))

    def step(self, input_ids: list[list[int]]) -> float:
        """The head as a module, as a matrix, and in chunks; a module inside a layer, in a backward pass of its own."""
        ids = torch.tensor(input_ids)
        hidden = self._last(ids)[:, :-1]
        logits = self.lm_head(hidden) + hidden @ self.lm_head.weight.T * 0.5
        in_chunks = linear_log_probs(hidden, self.lm_head.weight, ids[:, 1:])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) - 0.5 * in_chunks.mean()
        loss.backward()
        if not self.ranks.layout.tensor > 1:
            self.model.layers[0].mlp(hidden.detach()).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def answers(self, input_ids: list[list[int]]) -> list[list[int]]:
        return [self.generate(torch.tensor([row]), **answer(row)).tolist()[0] for row in input_ids]

    def batch(self, input_ids: list[list[int]], gathered: bool | None = None) -> tuple[list[list[int]], int]:
        """Answers of a batch that end at different places; and how many collectives further tokens take.

        Of the first call the names are compared too.
        """
        self._rank_context().weights.whole.gather_to_generate = gathered
        counts, found = [], []
        for tokens in (1, 2, BATCH["max_new_tokens"]):
            found = self.generate(torch.tensor(input_ids), **{**BATCH, "max_new_tokens": tokens}).tolist()
            counts.append(collectives_issued())
        return found, (counts[2] - counts[1]) - (counts[1] - counts[0])


BATCH: dict[str, Any] = {
    "max_new_tokens": 8,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": [28, 32],
}


def ended(tokens: list[int]) -> list[int]:
    """Without padding after the end, which is as long as the longest answer of a rank."""
    return [token for place, token in enumerate(tokens) if place < 12 or token]


def answer(row: list[int]) -> dict[str, Any]:
    """Each answer has a length of its own."""
    return {"max_new_tokens": 2 + row[0] % 5, "do_sample": False, "pad_token_id": 0}


def plain(model: Path, tensor: bool) -> tuple[list[float], torch.Tensor, list[list[int]], list[list[int]]]:
    made: Any = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float64).train()
    optimizer = torch.optim.Adam(made.parameters(), lr=RATE, weight_decay=0.1)
    losses = []
    ids = torch.tensor(SAMPLES[:4])
    for _ in range(2):
        hidden = made.model(ids).last_hidden_state[:, :-1]
        logits = made.lm_head(hidden).flatten(0, 1)
        loss = F.cross_entropy(logits * 1.5, ids[:, 1:].flatten()) + 0.5 * F.cross_entropy(logits, ids[:, 1:].flatten())
        loss.backward()
        if not tensor:
            made.model.layers[0].mlp(hidden.detach()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        logits = made(ids).logits
    answers = [made.generate(torch.tensor([row]), **answer(row)).tolist()[0] for row in SAMPLES[:4]]
    return losses, logits, answers, [ended(row) for row in made.generate(torch.tensor(SAMPLES), **BATCH).tolist()]


def built(module: Any, executor: Any, ranks: TrainEngine) -> TrainEngine:
    sizes = {"tensor_parallel_size": 2} if executor == "tensor" else {}
    engine = TrainEngine(module, "fsdp2" if executor == "tensor" else executor)
    return engine.build(colocate_with=ranks, take_turns=False, **sizes)


@pytest.mark.parametrize("executor", slow_except(["fsdp2", "fsdp1", "ddp", "tensor"], "fsdp2", "tensor"))
def test_parts_and_weights_in_methods(model: Path, two_ranks: TrainEngine, executor: Any) -> None:
    engine: Any = built(make(model, Scored), executor, two_ranks)
    engine.scores(NeedParallel(SAMPLES[:4]))
    losses = [sum(engine.step(NeedParallel(SAMPLES[:4]))) / 2 for _ in range(2)]
    scores = torch.cat(engine.scores(NeedParallel(SAMPLES[:4])))[:4]
    answers = engine.answers(NeedParallel(SAMPLES[:4]))
    batches = {gathered: engine.batch(NeedParallel(SAMPLES), gathered) for gathered in (True, False)}
    fewer = engine.batch(NeedParallel(SAMPLES[:1]))
    engine.close()
    expected, logits, alike, batch = plain(model, executor == "tensor")
    assert losses == pytest.approx(expected, abs=1e-12)
    assert (scores - logits).abs().max() < 1e-10
    assert answers == ([alike] * 2 if executor == "tensor" else [alike[:2], alike[2:]])
    for parts in (*batches.values(), fewer):
        found = [ended(row) for rows, _ in [part for part in parts if part is not None] for row in rows]
        wanted = batch[:1] if parts is fewer else batch
        assert found == (wanted * 2 if executor == "tensor" else wanted)
    assert len({len(row) for row in batch}) > 1
    # Weights are gathered once for all tokens, and not for each.
    gathered, each = ([more for _, more in parts] for parts in batches.values())
    assert (gathered == [0, 0]) == (executor != "tensor")
    assert min(each) > 0


class Dropping(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """Forwards whose outputs a backward pass does not come by."""

    def on_weights_materialized(self) -> None:
        """Trained."""

    def norms(self, input_ids: list[list[int]]) -> list[float]:
        ids, found = torch.tensor(input_ids), []
        for _ in range(2):
            reference = self(ids).logits.detach()
            logits = self(ids).logits
            (logits - reference + 1).square().mean().backward()
            self(ids).logits.float().logsumexp(-1).mean().backward()
            found.append(self.clip_grad_norm_(100.0))
        return found


def test_forwards_without_a_backward_pass_take_no_gradients(model: Path, two_ranks: TrainEngine) -> None:
    found = []
    for executor in ("fsdp2", "fsdp1"):
        engine: Any = TrainEngine(make(model, Dropping), executor, precision="bf16")
        with engine.build(colocate_with=two_ranks, take_turns=False):
            found.append(engine.norms(NeedParallel(SAMPLES[:4]))[0])
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert found[0][1] == pytest.approx(2 * found[0][0], rel=1e-2)


class Printing(LogitsProcessor):
    """A user's part of generating, with a printed device."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.zeros(1, device="cuda")


class Replaced(Scored):
    @wraps(Qwen2ForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        torch.zeros(1, device="cuda")
        return super().forward(*args, **kwargs)


class Processed(Scored):
    def processed(self, input_ids: list[list[int]]) -> list[list[int]]:
        return self.generate(torch.tensor(input_ids), **BATCH, logits_processor=[Printing()]).tolist()


@pytest.mark.lengthy
def test_a_printed_cuda_in_what_generates(model: Path) -> None:
    """A user's code gets the engine's device; where there is none, no mode sees the operations."""
    rows = SAMPLES[:2]
    engines: list[Any] = [TrainEngine(make(model, kind)).build() for kind in (Scored, Processed, Replaced)]
    wanted = engines[0].batch(rows)[0][0]
    assert engines[1].processed(rows)[0] == wanted
    assert engines[2].batch(rows)[0][0] == wanted
    assert not has_own_code(make(model, Processed))
    assert has_own_code(make(model, Replaced))


# -- A module of whole models ------------------------------------------------------------------------------------------


class Value(torch.nn.Module):
    """A head over a model that is also a part by itself."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = torch.nn.Linear(32, 1).double()

    def forward(self, ids: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
        return {"value": self.head(self.body(ids).last_hidden_state) * scale}


class Net(torch.nn.Module):
    """Has a scalar, and a method of its own that uses weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 4).double()
        self.scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first.weight * self.scale).square().mean()


class Parts:
    """Steps that call parts at several depths, twice before an update; in plain PyTorch and on ranks."""

    def _make(self: Any) -> None:
        sizes = {
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        }
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, **sizes)
        self.policy = LlamaForCausalLM(config).double()
        self.ref = copy.deepcopy(self.policy).requires_grad_(False)
        self.value = Value(self.policy.model)
        self.nets = torch.nn.ModuleDict({"x": Net(), "y": torch.nn.ModuleDict({"z": Net()})})
        self.listed = torch.nn.ModuleList([Net(), Net()])
        self.recurrent = torch.nn.GRU(4, 4, batch_first=True).double()

    def _optimize(self: Any) -> None:
        self.optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def step(self: Any, rows: list[list[int]], decay: float = 0.0) -> float:
        parameters = [p for p in self.parameters() if p.requires_grad]
        for number, ids in enumerate(torch.tensor(rows).chunk(2)):
            out = self.policy(ids, output_hidden_states=True)
            with torch.no_grad():
                expected = self.ref(ids).logits + self.value(ids, scale=1.0)["value"]
                x = self.nets["x"](expected[..., :4])
            loss = (out.logits - expected).square().mean() + self.value(ids, scale=2.0)["value"].square().mean()
            hidden = self.nets["y"]["z"](x) + self.listed[1](self.listed[0](x)) + self.nets["y"]["z"].first(x)
            loss = loss + hidden.square().mean() + self.nets["x"].energy(x) + self.recurrent(x)[0].square().mean()
            inner = self.policy.model.norm(self.policy.get_input_embeddings()(ids))
            for layer in self.policy.model.layers:
                inner = layer.mlp(inner) + layer.self_attn.q_proj(out.hidden_states[1])
            late = [self.policy.model.norm.weight, self.policy.model.layers[1].mlp.up_proj.weight]
            for weight in late:
                weight.requires_grad_(number == 0)  # frozen after the second forward
            (loss + inner.square().mean()).backward()
            for weight in late:
                weight.requires_grad_()
        for parameter in (p for p in parameters if decay and p.grad is not None):
            parameter.grad.add_(parameter, alpha=decay)  # with gradients enabled, as in a method
        norm = self.clip_grad_norm_(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def answers(self: Any, rows: list[list[int]]) -> list[list[int]]:
        return [self.policy.generate(torch.tensor([row]), **answer(row)).tolist()[0] for row in rows]


class OnRanks(Parts, nn.Fsdp2TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self._make()

    def on_weights_materialized(self) -> None:
        self._optimize()


class InOneProcess(Parts, torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._make()
        self._optimize()

    def clip_grad_norm_(self, norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.parameters(), norm)


@pytest.mark.parametrize("executor", slow_except(["fsdp2", "fsdp1", "ddp", "tensor"], "fsdp2", "tensor"))
def test_parts_of_a_module_of_whole_models(two_ranks: TrainEngine, executor: Any) -> None:
    by_step = SAMPLES[:4]
    rows = by_step if executor == "tensor" else [by_step[place] for place in (0, 2, 1, 3)]  # two ranks, halves of each
    decay = 0.0 if executor == "fsdp1" else 0.01  # which refuses a part beside a whole weight
    expected = InOneProcess()
    norms = [expected.step(by_step, decay) for _ in range(2)]
    weights = dict(expected.named_parameters())
    with built(OnRanks(), executor, two_ranks) as engine:
        assert [engine.step(NeedParallel(rows), decay)[0] for _ in range(2)] == pytest.approx(norms, abs=1e-11)
        found = {name: tensor for name, tensor in engine.named_tensors() if name in weights}
        answers = engine.answers(NeedParallel(rows))
    assert found.keys() == weights.keys()
    assert max(float((found[name] - weight.detach()).abs().max()) for name, weight in weights.items()) < 1e-10
    assert (answers[0] if executor == "tensor" else answers[0] + answers[1]) == expected.answers(rows)


class Returning(nn.Fsdp2TrainModule):
    """Returns weights, their values in Python, and what fsdp1 has only a part of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3).double() for _ in range(2))

    def on_weights_materialized(self) -> None:
        self.average = [parameter.detach().clone() for parameter in self.parameters()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.named_parameters())

    def values(self) -> tuple[Any, Any]:
        return self.layers[0].weight.tolist(), self.layers[1].bias.numpy(force=True)

    def norms(self) -> list[float]:
        with torch.no_grad():
            found = [parameter.norm().item() for parameter in self.parameters()]
            return found + [weight.norm().item() for weight in self.layers[1].parameters()]

    def state(self) -> dict[str, Any]:
        return self.state_dict()

    def kept(self) -> Any:
        return self.average[0]

    def gradient_norm(self) -> torch.Tensor:
        parameters = list(self.parameters())
        found = torch.autograd.grad(self(torch.ones(1, 3, dtype=torch.float64)).sum(), parameters)
        return sum(gradient.square().sum() for gradient in found)

    def gradients(self) -> Any:
        self(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        return [parameter.grad for parameter in self.parameters()]


@pytest.mark.parametrize("executor", ["fsdp2", "fsdp1"])
def test_what_a_method_returns_of_weights_is_whole_or_refused(two_ranks: TrainEngine, executor: Any) -> None:
    module = Returning()
    expected = {name: parameter.detach() for name, parameter in module.named_parameters()}
    with built(module, executor, two_ranks) as engine:
        for found in engine.weights():
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], weight) for name, weight in expected.items())
        for listed, array in engine.values():
            assert listed == expected["layers.0.weight"].tolist()
            assert array.tolist() == expected["layers.1.bias"].tolist()
        norms = [weight.norm().item() for weight in expected.values()]
        assert engine.norms() == [pytest.approx([*norms, *norms[2:]], rel=1e-12)] * 2
        assert engine.norms() == [pytest.approx([*norms, *norms[2:]], rel=1e-12)] * 2
        if executor == "fsdp1":
            for method, what in ((engine.kept, "what a method returns"), (engine.gradients, "what a method returns")):
                with pytest.raises(ModelError, match=f"{what} of a weight's detach"):
                    method()
            with pytest.raises(ModelError, match="sum of a weight's detach"):
                engine.gradient_norm()
            with pytest.raises(ModelError, match=r"or of state_dict\(\), is that of this rank's part"):
                engine.state()
            assert engine.sleep().sleep().memory() == [0, 0]
            assert torch.equal(engine.weights()[0]["layers.0.bias"], expected["layers.0.bias"])


# -- Ranks that use other parameters, or other units -------------------------------------------------------------------


class Chosen(torch.nn.Module):
    """Of two equal layers the rows choose one; the third is never used. A method uses `start` beside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.start = torch.nn.Parameter(torch.full((3,), 0.1, dtype=torch.float64))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3).double() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layers[int(x[0, 0] > 0)](x))


class Choosing:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](x).flatten()

    def _make(self: Any) -> None:
        torch.manual_seed(1)
        self.blocks = torch.nn.ModuleList([Chosen(), Chosen(), Chosen()])

    def _optimize(self: Any) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)

    def step(self: Any, x: torch.Tensor, micro_batches: int) -> float:
        for part in x.chunk(micro_batches):
            out = self(self.blocks[1](self.blocks[0](part + self.blocks[0].start)))
            out *= 0.5  # of a view, past the hooks of sharding
            (out.square().mean() / micro_batches).backward()
        norm = self.clip_grad_norm_(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def step_of_one_layer(self: Any, x: torch.Tensor, micro_batches: int) -> float:
        """Steps after it have momentum of layers that no rank uses now."""
        return self.step(x.abs(), micro_batches)


class ChoosingOnRanks(Choosing, OnRanks):
    @property
    def non_split_modules(self) -> set[type]:
        return {Chosen}

    def filled_by_a_whole_tensor(self) -> None:
        with torch.no_grad():
            self.blocks[0].start.copy_(torch.ones(3))

    def other_units(self, x: torch.Tensor) -> None:
        self.blocks[int(x[0, 0] > 0)](x).square().mean().backward()

    def of_other_weights(self, x: torch.Tensor) -> None:
        others = {name: weight * 2 for name, weight in self.blocks[0].named_parameters()}
        torch.func.functional_call(self.blocks[0], others, (x,))

    @torch.no_grad()
    def scores_of_other_units(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2 * int(x[0, 0] > 0)](x)


class ChoosingInOneProcess(Choosing, InOneProcess):
    pass


@pytest.mark.parametrize("executor", ["fsdp2", "fsdp1", "ddp"])
def test_ranks_may_use_other_parameters_and_no_other_units(two_ranks: TrainEngine, executor: Any) -> None:
    rows = torch.tensor([[1.0, 0.5, 0.2], [1.0, -0.5, 0.3], [-1.0, 0.1, 0.4], [-1.0, 0.6, 0.7]], dtype=torch.float64)
    expected = ChoosingInOneProcess()
    norms = [expected.step(rows, 4) for _ in range(2)]
    with built(ChoosingOnRanks(), executor, two_ranks) as engine:
        assert [engine.step(NeedParallel(rows), 2)[0] for _ in range(2)] == pytest.approx(norms, abs=1e-12)
        norm = expected.step_of_one_layer(rows, 4)
        assert engine.step_of_one_layer(NeedParallel(rows), 2)[0] == pytest.approx(norm, abs=1e-12)
        found = dict(engine.named_tensors())
        for name, weight in expected.named_parameters():
            assert torch.allclose(found[name], weight, atol=1e-12), name
        with pytest.raises(ModelError, match=r"where rank 0 used blocks.1, rank 1 used blocks.0"):
            engine.other_units(NeedParallel(rows))
        if executor != "fsdp1":
            with pytest.raises(ModelError, match=r"in the place of \w+ of Chosen, as torch\.func\.functional_call"):
                engine.of_other_weights(NeedParallel(rows))
        if executor != "ddp":  # where whole weights are on every rank
            with pytest.raises(ModelError, match=r"where rank 0 used blocks.2, rank 1 used blocks.0"):
                engine.scores_of_other_units(NeedParallel(rows))
        again = engine.step(NeedParallel(rows), 2)
        assert again[0] == again[1] == pytest.approx(expected.step(rows, 4), abs=1e-12)
        with pytest.raises(ModelError, match=r"copy_ changes this rank's part of a weight"):
            engine.filled_by_a_whole_tensor()
