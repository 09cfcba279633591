"""Texts and conversations, and what a run's tokenizer and chat template make of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from shardtune.batch import Sample
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.encoder import Row, RowError
from shardtune.data.images.chat_encoder import ImageChatEncoder
from shardtune.data.images.images import from_fields
from shardtune.data.images.rows import IMAGE_MARK
from shardtune.data.row_formats import Chat, Completion
from shardtune.data.token_rows import Tokens
from shardtune.run.facts.rows import example_of

UNUSUAL = ("  Two  spaces,\n\n\ttabs, Ümläute, 漢字, 🙂 and 1234567.89.", "", "a")
DATE = "strftime_now"
SYSTEM = {"role": "system", "content": "Answer briefly."}
TURNS = ({"role": "user", "content": "What is 2 plus 3?"}, {"role": "assistant", "content": "It is 5."})
NUMBER = {"type": "number"}
TOOL = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
}
MADE_UP = {
    "": Chat(TURNS, (None, None)),
    "a system turn": Chat((SYSTEM, *TURNS), (None, None, None)),
    "tools": Chat(TURNS, (None, None), ({"type": "function", "function": TOOL},)),
}
"""Conversations that every template is given, by what is unusual in them."""


def conversations(encoder: ChatEncoder, rows: Sequence[tuple[Row, Sample]], notes: list[str]) -> list[dict[str, Any]]:
    """Conversations as the template is given them, whole and as prompts, with the text that training renders.

    Args:
        encoder: of the run.
        rows: of the recipe.
        notes: receives what cannot be compared.
    """
    template = encoder.template
    if template is None:
        return []
    if DATE in template.text:
        notes.append("rendered conversations: the chat template prints today's date, which training fixes")
        return []
    examples = [example_of(encoder, row) for row, _ in rows]
    chats = [("", example) for example in examples if isinstance(example, Chat)]
    found = []
    for what, chat in [*chats, *MADE_UP.items()]:
        try:
            ready = encoder.prepared(chat)
            answers = [number for number, turn in enumerate(ready.messages) if turn["role"] == "assistant"]
            asked = ready.messages[: answers[-1]] if answers else ready.messages
            for messages, prompt in ((ready.messages, False), (asked, True)):
                if messages:
                    shown = {"messages": template.shown(messages), "tools": ready.tools and list(ready.tools)}
                    text = template.render(messages, ready.tools, prompt=prompt)
                    found.append({**shown, "prompt": prompt, "text": text})
        except RowError:
            if what:
                notes.append(f"{what}, which the chat template refuses")
    return found


def strings(value: object) -> Iterator[str]:
    """All text in a row."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def text_facts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], template: str | None) -> dict[str, Any]:
    """Tokens of texts, special tokens, template; `plain_reader.py` finds the same of a directory."""
    special = {name: json.dumps(value, default=str) for name, value in tokenizer.special_tokens_map.items()}
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return {"ids": ids, "special": special, "template": tokenizer.chat_template if template is None else template}


def image_texts(
    encoder: ImageChatEncoder, rows: Sequence[tuple[Row, Sample]], folder: Path
) -> list[tuple[int, str, list[str]]]:
    """Of each row with images its number, its text as a processor takes it, and files of its images."""
    found = []
    for number, (row, sample) in enumerate(rows):
        images, example = from_fields(sample.fields), example_of(encoder, row)
        if not images or isinstance(example, Tokens):  # which has no text
            continue
        if isinstance(example, Chat):
            if encoder.template is None:
                continue
            ready = encoder.prepared(example)
            text = encoder.template.render(ready.messages, ready.tools)
        else:
            text = example.prompt + example.completion if isinstance(example, Completion) else example.text
            text = text.replace(IMAGE_MARK, encoder.images.image_token)
        files = [folder / f"{number}_{place}.png" for place in range(len(images))]
        for file, image in zip(files, images, strict=True):
            image.read().save(file)
        found.append((number, text, [str(file) for file in files]))
    return found
