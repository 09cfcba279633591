"""Methods that call parts of their module, use its weights directly, or generate: all executors as in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen2ForCausalLM

import shardtune
from shardtune import NeedParallel, TrainEngine, nn
from shardtune.nn.functional import linear_log_probs
from tests.support.engine_modules import RATE, SAMPLES


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


def answer(row: list[int]) -> dict[str, Any]:
    """Each answer has a length of its own."""
    return {"max_new_tokens": 2 + row[0] % 5, "do_sample": False, "pad_token_id": 0}


def plain(model: Path, tensor: bool) -> tuple[list[float], torch.Tensor, list[list[int]]]:
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
    return losses, logits, [made.generate(torch.tensor([row]), **answer(row)).tolist()[0] for row in SAMPLES[:4]]


@pytest.mark.parametrize("executor", ["fsdp2", "fsdp1", "ddp", "tensor"])
def test_parts_and_weights_in_methods(model: Path, executor: Any) -> None:
    sizes = {"tensor_parallel_size": 2} if executor == "tensor" else {"data_parallel_size": 2}
    with shardtune.init_empty_weights():
        module = Scored.from_pretrained(model)
    engine: Any = TrainEngine(module, "fsdp2" if executor == "tensor" else executor).build(**sizes)
    engine.scores(NeedParallel(SAMPLES[:4]))
    losses = [sum(engine.step(NeedParallel(SAMPLES[:4]))) / 2 for _ in range(2)]
    scores = torch.cat(engine.scores(NeedParallel(SAMPLES[:4])))[:4]
    answers = engine.answers(NeedParallel(SAMPLES[:4]))
    engine.close()
    expected, logits, alike = plain(model, executor == "tensor")
    assert losses == pytest.approx(expected, abs=1e-12)
    assert (scores - logits).abs().max() < 1e-10
    assert answers == ([alike] * 2 if executor == "tensor" else [alike[:2], alike[2:]])
