"""Train modules of the tests, the model that they begin with, and the same steps in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

import shardtune
from shardtune import TrainEngine, nn

SAMPLES = [[(7 * row + 3 * place) % 64 for place in range(12)] for row in range(5)]
"""Five, which no number of ranks divides."""
RATE, CLIP, STEPS = 0.1, 0.5, 2


def save_model(folder: Path, heads: int = 4, key_value_heads: int = 2, width: int = 32) -> Path:
    """Two layers in fp64, with fewer heads of keys and values than of queries."""
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).double().save_pretrained(folder)
    return folder


class Trained(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """Steps of a user's, in each of the ways in which a mean over all samples can be said."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=RATE)

    def grow(self, factor: float) -> None:
        with torch.no_grad():
            self.lm_head.weight.mul_(factor)

    def step_by_mean(self, input_ids: list[list[int]]) -> float:
        ids = torch.tensor(input_ids, device="cuda")
        loss = F.cross_entropy(self(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss.item()

    def step_by_weights(self, input_ids: list[list[int]], weights: torch.Tensor) -> list[float]:
        ids = torch.tensor(input_ids, device="cuda")
        each = F.cross_entropy(self(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
        (each * weights).sum().backward()
        return weights.tolist()

    def step_by_token_weights(self, input_ids: torch.Tensor, weights: torch.Tensor) -> None:
        targets = self.next_tokens(input_ids, ignore_index=0)
        each = F.cross_entropy(self(input_ids).logits.transpose(1, 2), targets, reduction="none")
        (each * weights).sum().backward()

    def step_by_sums(self, input_ids: list[list[int]]) -> float:
        ids = torch.tensor(input_ids, device="cuda")
        targets = self.next_tokens(ids)
        total = F.cross_entropy(self(ids).logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
        loss = self.mean_over_ranks(total, (targets >= 0).sum())
        loss.backward()
        return loss.item()

    def padded_step(self, rows: list[list[int]]) -> float:
        """Rows of several lengths: the mean over all of their targets."""
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            labels[number, : len(row)] = torch.tensor(row)
        loss = F.cross_entropy(self(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        return loss.item()

    def update(self) -> float:
        norm = self.clip_grad_norm_(CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def logits(self, input_ids: list[list[int]]) -> torch.Tensor:
        with torch.no_grad():
            return self(torch.tensor(input_ids, device="cuda")).logits

    def seen(self, *given: Any, **named: Any) -> tuple[Any, Any]:
        return given, named

    def where(self) -> tuple[int, int, str]:
        return self.ranks.rank, self.ranks.data_rank, torch.zeros(1, device="cuda").cuda().device.type


@dataclass(frozen=True)
class Course:
    """What steps led to: norms before clipping, and weights."""

    norms: list[float]
    weights: dict[str, torch.Tensor]


def plain(model: Path, rows: list[list[int]] = SAMPLES) -> Course:
    """The steps in one process of plain PyTorch, over all rows at once; the mean is over all targets."""
    made = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float64).train()
    optimizer = torch.optim.SGD(made.parameters(), lr=RATE)
    norms = []
    for _ in range(STEPS):
        total = sum(len(row) - 1 for row in rows)
        for row in rows:
            ids = torch.tensor([row])
            loss = F.cross_entropy(made(ids).logits[0, :-1], ids[0, 1:], reduction="sum")
            (loss / total).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(made.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return Course(norms, {name: tensor.detach() for name, tensor in made.state_dict().items()})


def steps(engine: TrainEngine, method: str, data: Any) -> Course:
    """The same by an engine."""
    norms = []
    for _ in range(STEPS):
        getattr(engine, method)(data)
        norms.append(engine.update()[0])
    return Course(norms, dict(engine.named_tensors()))


def apart(one: Course, other: Course) -> float:
    """The largest difference."""
    assert one.weights.keys() == other.weights.keys()
    weights = [float((one.weights[name] - other.weights[name]).abs().max()) for name in one.weights]
    return max(*weights, *(abs(a - b) for a, b in zip(one.norms, other.norms, strict=True)))


def make(model: Path, kind: type = Trained) -> Any:
    """A module without weights."""
    with shardtune.init_empty_weights():
        return kind.from_pretrained(model)
