"""Sums of two numbers as token rows, and a small model that has not learned them well yet."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

PLUS, EQUALS, END = 10, 11, 12
VOCABULARY = 13
TOP = 31
ANSWER_TOKENS = 3

Row = list[int]


def prompt(a: int, b: int) -> Row:
    """17 + 05, ones first, as one adds on paper: [7, 1, PLUS, 5, 0, EQUALS]."""
    return [a % 10, a // 10, PLUS, b % 10, b // 10, EQUALS]


def answer(a: int, b: int) -> Row:
    """Ones, tens, end."""
    return [(a + b) % 10, (a + b) // 10, END]


def is_right(asked: Row, answered: Row) -> bool:
    """The score of an answer."""
    a, b = asked[0] + 10 * asked[1], asked[3] + 10 * asked[4]
    return answered == answer(a, b)


def problems(seed: int = 0) -> tuple[list[Row], list[Row]]:
    """(prompts to practise on, 200 held-out prompts)."""
    asked = [prompt(a, b) for a in range(TOP + 1) for b in range(TOP + 1)]
    random.Random(seed).shuffle(asked)
    return asked[200:], asked[:200]


def solved(asked: list[Row]) -> list[Row]:
    """Prompts with their answers behind them."""
    return [row + answer(row[0] + 10 * row[1], row[3] + 10 * row[4]) for row in asked]


def labels(row: Row) -> Row:
    """The tokens of a row's answer up to its first END, -100 elsewhere."""
    start = len(row) - ANSWER_TOKENS
    end = row.index(END, start) + 1 if END in row[start:] else len(row)
    return [-100] * start + row[start:end] + [-100] * (len(row) - end)


def over_ranks(values: list) -> list:
    """What the ranks returned for their samples, in the order of the samples; a rank without any gave None."""
    return [value for part in values if part is not None for value in part]


def make_model(folder: Path, *, width: int = 48, steps: int = 120, seed: int = 0) -> Path:
    """Write a model that was trained for some steps in plain PyTorch: the fewer, the worse its answers.

    In fp64, or it would be another model on another processor: at this rate 120 steps make much of a rounding.
    """
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        eos_token_id=END,
        pad_token_id=END,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config).double()
    rows = torch.tensor(solved(problems()[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (128,))]
        logits = model(batch).logits[:, 5:-1]  # the answer alone
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 6:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.float().save_pretrained(folder)
    return folder
