"""Talking to a run's model in a terminal, and reading prompts from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TextStreamer

from shardtune.errors import DataError
from shardtune.generate import Sampling
from shardtune.run import NO_EVALUATION, Run

PROMPT_KEYS = ("messages", "prompt", "question", "instruction")


def read_prompts(file: Path) -> list[Any]:
    """The prompts of a JSONL file: the first of `messages`, `prompt`, `question`, `instruction` that a row has."""
    if not file.is_file():
        raise DataError(f"{file} is not a file", where="--file")
    prompts: list[Any] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"this is not JSON: {error}", where=f"{file}:{number}") from error
        key = next((key for key in PROMPT_KEYS if isinstance(row, dict) and key in row), None)
        if key is None:
            raise DataError(
                "a row has no prompt", where=f"{file}:{number}", remedy=f"give one of {', '.join(PROMPT_KEYS)}"
            )
        prompts.append(row[key])
    if not prompts:
        raise DataError(f"{file} has no rows", where="--file")
    return prompts


def chat(run: Run, checkpoint: str, system: str | None, sampling: Sampling) -> None:
    """Read turns and answer them, word by word, until an empty line or the end of input."""
    worker = run.worker(checkpoint, *NO_EVALUATION)
    assert worker.tokenizer is not None
    generator, encoder, console = worker.generator(), worker.prepared.encoder, Console(highlight=False)
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
        messages.append({"role": "user", "content": text})
        streamer = TextStreamer(worker.tokenizer, skip_prompt=True, skip_special_tokens=True)
        answer = generator.answers([encoder.prompt(messages)], sampling, streamer=streamer)[0]
        messages.append({"role": "assistant", "content": answer})
