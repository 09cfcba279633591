"""Direct preference optimisation: a model learns from pairs of a right answer and a wrong one of its own.

    python examples/engine/dpo.py            # one rank
    python examples/engine/dpo.py --ranks 2  # the same numbers

The reference is the model before training, so its log-probabilities are computed once, and no second model is held. The
loss keeps the right answers likely, too (arXiv:2404.19733, eq. 1), as DPO alone may lower both. The pairs of a step are
dealt in micro-batches of at most so many tokens, on any number of ranks; each pair comes with its weight.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from sums import ANSWER_TOKENS, Row, is_right, labels, make_model, over_ranks, problems, solved
from transformers import Qwen2ForCausalLM

import shardtune
from shardtune import NeedParallel, TrainEngine, init_empty_weights, nn
from shardtune.nn.functional import dpo_loss, linear_log_probs

Pair = tuple[Row, Row]
"""A prompt with the preferred answer, and with the other."""
BETA = 0.1


class Policy(nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """Answers, and learns from pairs."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4, weight_decay=0.0)

    @torch.no_grad()
    def answer(self, prompts: list[Row]) -> list[Row]:
        """The likeliest answer to each prompt."""
        rows = torch.tensor(prompts, device="cuda")
        for _ in range(ANSWER_TOKENS):
            rows = torch.cat([rows, self(rows).logits[:, -1:].argmax(-1)], dim=1)
        return rows[:, -ANSWER_TOKENS:].tolist()

    @torch.no_grad()
    def judge(self, pairs: list[Pair]) -> torch.Tensor:
        """Log-probabilities of both answers, [pairs, 2]."""
        return torch.stack(self._log_probs(pairs), dim=1)

    def learn(self, pairs: list[list[Pair]], reference: list[torch.Tensor], weights: list[torch.Tensor]) -> float:
        """A step on micro-batches; returns this rank's part of the loss."""
        total = 0.0
        for batch, before, weight in zip(pairs, reference, weights, strict=True):
            chosen, rejected = self._log_probs(batch)
            losses = dpo_loss(chosen, rejected, *before.to(self.device).unbind(1), beta=BETA) - chosen / ANSWER_TOKENS
            loss = (losses * weight).sum()
            loss.backward()
            total += loss.item()
        self.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _log_probs(self, pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
        targets = self.next_tokens(torch.tensor([labels(row) for row in rows], device="cuda"))
        hidden = self.model(torch.tensor(rows, device="cuda")).last_hidden_state
        chosen, rejected = linear_log_probs(hidden, self.lm_head.weight, targets).sum(1).chunk(2)
        return chosen, rejected


def score(engine: TrainEngine, prompts: list[Row]) -> float:
    """The share of right answers."""
    return sum(map(is_right, prompts, over_ranks(engine.answer(NeedParallel(prompts))))) / len(prompts)


def improve(engine: TrainEngine, steps: int = 60, batch: int = 64, max_tokens: int = 432) -> list[float]:
    """Make pairs, train on them; returns the loss of each step."""
    practice = problems()[0]
    given = over_ranks(engine.answer(NeedParallel(practice)))
    own = [asked + answer for asked, answer in zip(practice, given, strict=True)]
    pairs = [(right, row) for right, row in zip(solved(practice), own, strict=True) if right != row]
    reference = torch.stack(over_ranks(engine.judge(NeedParallel(pairs))))
    dice, losses = random.Random(0), []
    for _ in range(steps):
        drawn = dice.sample(range(len(pairs)), batch)
        lengths = [sum(map(len, pairs[i])) for i in drawn]  # 18 tokens each: up to 24 pairs in a micro-batch
        dealt = NeedParallel([pairs[i] for i in drawn], max_tokens=max_tokens, lengths=lengths)
        losses.append(sum(engine.learn(dealt, NeedParallel(reference[drawn]))))
    return losses


def main() -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    shardtune.init()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        with init_empty_weights():
            module = Policy.from_pretrained(model)
        with TrainEngine(module).build(data_parallel_size=arguments.ranks) as engine:
            held_out = problems()[1]
            before = score(engine, held_out)
            losses = improve(engine, arguments.steps)
            after = score(engine, held_out)
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    print(f"held-out score: {before:.1%} before, {after:.1%} after")
    return before, after


if __name__ == "__main__":
    main()
