"""Reasoning that precedes answers: found in the rendering of a turn, or left out of a conversation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardtune.data.encoder import RowError
from shardtune.data.messages import REASONING_KEYS
from shardtune.data.row_formats import Chat

Thinking = Literal["keep", "last", "template", "strip", "drop"]
"""`drop` is the former name of `strip`."""
TAGS = re.compile(r"</?think>")
KEY = REASONING_KEYS[0]
CLOSE = "</think>"


@dataclass(frozen=True, slots=True)
class Thought:
    """The reasoning, or a part of it, of the assistant's turn `message` (its index)."""

    message: int
    text: str


def thoughts(message: Mapping[str, Any]) -> list[str]:
    """The reasoning of an assistant turn, in order: under a key of its own, and before a closing tag in its content."""
    texts = [message.get(KEY) or "", *TAGS.split(message["content"])[:-1]]
    return [text.strip() for text in texts if text.strip()]


def lost_thoughts(message: Mapping[str, Any], turn: str) -> list[str]:
    """The reasoning that does not stand before the answer in the turn as it was rendered.

    Worked example: the reasoning "4" and the answer "It is 4" were rendered as "It is 4". The answer begins at place
    0, so the "4" in it is not the reasoning, which is lost.
    """
    given = thoughts(message)
    if not given:
        return []
    stop, place, lost = _start_of_answer(message, turn), 0, []
    for text in given:
        found = turn.find(text, place, stop)
        if found < 0:
            lost.append(text)
        else:
            place = found + len(text)
    return lost


def _start_of_answer(message: Mapping[str, Any], turn: str) -> int:
    """Where the answer of a turn begins, or its first call; the end of the turn where neither is found."""
    answer, calls = TAGS.split(message["content"])[-1].strip(), message.get("tool_calls") or ()
    found = turn.rfind(answer) if answer else turn.find(calls[0]["function"]["name"]) if calls else -1
    return len(turn) if found < 0 else found


def before_last_question(chat: Chat) -> int:
    """How many turns precede the last of the user's; none without one."""
    asked = [index for index, message in enumerate(chat.messages) if message["role"] == "user"]
    return asked[-1] if asked else 0


def without_thoughts(chat: Chat, turns: int | None = None) -> tuple[Chat, list[Thought]]:
    """The conversation without reasoning, and what was taken out.

    Args:
        chat: the conversation.
        turns: of so many turns, the first ones; None: of all.

    Raises:
        RowError: nothing else is in a turn.
    """
    messages, taken = list(chat.messages), []
    for index, message in enumerate(messages[:turns]):
        if message["role"] != "assistant" or not thoughts(message):
            continue
        taken += [Thought(index, text) for text in thoughts(message)]
        messages[index] = {**_without_key(message), "content": message["content"].rpartition(CLOSE)[2].lstrip()}
        if not (messages[index]["content"].strip() or message.get("tool_calls") or chat.weights[index] == 0):
            raise RowError(f"message {index + 1}: nothing but reasoning, which data.thinking leaves out")
    return replace(chat, messages=tuple(messages)), taken


def _without_key(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != KEY}
