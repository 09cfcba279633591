"""Chat with a run's model in a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase, TextStreamer

from shardtune.data.chat.encoder import ChatEncoder
from shardtune.data.chat.template import missing_template
from shardtune.data.encoder import RowError, caused_by
from shardtune.data.images.chat_encoder import ImageChatEncoder
from shardtune.data.images.rows import image_parts
from shardtune.errors import DataError, printable
from shardtune.evaluate.generate import Sampling
from shardtune.run.run import Run, answering

Message: TypeAlias = dict[str, object]
COMMANDS = (
    "/reset clears the conversation, /image PATH adds an image to the next turn, an empty line or Ctrl-D ends the chat"
)


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
