"""Distillation: a small model learns from the predictions of a larger one that is frozen.

    python examples/engine/distillation.py            # one rank
    python examples/engine/distillation.py --ranks 2

Two engines share the same ranks. The teacher's class has no hooks, so it is frozen. Its predictions are few here and
travel by the caller; where they are many, give the student's class the teacher as a part of itself.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sums import ANSWER_TOKENS, Row, make_model, problems, solved
from transformers import Qwen2ForCausalLM

import shardtune
from shardtune import NeedParallel, TrainEngine, init_empty_weights, nn

ANSWER = slice(-ANSWER_TOKENS - 1, -1)
"""The positions that predict the answer."""


class Teacher(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """Frozen."""

    @torch.no_grad()
    def predict(self, rows: list[Row]) -> torch.Tensor:
        """Log probabilities of the answers' tokens, [rows, tokens, vocabulary]."""
        return self(torch.tensor(rows, device="cuda")).logits[:, ANSWER].log_softmax(-1)


class Student(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """Learns from log probabilities."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)

    def learn(self, rows: list[Row], wanted: torch.Tensor) -> float:
        """One step towards what the teacher predicts."""
        loss = self._divergence(rows, wanted)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def divergence(self, rows: list[Row], wanted: torch.Tensor) -> float:
        """How far the student is from the teacher, in nats per token."""
        return self._divergence(rows, wanted).item()

    def _divergence(self, rows: list[Row], wanted: torch.Tensor) -> torch.Tensor:
        wanted = wanted.to(self.device)
        found = self(torch.tensor(rows, device="cuda")).logits[:, ANSWER].log_softmax(-1)
        total = F.kl_div(found, wanted, reduction="sum", log_target=True)
        return self.mean_over_ranks(total, wanted.shape[0] * wanted.shape[1])


def predictions(teacher: TrainEngine, rows: list[Row]) -> torch.Tensor:
    """The teacher's, in the order of the rows."""
    return torch.cat([part for part in teacher.predict(NeedParallel(rows)) if part is not None])


def distil(teacher: TrainEngine, student: TrainEngine, steps: int = 60, batch: int = 128) -> tuple[float, float]:
    """The distance between the two on held-out rows, before and after."""
    practice, held_out = (solved(asked) for asked in problems())
    exam = NeedParallel(held_out), NeedParallel(predictions(teacher, held_out))
    before = student.divergence(*exam)[0]
    dice = random.Random(0)
    for _ in range(steps):
        rows = dice.choices(practice, k=batch)
        student.learn(NeedParallel(rows), NeedParallel(predictions(teacher, rows)))
    return before, student.divergence(*exam)[0]


def main() -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    shardtune.init()
    with tempfile.TemporaryDirectory() as folder:
        learned = make_model(Path(folder, "teacher"), width=64)
        blank = make_model(Path(folder, "student"), width=32, steps=0, seed=1)
        with init_empty_weights():
            large, small = Teacher.from_pretrained(learned), Student.from_pretrained(blank)
        teacher = TrainEngine(large).build(data_parallel_size=arguments.ranks)
        # Both are small: they stay in memory. Large ones take turns.
        student = TrainEngine(small).build(colocate_with=teacher, take_turns=False)
        before, after = distil(teacher, student, arguments.steps)
        student.close()
        teacher.close()
    print(f"the student is {before:.3f} nats per token from its teacher before, {after:.3f} after")
    return before, after


if __name__ == "__main__":
    main()
