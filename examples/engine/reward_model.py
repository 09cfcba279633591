"""A reward model: it learns from pairs which of two answers is better, and then finds the best of several.

    python examples/engine/reward_model.py            # one rank
    python examples/engine/reward_model.py --ranks 2  # the same numbers

The model is transformers' own for classes, with one class: a new head on a language model.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch
from sums import ANSWER_TOKENS, Row, make_model, over_ranks, problems, solved
from transformers import Qwen2ForSequenceClassification

import shardtune
from shardtune import NeedParallel, TrainEngine, init_empty_weights, nn
from shardtune.nn.functional import reward_loss

Pair = tuple[Row, Row]
"""A prompt with the better answer, and with the other."""


class Judge(nn.HuggingFaceFsdp2TrainModule, Qwen2ForSequenceClassification):
    """One number for a prompt with an answer."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.0)

    @torch.no_grad()
    def rewards(self, rows: list[Row]) -> list[float]:
        """Of each row."""
        return self._rewards(rows).tolist()

    def learn(self, pairs: list[list[Pair]], weights: list[torch.Tensor]) -> float:
        """A step on micro-batches, whose pairs have these weights; returns this rank's part of the loss."""
        total = 0.0
        for batch, weight in zip(pairs, weights, strict=True):
            chosen, rejected = self._rewards([row for row, _ in batch] + [row for _, row in batch]).chunk(2)
            loss = (reward_loss(chosen, rejected, center=0.01) * weight).sum()
            loss.backward()
            total += loss.item()
        self.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _rewards(self, rows: list[Row]) -> torch.Tensor:
        # Rows have one length; of rows of several, a mask shows which token is the last.
        ids = torch.tensor(rows, device="cuda")
        return self(ids, attention_mask=torch.ones_like(ids)).logits[:, 0]


def wrong(row: Row, dice: random.Random) -> Row:
    """A row with one digit of its answer changed."""
    place = len(row) - ANSWER_TOKENS + dice.randrange(2)
    digit = dice.choice([digit for digit in range(10) if digit != row[place]])
    return [*row[:place], digit, *row[place + 1 :]]


def best_of(engine: TrainEngine, rows: list[Row], number: int = 4) -> float:
    """The share of problems of which the right answer has the largest reward, among some wrong ones."""
    dice = random.Random(1)
    candidates = [[row, *(wrong(row, dice) for _ in range(number - 1))] for row in rows]
    found = torch.tensor(over_ranks(engine.rewards(NeedParallel([row for several in candidates for row in several]))))
    return (found.view(-1, number).argmax(1) == 0).float().mean().item()


def train(engine: TrainEngine, steps: int = 300, batch: int = 64, max_tokens: int = 432) -> list[float]:
    """Returns the loss of each step."""
    practice, dice, losses = solved(problems()[0]), random.Random(0), []
    for _ in range(steps):
        pairs = [(row, wrong(row, dice)) for row in dice.sample(practice, batch)]
        lengths = [sum(map(len, pair)) for pair in pairs]  # 18 tokens each: up to 24 pairs in a micro-batch
        losses.append(sum(engine.learn(NeedParallel(pairs, max_tokens=max_tokens, lengths=lengths))))
    return losses


def main() -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    shardtune.init()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))  # a language model: the head of the class is a new one
        with init_empty_weights():
            module = Judge.from_pretrained(model, num_labels=1)
        with TrainEngine(module).build(data_parallel_size=arguments.ranks) as engine:
            held_out = solved(problems()[1])
            before, losses, after = best_of(engine, held_out), train(engine, arguments.steps), best_of(engine, held_out)
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    print(f"right answer of four found: {before:.1%} before, {after:.1%} after")
    return before, after


if __name__ == "__main__":
    main()
