"""Chat with a run's model in a terminal, and prompts from files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase, TextStreamer

from shardtune.cli.json_text import json_text
from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.chat.template import missing_template
from shardtune.data.encoder import Row, RowError, caused_by
from shardtune.data.images.chat_encoder import ImageChatEncoder
from shardtune.data.images.rows import image_parts, listed_images, with_places
from shardtune.data.json_rows import DECODER, RepeatedKeyError
from shardtune.data.row_formats import ARGUMENTS, read_arguments
from shardtune.data.row_prompts import PROMPT_KEYS, read_row_prompt
from shardtune.data.sources.data_path import OUT_OF_PIPE, PIPE
from shardtune.data.sources.inference_rows import PREPARED, InferenceRows, dropped_note
from shardtune.errors import DataError, printable
from shardtune.evaluate.generate import Sampling
from shardtune.run.run import Run, answering

Message: TypeAlias = dict[str, object]
ROWS = f"give JSON lines whose rows have one of {', '.join(PROMPT_KEYS)}: text, or messages with role and content"
MEDIA = ("images", "image", "tools", ARGUMENTS)
COMMANDS = (
    "/reset clears the conversation, /image PATH adds an image to the next turn, an empty line or Ctrl-D ends the chat"
)
WRITTEN = ("row", "prompt", "answer")
"""Keys of each line of answers; a row's own keys of these names are written with `given_` before them."""


@dataclass(frozen=True, slots=True)
class Question:
    """A row of a file of prompts.

    Attributes:
        prompt: a user's turn, or a whole conversation that ends with one.
        images: of its column `images` or `image`.
        tools: of its column `tools`.
        template_kwargs: of its column `chat_template_kwargs`.
        reference: the row's own answer, a text or turns; None without.
        raw: the prompt is a text that is continued without the chat template.
        kept: its number in the file, and what it has besides.
    """

    prompt: str | list[Message]
    images: Sequence[object]
    tools: object = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    reference: str | list[Message] | None = None
    raw: bool = False
    kept: Mapping[str, object] = field(default_factory=dict)


def read_prompts(file: Path, rows: InferenceRows) -> tuple[list[Question], list[str]]:
    """The prompts of a JSONL file, each as training shows it before the row's answer, and notes on them.

    Args:
        file: of rows as those of training.
        rows: how training read them.
    """
    if not file.is_file():
        what, remedy = (PIPE, OUT_OF_PIPE) if file.exists() and not file.is_dir() else ("is not a file", ROWS)
        raise DataError(f"{file} {what}", where="--file", remedy=remedy)
    questions: list[Question] = []
    dropped = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{file}:{number}"
                row = rows.read(_row(line, where), where)
                if row is None:
                    dropped += 1
                else:
                    questions.append(_question(row, where, number))
    if not questions:
        remedy = f"{dropped_note(dropped)}; with {PREPARED} it is not applied" if dropped else ROWS
        raise DataError(f"{file} has no rows", where="--file", remedy=remedy)
    return questions, [*([dropped_note(dropped)] if dropped else []), *_notes_on(questions)]


def _row(line: bytes, where: str) -> Row:
    try:
        row = DECODER.decode(line.decode("utf-8-sig"))
    except RepeatedKeyError as error:
        raise DataError(str(error), where=where, remedy="leave one of them") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"this is not JSON: {error}", where=where, remedy=ROWS) from error
    if isinstance(row, dict):
        return row
    raise DataError(f"the line is {type(row).__name__}, not an object", where=where, remedy=ROWS)


def _question(row: Row, where: str, number: int) -> Question:
    try:
        found = read_row_prompt(row)
        images = listed_images(row)
        prompt = found.prompt
        if not isinstance(prompt, str):
            prompt = with_places(prompt, images)
        given = read_arguments(row.get(ARGUMENTS))
    except RowError as error:
        raise DataError(error.reason, where=where, remedy=ROWS) from error
    others = {key: value for key, value in row.items() if key not in (*found.keys, *MEDIA)}
    kept = {f"given_{key}" if key in WRITTEN else key: value for key, value in others.items()}
    return Question(prompt, images, row.get("tools"), given, found.answer, found.plain, {"row": number, **kept})


def _notes_on(questions: Sequence[Question]) -> list[str]:
    """What is done with rows that hold their answer, and with those whose prompt is continued as it is."""
    answered = sum(question.reference is not None for question in questions)
    raw = sum(question.raw for question in questions)
    notes = []
    if answered:
        its = "row has its answer" if answered == 1 else "rows have their answer"
        notes.append(f'{answered:,} {its}: it is left out of the prompt and written as "reference"')
    if raw:
        its = "row has prompt and completion" if raw == 1 else "rows have prompt and completion"
        notes.append(f"{raw:,} {its} as text: the prompt is continued without the chat template, as in training")
    return notes


def answer_line(question: Question, answer: str) -> str:
    """A question with its answer as a line of JSON, in which characters that control a terminal are escaped."""
    given = {"images": question.images, "tools": question.tools, ARGUMENTS: question.template_kwargs}
    given = {key: value for key, value in given.items() if value}
    if question.reference is not None:
        given["reference"] = question.reference
    row = {**question.kept, "prompt": question.prompt, **given, "answer": answer}
    return json_text(row)


class Streamer(TextStreamer):
    """Prints an answer while it is generated, without what stands before an opening of its text.

    Tokens from the first one of `ChatEncoder.answer_opening` on (`<|channel|>analysis<|message|>…` of gpt-oss) are held
    back until the whole opening is there; an answer that has none is printed in the end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, opening: Sequence[int]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._opening = list(opening)
        self._held: list[int] = []
        self._has_printed = False

    def put(self, value: torch.Tensor) -> None:
        if self.next_tokens_are_prompt or not self._opening:
            super().put(value)
            return
        for token in value.flatten().tolist():
            self._take(token)

    def _take(self, token: int) -> None:
        if not self._held and token != self._opening[0]:
            super().put(torch.tensor([token]))
            self._has_printed = True
            return
        self._held.append(token)
        if self._held[-len(self._opening) :] == self._opening:
            self._held.clear()
            if self._has_printed:  # what follows takes its place in the conversation
                super().end()
                self.next_tokens_are_prompt = False

    def end(self) -> None:
        if self._held:
            super().put(torch.tensor(self._held))
        self._held, self._has_printed = [], False
        super().end()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(printable(text), stream_end)


def chat(
    run: Run,
    checkpoint: str,
    system: str | None,
    sampling: Sampling,
    template_kwargs: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Read turns and stream the answers, until an empty line or the end of input.

    `/image PATH` adds an image to the next turn; `/reset` clears the conversation.
    """
    worker = answering(run, checkpoint)
    encoder, console = worker.chat_encoder(), Console(highlight=False)
    if encoder.template is None:
        raise missing_template(str(run.dir))
    generator = worker.generator()
    if system or template_kwargs:
        _check_opening(encoder, system, template_kwargs)
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    messages, images = list(opening), list[str]()
    while True:
        try:
            text = console.input("[bold]you> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not text:
            return
        if text == "/reset":
            messages, images = list(opening), []
            continue
        if _is_no_command(text):
            console.print(f"{printable(text)} is no command: {COMMANDS}", markup=False)
            continue
        if text == "/image" or text.startswith("/image "):
            images += _check_image(text.removeprefix("/image").strip(), encoder, console)
            continue
        try:
            turns = [*messages, {"role": "user", "content": image_parts(text, images) if images else text}]
            prompt = encoder.prompt(turns, template_kwargs=template_kwargs)
        except Exception as error:
            console.print(printable(caused_by(error, text).reason), markup=False)
            continue
        streamer = Streamer(encoder.tokenizer, encoder.answer_opening)
        try:
            answer = generator.answers([prompt], sampling, streamer=streamer)[0]
        except KeyboardInterrupt:  # drop the question and its answer, and continue
            console.print()
            continue
        except DataError as error:
            console.print(f"{printable(error.what)}; /reset begins another conversation", markup=False)
            continue
        messages, images = [*turns, {"role": "assistant", "content": answer}], []


def _is_no_command(text: str) -> bool:
    """Whether a turn is a single word like those of commands, or begins with one of them, and is none."""
    word, _, rest = text.partition(" ")
    known = word == "/image" or text == "/reset"
    return not known and re.fullmatch(r"/[a-z]+", word) is not None and (not rest or word == "/reset")


def _check_opening(encoder: ChatEncoder, system: str | None, template_kwargs: Mapping[str, object]) -> None:
    """Refuse options that the chat template does not take, before the first turn is typed."""
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    try:
        encoder.prompt([*opening, {"role": "user", "content": "Hi"}], template_kwargs=template_kwargs)
    except Exception as error:
        raise DataError(
            caused_by(error, system).reason,
            where="shardtune chat",
            remedy="leave out --system or --template-kwargs, whichever the chat template does not take",
        ) from error


def _check_image(path: str, encoder: ChatEncoder, console: Console) -> list[str]:
    """The image in a list; an empty list, after a message, if the model cannot use it."""
    if not isinstance(encoder, ImageChatEncoder):
        console.print("this model takes text and no images")
        return []
    try:
        width, height = encoder.read_images([path])[0].size
    except RowError as error:
        console.print(printable(error.reason), markup=False)
        return []
    console.print(f"an image of {width} x {height}, added to your next turn")
    return [path]
