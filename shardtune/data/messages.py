"""A message of a conversation: its role, its text and reasoning, its tool calls; every key is read or refused."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from shardtune.config.values import OUT_OF_RANGE, in_range
from shardtune.data.encoder import RowError
from shardtune.data.json_rows import DECODER

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""The names under which a message has the reasoning before its answer; the first is the one of a `Chat`."""
_MESSAGE_KEYS = {"role", "from", "content", "value", "loss_weight", "weight", "tool_calls", "function_call"}
_MESSAGE_KEYS |= set(REASONING_KEYS)
_PASSED_KEYS = {"tool_call_id", "name"}
_KNOWN_KEYS = _MESSAGE_KEYS | _PASSED_KEYS
_CALL_KEYS = {"id", "type", "index"}
TEXT_PARTS = ("text", "input_text", "output_text")
_TEXT_KEYS = ("text", "value", "content")
"""The names under which a part has its text."""
_REASONING_PARTS = ("thinking", "reasoning")
# Keys of other formats and frequent mistakes -> what is written here instead.
_HINTS = {
    "train": "loss_weight: 0 leaves a turn out",
    "training": "loss_weight: 0 leaves a turn out",
    "mask": "loss_weight: 0 leaves a turn out",
    "text": "the text of a turn is its content",
    "message": "the text of a turn is its content",
    "parameters": "a call has its arguments under arguments",
    "args": "a call has its arguments under arguments",
    "input": "a call has its arguments under arguments",
}

_Read = TypeVar("_Read")


def read_turns(turns: Sequence[Mapping[str, object]]) -> tuple[dict[str, Any], ...]:
    """The messages of a conversation to be continued, read like those of a row."""
    return tuple(numbered(number, turn, _message) for number, turn in enumerate(turns, 1))


def numbered(number: int, turn: Mapping[str, object], read: Callable[[Mapping[str, object]], _Read]) -> _Read:
    """What a function reads of a message; its errors name the message's number."""
    try:
        return read(turn)
    except RowError as error:
        raise RowError(f"message {number}: {error.reason}") from error


def _either(turn: Mapping[str, object], *keys: str) -> object:
    """The value under one of two keys that mean the same; None where there is none."""
    given = [key for key in keys if turn.get(key) is not None]
    if len(given) > 1 and turn[given[0]] != turn[given[1]]:
        raise RowError(f"both {given[0]} and {given[1]} are given, and they differ")
    return turn[given[0]] if given else None


def role_of(turn: Mapping[str, object]) -> str:
    """The role of a message by the name that chat templates have for it."""
    named = _named_role(turn)
    role = ROLES.get(named) if isinstance(named, str) else None
    if role is None:
        raise RowError(f"the role {named!r} is not known; known are {', '.join(ROLES)}")
    return role


def _named_role(turn: Mapping[str, object]) -> object:
    role, named = turn.get("role"), turn.get("from")
    if role is None and named is None:
        raise RowError(f"no role (its keys: {', '.join(turn)})")
    if role is not None and named is not None and ROLES.get(str(role)) != ROLES.get(str(named)):
        raise RowError(f"the role is {role!r}, and from is {named!r}")
    return named if role is None else role


def _message(turn: Mapping[str, object]) -> dict[str, Any]:
    role, content = role_of(turn), _either(turn, "content", "value")
    calls = [turn[key] for key in ("tool_calls", "function_call") if turn.get(key)]
    if content is None and role != "assistant":
        raise RowError(f"no content (its keys: {', '.join(turn)})")
    if _named_role(turn) == "function_call":
        content, calls = "", [parsed(content, "the function call"), *calls]
    if len(calls) > 1:
        raise RowError("both tool_calls and function_call are given; they mean the same")
    text, reasoning = _content(content)
    given = [one for one in (reasoning, _reasoning(turn)) if one is not None]
    message: dict[str, Any] = {"role": role, "content": text}
    message |= {key: value for key, value in turn.items() if key not in _MESSAGE_KEYS and value is not None}
    if given:
        if role != "assistant":
            raise RowError(f"reasoning in a {role} turn; only assistant turns have any")
        message[REASONING_KEYS[0]] = "\n\n".join(given)
    if calls:
        if role != "assistant":
            raise RowError(f"tool_calls in a {role} turn; only the assistant calls tools")
        message["tool_calls"] = _tool_calls(calls[0])
    return message


def unknown_keys(message: Mapping[str, object]) -> list[str]:
    """The keys of a message of a `Chat` that have a meaning for a chat template alone, if at all."""
    return [key for key in message if key not in _KNOWN_KEYS]


def unknown_key(key: str, known: Sequence[str]) -> str:
    """The reason to refuse a key that has no meaning."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    hint = _HINTS.get(key) or (f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}")
    return f"the key {key!r} has no meaning here: {hint}"


def message_keys() -> list[str]:
    """The keys of a message in a row."""
    return sorted(_KNOWN_KEYS - set(REASONING_KEYS[1:]))


def _reasoning(turn: Mapping[str, object]) -> str | None:
    """The reasoning of a message, under whichever of its names."""
    given = [key for key in REASONING_KEYS if turn.get(key) is not None]
    texts = [_content(turn[key])[0] for key in given]
    if len(set(texts)) > 1:
        raise RowError(f"both {given[0]} and {given[1]} are given, and they differ")
    return texts[0] if texts else None


def _content(content: object) -> tuple[str, str | None]:
    """The text of a turn, and its reasoning where that is a part of the content."""
    if content is None:
        return "", None
    if isinstance(content, str):
        return content, None
    if not isinstance(content, Sequence):
        raise RowError(f"the content is {type(content).__name__}, neither text nor a list of parts")
    others, reasoning = split_reasoning(content)
    return "".join(_part(part) for part in others), reasoning


def split_reasoning(parts: Sequence[object]) -> tuple[list[object], str | None]:
    """The parts of a turn without those of reasoning, and the text of these; None where there is none."""
    others: list[object] = []
    found: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _REASONING_PARTS or not isinstance(part, Mapping):
            others.append(part)
            continue
        if others:
            raise RowError(f"a content part of type {kind!r} behind others; reasoning comes before the answer")
        found.append(_reasoning_part(part, str(kind)))
    return others, "\n\n".join(found) if found else None


def _reasoning_part(part: Mapping[Any, object], kind: str) -> str:
    given = [key for key in ("thinking", "reasoning", "text") if part.get(key) is not None]
    unused = [key for key in part if key not in ("type", "signature", *given[:1]) and part[key] not in (None, [], "")]
    if not given or unused:
        raise RowError(
            f"a content part of type {kind!r} "
            + (f"with {unused[0]}; {unknown_key(unused[0], ['type', kind])}" if unused else "without text")
        )
    return _content(part[given[0]])[0]


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in TEXT_PARTS:
        raise RowError(f"a content part of type {kind!r}; this model takes text only")
    return text_of_part(part)


def text_of_part(part: Mapping[str, Any]) -> str:
    """The text of a part of type text. Raises `RowError` for one without, or with something besides."""
    given = [key for key in _TEXT_KEYS if isinstance(part.get(key), str)]
    if not given:
        raise RowError(
            f"a content part of type {part['type']} without text (its keys: {', '.join(part)}); it is written as "
            f'{{"type": "{part["type"]}", "text": "…"}}'
        )
    unused = [key for key, value in part.items() if key not in ("type", given[0]) and value not in (None, [])]
    if unused:
        raise RowError(f"a content part of type {part['type']!r}: {unknown_key(unused[0], ['type', 'text'])}")
    return part[given[0]]


def shown_question(turns: Sequence[Mapping[str, Any]]) -> str:
    """What the next turn answers, for a reader: the last user turn, and what was called and returned since."""
    asked = max((number for number, turn in enumerate(turns) if turn["role"] == "user"), default=0)
    lines: list[str] = []
    for turn in turns[asked:]:
        lines += [turn["content"]] if turn["content"].strip() else []
        for call in turn.get("tool_calls") or ():
            function = call["function"]
            lines.append(f"{function['name']}({json.dumps(function['arguments'], ensure_ascii=False)})")
    return "\n→ ".join(lines)


def loss_weight_of(turn: Mapping[str, object]) -> float | None:
    """The weight that a message gives its own tokens; None where it gives none."""
    given = [key for key in ("loss_weight", "weight") if turn.get(key) is not None]
    if not given:
        return None
    if len(given) == 2:
        raise RowError("both loss_weight and weight are given; they mean the same")
    value = turn[given[0]]
    try:
        weight = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        weight = math.inf
    if not math.isfinite(weight) or weight < 0:
        raise RowError(f"{given[0]} is {excerpt(value)}; it must be a number of at least 0")
    if not in_range(weight):
        raise RowError(f"{given[0]} is {excerpt(value)}: {OUT_OF_RANGE}")
    return weight


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    calls = parsed(calls, "tool_calls")
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RowError(f"the calls of tools are {excerpt(calls)}, not a list of objects with name and arguments")
    return [_tool_call(parsed(call, "a tool call")) for call in calls]


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(f"a tool call without a name: {excerpt(call)}")
    known = {"name", "arguments"} | _CALL_KEYS
    unused = [key for key, value in function.items() if key not in known and value is not None]
    outside = _CALL_KEYS | ({"function"} if "function" in call else known)
    # The same value twice is no fault: some write a call in both forms.
    unused += [
        key for key, value in call.items() if key not in outside and value is not None and value != function.get(key)
    ]
    if unused and unused[0] in known:
        raise RowError(
            f"a call of {function['name']}: {unused[0]} stands beside the key function, which has "
            f"{excerpt(function.get(unused[0]))}; write it into function"
        )
    if unused:
        raise RowError(f"a call of {function['name']}: {unknown_key(unused[0], ['name', 'arguments'])}")
    # Templates write the arguments with `tojson`; a JSON string would come out quoted twice.
    arguments = parsed(function.get("arguments") or {}, f"the arguments of {function['name']}")
    if not isinstance(arguments, Mapping):
        raise RowError(f"the arguments of {function['name']} are not an object: {excerpt(arguments)}")
    tool_call = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    return tool_call if call.get("id") is None else {"id": call["id"], **tool_call}


def parsed(value: object, key: str) -> Any:
    """A value, or what its JSON text holds."""
    if not isinstance(value, str):
        return value
    try:
        return DECODER.decode(value)
    except json.JSONDecodeError as error:
        raise RowError(f"{key} is text, but not JSON: {error.msg} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise RowError(f"{key} is text, but not usable as JSON: {error}") from error


def excerpt(value: object) -> str:
    """A value for a message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
