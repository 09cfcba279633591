"""A chat template: what it prints of a conversation, and what it reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from shardtune.data.chat.arguments import DATE, Arguments, fault, variables, with_date, with_defaults
from shardtune.data.chat.reasoning import KEY
from shardtune.data.encoder import RowError
from shardtune.data.messages import REASONING_KEYS, message_keys, unknown_key, unknown_keys
from shardtune.data.row_formats import Chat
from shardtune.errors import DataError

# Two private-use characters: no text has them and no template strips, escapes or translates them.
MARK = "\ue0f5\ue0f6"
NO_ARGUMENTS: Arguments = MappingProxyType({})
_KEYS_OF_PARTS = ("text", "type", "image", "video", "audio")  # a template that reads them reads parts of a content
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class PrintedTemplate:
    """A chat template with its tokenizer's special tokens.

    Args:
        text: the Jinja source.
        tokenizer: for the special tokens that the template may print, and to check which texts are single tokens.
        arguments: further values for the template, which those of a row replace.

    Attributes:
        marks_generation: whether it marks the assistant's turns itself.

    Raises:
        DataError: the template does not read one of the arguments.
    """

    separator = ""
    """What a turn has in place of something other than text."""

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerFast, arguments: Arguments = NO_ARGUMENTS) -> None:
        self.text = text
        self.arguments = {name: value for name, value in arguments.items() if value is not None}
        self._tokenizer = tokenizer
        self._special = dict(tokenizer.special_tokens_map)
        self._added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self.marks_generation = _GENERATION.search(text) is not None
        self._read: dict[str, bool] = {}
        self._prints: dict[str, bool] = {}
        self._printed: set[tuple[str, str]] = set()
        self._dated: dict[object, str] = {}
        wrong = self.fault_of(self.arguments)
        if wrong is not None:
            raise DataError(wrong, where="data.template_kwargs", remedy="leave it out, or give what the template reads")

    @property
    def with_arguments(self) -> str:
        """The template that renders by itself what this one renders with the recipe's arguments."""
        return with_defaults(self.text, self.arguments)

    @cached_property
    def _variables(self) -> frozenset[str]:
        return variables(self.text)

    def render(
        self,
        messages: Sequence[dict],
        tools: Sequence[dict] | None,
        prompt: bool = False,
        arguments: Arguments = NO_ARGUMENTS,
    ) -> str:
        """The conversation as text; with `prompt`, followed by what opens the assistant's next turn."""
        return self.render_marked(messages, tools, prompt, marked=False, arguments=arguments)[0]

    def render_marked(
        self,
        messages: Sequence[dict],
        tools: Sequence[dict] | None,
        prompt: bool,
        marked: bool,
        arguments: Arguments,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and if it is to be `marked`, where each {% generation %} block begins and ends."""
        values = {**self._special, **self.arguments, **arguments}
        day = values.pop(DATE, None)
        if day not in self._dated:
            self._dated[day] = with_date(self.text, day)
        try:
            rendered: Any = render_jinja_template(
                conversations=[self.shown(messages)],
                tools=list(tools) if tools else None,
                chat_template=self._dated[day],
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **values,
            )
        except Exception as error:  # a template is user code and may raise anything
            raise RowError(f"the chat template refuses the conversation: {error}") from error
        texts, marks = rendered
        return texts[0], marks[0] if marked else []

    def shown(self, messages: Sequence[dict]) -> list[dict]:
        """The messages as the template is given them."""
        return [self._renamed(message) for message in messages]

    def _renamed(self, message: dict) -> dict:
        """The message with its reasoning under the name that the template reads."""
        if KEY not in message or self._reasoning_key == KEY:
            return message
        return {self._reasoning_key if key == KEY else key: value for key, value in message.items()}

    @cached_property
    def _reasoning_key(self) -> str:
        return next((key for key in REASONING_KEYS if self._reads(key)), KEY)

    def _reads(self, key: str) -> bool:
        """Whether the template has `message.key`, or the key in quotes."""
        if key not in self._read:
            name = re.escape(key)
            self._read[key] = re.search(rf"\.{name}\b|(['\"]){name}\1", self.text) is not None
        return self._read[key]

    def check_keys(self, chat: Chat) -> None:
        """Raises `RowError` for a key of a message that means nothing in a row, and that the template does not read."""
        for number, message in enumerate(chat.messages, 1):
            for key in unknown_keys(message):
                if key in _KEYS_OF_PARTS or not self._reads(key):
                    raise RowError(
                        f"message {number}: {unknown_key(key, message_keys())} "
                        "(data.ignored_keys names keys to leave out)"
                    )
                if message[key] and not self._prints_key(chat, number - 1, key):
                    raise RowError(
                        f"message {number}: the key {key!r} changes nothing of what the chat template prints "
                        f"(data.ignored_keys: [{key}] leaves it out)"
                    )
            if "name" in message and not self._prints_name(message["role"]):
                raise RowError(
                    f"message {number}: the chat template does not print the name {message['name']!r} of a "
                    f"{message['role']} turn (data.ignored_keys: [name] leaves names out)"
                )

    def _prints_name(self, role: str) -> bool:
        """Whether the names of a role's turns are printed. Those of tools are in the calls that they answer."""
        if role not in self._prints:
            roles = (*(("system",) if role == "system" else ()), "user", "assistant")
            turns = [{"role": one, "content": "?", **({"name": MARK} if one == role else {})} for one in roles]
            try:
                self._prints[role] = role == "tool" or MARK in self.render(turns, None)
            except RowError:  # nothing is known; the row itself says what the template refuses
                self._prints[role] = True
        return self._prints[role]

    def _prints_key(self, chat: Chat, index: int, key: str) -> bool:
        """Whether the rendering depends on a key of message `index`, as far as another value shows it. A template may
        have the key of a call or a tool alone, not of a message."""
        message = chat.messages[index]
        place = (message["role"], key)
        if place in self._printed:
            return True
        others = [{name: value for name, value in message.items() if name != key}]
        others += [{**message, key: value} for value in (True, MARK)]
        try:
            before, after = chat.messages[:index], chat.messages[index + 1 :]
            texts = {
                self.render([*before, one, *after], chat.tools, arguments=chat.arguments) for one in (message, *others)
            }
        except RowError:  # one of the values cannot be printed, so it is read; or the row itself is refused later
            return True
        if len(texts) > 1:
            self._printed.add(place)
        return len(texts) > 1

    def fault_of(self, arguments: Arguments) -> str | None:
        """Why the template cannot take arguments; None where it takes all of them."""
        return fault(arguments, self._variables, self._special) if arguments else None

    def check_arguments(self, arguments: Arguments) -> None:
        """Raises `RowError` for an argument of a row that the template does not read."""
        wrong = self.fault_of(arguments)
        if wrong is not None:
            raise RowError(f"chat_template_kwargs: {wrong} (data.ignored_keys names keys to leave out)")

    @cached_property
    def end_of_turn(self) -> str:
        """The text of the token that ends an assistant turn. Raises `DataError` for a template without one."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        try:
            _, mark, tail = self.render(messages, None).partition(MARK)
        except RowError as error:
            raise DataError(
                f"{error.reason} (a user turn and an answer)",
                where="the chat template",
                remedy="mend it, or choose another with data.chat_template",
            ) from error
        if not mark:
            raise DataError(
                "the chat template leaves out the assistant's answer",
                where="the chat template",
                remedy="choose another with data.chat_template",
            )
        found = self._first_added(tail)
        if found is not None:
            return found
        if len(self._tokenizer(tail.strip(), add_special_tokens=False)["input_ids"]) == 1:
            return tail.strip()
        raise DataError(
            f"the chat template ends the assistant's turn with {tail!r}, which holds no token that ends a turn, "
            "so the model could never learn to stop",
            where="the chat template",
            remedy="end the turn with {{ eos_token }}, or with a token that the tokenizer has",
        )

    def _first_added(self, text: str) -> str | None:
        places = [(text.find(token), token) for token in self._added if token in text]
        return min(places, key=lambda place: place[0])[1] if places else None

    def cut(self, turn: str) -> int | None:
        """The length of the turn up to and including its end-of-turn token; None where it has none."""
        place = turn.rfind(self.end_of_turn)
        if place >= 0:
            return place + len(self.end_of_turn)
        # Some templates end a tool call with a special token.
        stripped = turn.rstrip()
        return len(stripped) if any(stripped.endswith(token) for token in self._added) else None

    def ending(self, turn: str) -> str:
        """The token that a turn ends with; "" where it has none."""
        return next((token for token in (self.end_of_turn, *self._added) if turn.endswith(token)), "")
