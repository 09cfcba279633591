"""GRPO: a model answers each problem several times, and is trained towards those of its answers that were right.

    python examples/engine/grpo.py            # one rank
    python examples/engine/grpo.py --ranks 2  # the same numbers

A reward is 1 for a right answer, 0 otherwise; no answer but the model's own is ever shown to it. Answers end with their
first END, so they differ in length: a row counts by its tokens, and the loss is the mean over all tokens of a step
(DAPO's) on any number of ranks. What a row draws depends on its own dice alone.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch
from sums import ANSWER_TOKENS, Row, is_right, labels, make_model, over_ranks, problems
from transformers import Qwen2ForCausalLM

import shardtune
from shardtune import NeedParallel, TrainEngine, init_empty_weights, nn
from shardtune.nn.functional import group_advantages, linear_log_probs, masked_mean, policy_loss


class Policy(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """Answers, and learns how good its answers were."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)

    @torch.no_grad()
    def answer(self, prompts: list[Row], dice: list[list[float]]) -> list[Row]:
        """Drawn at temperature 1: each token where its die, from 0 to 1, falls among the summed probabilities."""
        rows = torch.tensor(prompts, device="cuda")
        for die in torch.tensor(dice, device="cuda", dtype=torch.float64).T:
            summed = self(rows).logits[:, -1].double().softmax(-1).cumsum(-1)
            token = (summed < die[:, None]).sum(-1).clamp(max=summed.shape[1] - 1)
            rows = torch.cat([rows, token[:, None]], dim=1)
        return rows[:, -ANSWER_TOKENS:].tolist()

    @torch.no_grad()
    def log_probs(self, rows: list[Row]) -> torch.Tensor:
        """Of the answers' tokens, by the weights that drew them: [rows, tokens]."""
        return self._log_probs(rows)[0]

    def learn(
        self,
        rows: list[list[Row]],
        advantages: list[torch.Tensor],
        drawn: list[torch.Tensor],
        weights: list[torch.Tensor],
    ) -> float:
        """A step on micro-batches, whose rows have these weights; returns this rank's part of the loss."""
        total = 0.0
        for batch, advantage, before, weight in zip(rows, advantages, drawn, weights, strict=True):
            found, mask = self._log_probs(batch)
            losses = policy_loss(found, before.to(self.device), advantage.to(found), mask, clip=0.2, clip_high=0.28)
            loss = (masked_mean(losses, mask, 1) * weight).sum()
            loss.backward()
            total += loss.item()
        self.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _log_probs(self, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor(rows, device="cuda")
        targets = self.next_tokens(torch.tensor([labels(row) for row in rows], device="cuda"))
        hidden = self.model(ids).last_hidden_state
        return linear_log_probs(hidden, self.lm_head.weight, targets), targets >= 0


def answers(engine: TrainEngine, prompts: list[Row], seed: int) -> list[Row]:
    dice = [[random.Random(f"{seed}:{row}:{i}").random() for i in range(ANSWER_TOKENS)] for row in range(len(prompts))]
    return over_ranks(engine.answer(NeedParallel(prompts), NeedParallel(dice)))


def score(engine: TrainEngine, prompts: list[Row]) -> float:
    return sum(map(is_right, prompts, answers(engine, prompts, seed=-1))) / len(prompts)


def one_round(engine: TrainEngine, number: int, size: int = 32, group: int = 8, max_tokens: int = 864) -> float:
    """Some problems, several answers to each, two steps on them; returns the share of right answers."""
    asked = [row for row in random.Random(number).sample(problems()[0], size) for _ in range(group)]
    given = answers(engine, asked, number)
    rows = [row + answer for row, answer in zip(asked, given, strict=True)]
    rewards = torch.tensor([is_right(*pair) for pair in zip(asked, given, strict=True)]).double()
    advantages, drawn = group_advantages(rewards, group), over_ranks(engine.log_probs(NeedParallel(rows)))
    tokens = [sum(label >= 0 for label in labels(row)) for row in rows]
    dealt = NeedParallel(rows, weights=tokens, max_tokens=max_tokens)  # micro-batches of up to 96 rows
    for _ in range(2):
        engine.learn(dealt, NeedParallel(advantages), NeedParallel(torch.stack(drawn)))
    return rewards.mean().item()


def main() -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    shardtune.init()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        with init_empty_weights():
            module = Policy.from_pretrained(model)
        with TrainEngine(module).build(data_parallel_size=arguments.ranks) as engine:
            scores = [score(engine, problems()[1])]
            for number in range(arguments.rounds):
                rewarded = one_round(engine, number)
                if number % 10 == 9 or number + 1 == arguments.rounds:
                    scores.append(score(engine, problems()[1]))
                    print(f"round {number + 1}: {rewarded:.0%} of its answers were right; held out {scores[-1]:.1%}")
    print(f"held-out score: {scores[0]:.1%} before, {scores[-1]:.1%} after")
    return scores


if __name__ == "__main__":
    main()
