"""The prompt of a row: what training shows before its answer, read alike from a row without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardtune.data.encoder import Row, RowError
from shardtune.data.messages import parsed, role_of
from shardtune.data.row_formats import Chat, check_system, present, read_example

_FORMATS = (
    # Those of training, in its order; then those without an answer.
    *(("messages",), ("conversations",), ("instruction", "output"), ("prompt", "completion"), ("question", "answer")),
    *(("prompt",), ("question",), ("instruction",)),
)
PROMPT_KEYS = ("messages", "conversations", "prompt", "question", "instruction")
_BEFORE = {"instruction": ("system", "history", "instruction", "input"), "question": ("system", "question")}
_ANSWERS = {"instruction": "output", "question": "answer"}
_CALLS = ("tool_calls", "function_call")


@dataclass(frozen=True, slots=True)
class RowPrompt:
    """A row as a prompt and its answer.

    Attributes:
        prompt: the text of the only turn, or all turns before the answer, as the row has them.
        answer: its text, or the turns themselves where there are several or they call tools; None without.
        plain: the prompt is a text that training continues without a chat template.
        keys: of the row, which prompt and answer are read from.
    """

    prompt: str | list[dict[str, Any]]
    answer: str | list[dict[str, Any]] | None
    keys: tuple[str, ...]
    plain: bool = False


def read_row_prompt(row: Row) -> RowPrompt:
    """The prompt of a row: system, history and question, or a conversation without the assistant's turns at its end.

    Raises:
        RowError: the row has no prompt, or one that cannot be read.
    """
    row = present(row)
    keys = next((keys for keys in _FORMATS if all(row.get(key) is not None for key in keys)), None)
    if keys is None:
        raise RowError("the row has no prompt")
    key = keys[0]
    if key in _BEFORE:
        return _exchange(row, key)
    if key != "prompt":
        return _split(row, _turns(row[key], key), 0, ("system", key))
    if not isinstance(row["prompt"], str):
        before = _turns(row["prompt"], key)
        if "completion" not in keys:
            return _split(row, before, len(before), ("system", *keys))
        # Only the completion is trained, which an answer's weight says: its reasoning is not written before others.
        read = [_untrained(turn) if role_of(turn) == "assistant" else turn for turn in before]
        return _split(row, [*read, *_turns(row["completion"], "completion")], len(read), ("system", *keys))
    if "completion" not in keys:
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        user = {"role": "user", "content": row["prompt"]}
        return RowPrompt([*system, user] if system else row["prompt"], None, ("system", *keys))
    if not isinstance(row["completion"], str):
        raise RowError("prompt and completion must both be text, or both lists of messages")
    return RowPrompt(row["prompt"], row["completion"] if row["completion"].strip() else None, keys, plain=True)


def _exchange(row: Row, key: str) -> RowPrompt:
    """A row of a question and its answer, or of an instruction and its output; it may have no answer."""
    answer = row.get(_ANSWERS[key])
    is_given = answer is not None and bool(str(answer).strip())
    whole = {**{name: row.get(name) for name in _BEFORE[key]}, _ANSWERS[key]: answer if is_given else "?"}
    example = read_example(whole)
    assert isinstance(example, Chat)  # by these keys
    *turns, answered = example.messages
    prompt = turns[0]["content"] if len(turns) == 1 else turns
    return RowPrompt(prompt, answered["content"] if is_given else None, (*_BEFORE[key], _ANSWERS[key]))


def _split(row: Row, turns: list[dict[str, Any]], least: int, keys: tuple[str, ...]) -> RowPrompt:
    """A conversation, parted before the assistant's turns at its end.

    Args:
        row: of the conversation.
        turns: all of it.
        least: how many of the turns are the prompt in any case.
        keys: of the row, which are read.
    """
    stop = len(turns)
    while stop > least and role_of(turns[stop - 1]) == "assistant":
        stop -= 1
    if not stop:
        raise RowError("every turn is the assistant's, so there is nothing to answer")
    before = turns[:stop]
    if row.get("system") and role_of(turns[0]) == "system":
        check_system(str(row["system"]), {"role": "system", "content": _content(turns[0])})
    elif row.get("system"):
        role, content = ("from", "value") if "from" in turns[0] else ("role", "content")
        before.insert(0, {role: "system", content: row["system"]})
    return RowPrompt(before, _answer(turns[stop:]), keys)


def _untrained(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in turn.items() if key != "weight"}, "loss_weight": 0}


def _answer(turns: list[dict[str, Any]]) -> str | list[dict[str, Any]] | None:
    content = _content(turns[0]) if len(turns) == 1 and not any(map(turns[0].get, _CALLS)) else None
    if isinstance(content, str):
        return content if content.strip() else None
    return turns or None


def _content(turn: Mapping[str, object]) -> object:
    return turn.get("value") if turn.get("content") is None else turn["content"]


def _turns(value: object, key: str) -> list[dict[str, Any]]:
    """The turns of a conversation, each with a known role, and with content unless it is the assistant's."""
    turns = value if key == "prompt" else parsed(value, key)
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise RowError(f"{key} is neither text nor a list of messages" if key == "prompt" else f"{key} has no messages")
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping):
            raise RowError(f"message {number} of {key} is {type(turn).__name__}, not an object with role and content")
        try:
            role = role_of(turn)
        except RowError as error:
            raise RowError(f"message {number} of {key}: {error.reason}") from error
        if role != "assistant" and not isinstance(_content(turn), str | list):
            raise RowError(f"message {number} of {key} has no content: text, or a list of parts")
    return [dict(turn) for turn in turns]
