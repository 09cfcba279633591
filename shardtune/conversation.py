"""Talking to a run's model in a terminal, and reading prompts from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TextStreamer

from shardtune.errors import DataError
from shardtune.generate import Sampling
from shardtune.run import Run, answering

PROMPT_KEYS = ("messages", "prompt", "question", "instruction")
ROWS = f"give JSON lines whose rows have one of {', '.join(PROMPT_KEYS)}: text, or messages with role and content"


def read_prompts(file: Path) -> list[Any]:
    """The prompts of a JSONL file: the first of `messages`, `prompt`, `question`, `instruction` that a row has."""
    if not file.is_file():
        raise DataError(f"{file} is not a file", where="--file", remedy=ROWS)
    prompts: list[Any] = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                prompts.append(_prompt(line, f"{file}:{number}"))
    if not prompts:
        raise DataError(f"{file} has no rows", where="--file", remedy=ROWS)
    return prompts


def _prompt(line: str, where: str) -> str | list[dict[str, Any]]:
    """A user's turn, or a whole conversation that ends in one."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"this is not JSON: {error}", where=where, remedy=ROWS) from error
    key = next((key for key in PROMPT_KEYS if isinstance(row, dict) and key in row), None)
    if key is None:
        raise DataError("a row has no prompt", where=where, remedy=ROWS)
    prompt = row[key]
    if isinstance(prompt, str):
        return prompt
    turns = prompt if isinstance(prompt, list) else []
    good = [turn for turn in turns if isinstance(turn, dict) and isinstance(turn.get("role"), str)]
    if not turns or len(good) < len(turns) or not all(isinstance(turn.get("content"), str) for turn in good):
        raise DataError(
            f"the prompt is {json.dumps(prompt)[:80]}, neither text nor a list of messages", where=where, remedy=ROWS
        )
    return turns


def chat(run: Run, checkpoint: str, system: str | None, sampling: Sampling) -> None:
    """Read turns and answer them, word by word, until an empty line or the end of input."""
    worker = answering(run, checkpoint)
    encoder, console = worker.chat_encoder(), Console(highlight=False)
    assert worker.tokenizer is not None
    generator = worker.generator()
    opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            text = console.input("[bold]you> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not text:
            return
        if text == "/reset":
            messages = list(opening)
            continue
        asked = [*messages, {"role": "user", "content": text}]
        streamer = TextStreamer(worker.tokenizer, skip_prompt=True, skip_special_tokens=True)
        try:
            answer = generator.answers([encoder.prompt(asked)], sampling, streamer=streamer)[0]
        except KeyboardInterrupt:  # this answer is not wanted; the conversation goes on as if it had not been asked
            console.print()
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]
