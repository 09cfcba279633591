"""The examples of the engine's methods, and the same steps in plain PyTorch: one process, whole batches, in fp64."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForCausalLM, Qwen2ForSequenceClassification

from shardtune import TrainEngine, init_empty_weights
from tests.support.doc_blocks import ROOT

FOLDER = ROOT / "examples" / "engine"
STEPS = 2
"""Optimizer steps of DPO, distillation and the reward model; of GRPO rounds, of two steps each."""


def example(name: str) -> Any:
    """A module of the examples, under the name that it has for its neighbours."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return import_module(name)


@dataclass(frozen=True)
class Course:
    """What steps led to: numbers on the way (losses, shares of right answers, divergences), and weights."""

    numbers: list[float]
    weights: dict[str, torch.Tensor]

    def apart(self, other: Course) -> tuple[float, float]:
        """The largest differences of numbers and of weights."""
        assert self.weights.keys() == other.weights.keys()
        assert len(self.numbers) == len(other.numbers) > 0
        numbers = max(abs(a - b) for a, b in zip(self.numbers, other.numbers, strict=True))
        return numbers, max(float((self.weights[name] - other.weights[name]).abs().max()) for name in self.weights)


@dataclass(frozen=True)
class Models:
    """Directories: a language model half-trained, one with random weights, and one with a head of one number."""

    language: Path
    blank: Path
    judge: Path


def make_models(folder: Path) -> Models:
    sums = example("sums")
    torch.manual_seed(0)
    language = sums.make_model(folder / "language", width=32, steps=100)
    blank = sums.make_model(folder / "blank", width=16, steps=0, seed=1)
    judge = Qwen2ForSequenceClassification.from_pretrained(language, num_labels=1)
    judge.save_pretrained(folder / "judge")
    return Models(language, blank, folder / "judge")


Build = Callable[[type[Any], Path], Any]
"""A train module's class and a directory to a built engine."""


def builder(ranks: int, beside: TrainEngine | None = None) -> Build:
    """Engines in fp64 on so many ranks; beside another, on its own."""

    def build(kind: type[Any], path: Path) -> TrainEngine:
        with init_empty_weights():
            module = kind.from_pretrained(path, dtype=torch.float64)
        if beside is not None:
            return TrainEngine(module).build(colocate_with=beside, take_turns=False)
        return TrainEngine(module).build(data_parallel_size=ranks)

    return build


def _ended(engine: Any, numbers: list[float]) -> Course:
    weights = dict(engine.named_tensors())
    engine.close()
    return Course(numbers, weights)


# By the engine.


def dpo(models: Models, build: Build) -> Course:
    engine = build(example("dpo").Policy, models.language)
    return _ended(engine, example("dpo").improve(engine, STEPS, batch=10, max_tokens=60))


def grpo(models: Models, build: Build) -> Course:
    engine = build(example("grpo").Policy, models.language)
    sizes = {"size": 5, "group": 4, "max_tokens": 63}
    return _ended(engine, [example("grpo").one_round(engine, number, **sizes) for number in range(STEPS)])


def reward_model(models: Models, build: Build) -> Course:
    engine = build(example("reward_model").Judge, models.judge)
    return _ended(engine, example("reward_model").train(engine, STEPS, batch=10, max_tokens=60))


def distillation(models: Models, build: Build) -> Course:
    teacher = build(example("distillation").Teacher, models.language)
    student = build(example("distillation").Student, models.blank)
    numbers = list(example("distillation").distil(teacher, student, STEPS, batch=9))
    teacher.close()
    return _ended(student, numbers)


# In plain PyTorch. What a loss is stands here once more, by whole logits and log-softmax.


def _answer_log_probs(model: Any, rows: list[list[int]]) -> torch.Tensor:
    """Of the answers' tokens, [rows, tokens]; 0 behind an answer's end."""
    ids = torch.tensor(rows)
    found = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return found * _counted(rows)


def _counted(rows: list[list[int]]) -> torch.Tensor:
    sums = example("sums")
    mask = torch.zeros(len(rows), len(rows[0]) - 1, dtype=torch.float64)
    for number, row in enumerate(rows):
        for place in range(len(row) - sums.ANSWER_TOKENS, len(row)):
            mask[number, place - 1] = 1
            if row[place] == sums.END:
                break
    return mask


class Plain:
    """A model with its optimizer and the usual step."""

    def __init__(self, model: Any, rate: float, *, decay: float = 0.0, clip: float | None = 1.0) -> None:
        self.model, self._clip = model.train(), clip
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)

    def step(self, loss: torch.Tensor) -> float:
        loss.backward()
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def ended(self, numbers: list[float]) -> Course:
        return Course(numbers, {name: tensor.detach() for name, tensor in self.model.state_dict().items()})


def _language(path: Path) -> Any:
    return Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float64)


def plain_dpo(models: Models) -> Course:
    sums, plain = example("sums"), Plain(_language(models.language), 3e-4)
    practice = sums.problems()[0]
    with torch.no_grad():
        rows = torch.tensor(practice)
        for _ in range(sums.ANSWER_TOKENS):
            rows = torch.cat([rows, plain.model(rows).logits[:, -1:].argmax(-1)], dim=1)
        pairs = [(a, b) for a, b in zip(sums.solved(practice), rows.tolist(), strict=True) if a != b]
        before = [_answer_log_probs(plain.model, [pair[i] for pair in pairs]).sum(1) for i in (0, 1)]
    dice, losses = random.Random(0), []
    for _ in range(STEPS):
        drawn = dice.sample(range(len(pairs)), 10)
        chosen, rejected = (_answer_log_probs(plain.model, [pairs[n][i] for n in drawn]).sum(1) for i in (0, 1))
        margin = (chosen - before[0][drawn]) - (rejected - before[1][drawn])
        losses.append(plain.step((torch.log1p(torch.exp(-0.1 * margin)) - chosen / sums.ANSWER_TOKENS).mean()))
    return plain.ended(losses)


def plain_grpo(models: Models) -> Course:
    sums, plain = example("sums"), Plain(_language(models.language), 1e-3)
    shares = []
    for number in range(STEPS):
        asked = [row for row in random.Random(number).sample(sums.problems()[0], 5) for _ in range(4)]
        rows = []
        with torch.no_grad():
            for place, row in enumerate(asked):
                row = list(row)
                for token in range(sums.ANSWER_TOKENS):
                    die = random.Random(f"{number}:{place}:{token}").random()
                    chances = plain.model(torch.tensor([row])).logits[0, -1].softmax(-1).tolist()
                    row.append(next(n for n in range(len(chances)) if sum(chances[: n + 1]) >= die))
                rows.append(row)
            before = _answer_log_probs(plain.model, rows)
        rewards = [float(sums.is_right(row[: -sums.ANSWER_TOKENS], row[-sums.ANSWER_TOKENS :])) for row in rows]
        shares.append(sum(rewards) / len(rewards))
        advantages = []
        for start in range(0, len(rewards), 4):
            group = rewards[start : start + 4]
            mean = sum(group) / 4
            spread = math.sqrt(sum((reward - mean) ** 2 for reward in group) / 3)
            advantages += [(reward - mean) / (spread + 1e-4) for reward in group]
        weight = torch.tensor(advantages, dtype=torch.float64)[:, None]
        for _ in range(2):
            ratio = (_answer_log_probs(plain.model, rows) - before).exp()
            losses = -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.28) * weight)
            plain.step((losses * _counted(rows)).sum() / _counted(rows).sum())
    return plain.ended(shares)


def plain_reward_model(models: Models) -> Course:
    sums, example_ = example("sums"), example("reward_model")
    judge = Qwen2ForSequenceClassification.from_pretrained(models.judge, dtype=torch.float64)
    plain, dice, losses = Plain(judge, 2e-3), random.Random(0), []
    practice = sums.solved(sums.problems()[0])
    for _ in range(STEPS):
        pairs = [(row, example_.wrong(row, dice)) for row in dice.sample(practice, 10)]
        chosen, rejected = (
            plain.model(ids, attention_mask=torch.ones_like(ids)).logits[:, 0]
            for ids in (torch.tensor([pair[i] for pair in pairs]) for i in (0, 1))
        )
        losses.append(plain.step((torch.log1p(torch.exp(rejected - chosen)) + 0.01 * (chosen + rejected) ** 2).mean()))
    return plain.ended(losses)


def plain_distillation(models: Models) -> Course:
    sums, teacher = example("sums"), _language(models.language).eval()
    plain = Plain(_language(models.blank), 5e-3, decay=0.01, clip=None)
    practice, held_out = (sums.solved(asked) for asked in sums.problems())

    def divergence(rows: list[list[int]]) -> torch.Tensor:
        ids, answer = torch.tensor(rows), slice(-sums.ANSWER_TOKENS - 1, -1)
        with torch.no_grad():
            wanted = teacher(ids).logits[:, answer].log_softmax(-1)
        found = plain.model(ids).logits[:, answer].log_softmax(-1)
        return (wanted.exp() * (wanted - found)).sum(-1).mean()

    dice, numbers = random.Random(0), [divergence(held_out).item()]
    for _ in range(STEPS):
        plain.step(divergence(dice.choices(practice, k=9)))
    return plain.ended([*numbers, divergence(held_out).item()])


METHODS: dict[str, tuple[Callable[[Models, Build], Course], Callable[[Models], Course]]] = {
    "DPO": (dpo, plain_dpo),
    "GRPO": (grpo, plain_grpo),
    "distillation": (distillation, plain_distillation),
    "reward model": (reward_model, plain_reward_model),
}
"""By the engine, and in plain PyTorch."""
