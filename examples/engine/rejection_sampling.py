"""Rejection-sampling fine-tuning: a model answers, its right answers are kept, and it is trained on them.

    python examples/engine/rejection_sampling.py            # one rank
    python examples/engine/rejection_sampling.py --ranks 2

The three parts are methods of one class, and the engine runs each on all ranks. No answer but the model's own is ever
shown to it: its score on problems that it has not seen rises because it is trained on those of its answers that were
right.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sums import ANSWER_TOKENS, Row, is_right, make_model, problems
from transformers import Qwen2ForCausalLM

import shardtune
from shardtune import NeedParallel, TrainEngine, init_empty_weights, nn


class Learner(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """Answers prompts, and learns from rows that are given to it."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.0)

    @torch.no_grad()
    def answer(self, prompts: list[Row], seed: int) -> list[Row]:
        """An answer to each prompt, drawn at temperature 1."""
        torch.manual_seed(seed + self.ranks.data_rank)
        asked = torch.tensor(prompts, device="cuda")
        drawn = self.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=ANSWER_TOKENS,
            do_sample=True,
            top_k=0,
        )
        return [row[:ANSWER_TOKENS] for row in drawn[:, asked.shape[1] :].tolist()]

    def learn(self, rows: list[Row]) -> float:
        """One step on whole rows, of which the answer counts; the loss is the mean over the rows of all ranks."""
        ids = torch.tensor(rows, device="cuda")
        logits = self(ids).logits[:, -ANSWER_TOKENS - 1 : -1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, -ANSWER_TOKENS:].flatten())
        loss.backward()
        self.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def answers(engine: TrainEngine, prompts: list[Row], seed: int) -> list[Row]:
    """The answers of all ranks, in the order of the prompts; a rank that had none to answer gave None."""
    engine.eval()
    return [row for part in engine.answer(NeedParallel(prompts), seed) if part is not None for row in part]


def score(engine: TrainEngine, prompts: list[Row], seed: int) -> float:
    """The share of right answers."""
    drawn = answers(engine, prompts, seed)
    return sum(map(is_right, prompts, drawn)) / len(prompts)


def improve(engine: TrainEngine, rounds: int = 6, steps: int = 15, batch: int = 128) -> list[float]:
    """The score on held-out problems before and after each round."""
    practice, held_out = problems()
    dice = random.Random(0)
    scores = [score(engine, held_out, seed=1)]
    for number in range(rounds):
        drawn = answers(engine, practice, seed=100 + number)
        right = [asked + given for asked, given in zip(practice, drawn, strict=True) if is_right(asked, given)]
        engine.train()
        for _ in range(steps):
            engine.learn(NeedParallel(dice.choices(right, k=batch)))
        scores.append(score(engine, held_out, seed=1))
        print(f"round {number + 1}: {len(right)} of {len(practice)} answers were right; held out {scores[-1]:.1%}")
    return scores


def main() -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    shardtune.init()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        with init_empty_weights():
            module = Learner.from_pretrained(model)
        with TrainEngine(module) as engine:
            engine.build(data_parallel_size=arguments.ranks)
            scores = improve(engine, arguments.rounds)
    print(f"held-out score: {scores[0]:.1%} before, {scores[-1]:.1%} after")
    return scores


if __name__ == "__main__":
    main()
