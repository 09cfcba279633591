"""The supported row formats: recognised by their keys and converted to one of three types."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shardtune.data.encoder import Row, RowError

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
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""The names under which a message has the reasoning before its answer; the first is the one of a `Chat`."""
_MESSAGE_KEYS = {"role", "from", "content", "value", "loss_weight", "weight", "tool_calls", "function_call"}
_MESSAGE_KEYS |= set(REASONING_KEYS)
_PASSED_KEYS = {"tool_call_id", "name"}
_KNOWN_KEYS = _MESSAGE_KEYS | _PASSED_KEYS
_CALL_KEYS = {"id", "type", "index"}
TEXT_PARTS = ("text", "input_text", "output_text")
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


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, the input of a chat template.

    Attributes:
        messages: role (system, user, assistant, tool), content (a string), `tool_calls`, `tool_call_id`, `name`,
            `reasoning_content`, and other keys of the row, for the chat template.
        weights: the `loss_weight` of each message, None where the row has none.
        tools: tool definitions as JSON schemas, None without.
    """

    messages: tuple[dict[str, Any], ...]
    weights: tuple[float | None, ...]
    tools: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its continuation; rendered without a chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text, every token of it a target; rendered without a chat template."""

    text: str


Example = Chat | Completion | Text


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One supported format: the keys a row of it must have, and how to read it."""

    name: str
    title: str
    keys: tuple[str, ...]
    read: Callable[[Row], Example]


def present(row: Row) -> Row:
    """The row with None for NaN, by which pandas marks what is missing."""
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}


def recognise(row: Row) -> RowFormat:
    """The first format whose keys the row has. Raises `RowError` with the row's keys and the supported formats."""
    row = present(row)
    for known in FORMATS:
        if all(row.get(key) is not None for key in known.keys):
            return known
    keys = ", ".join(str(key) for key in row) or "none"
    for known in FORMATS:
        missing = [key for key in known.keys if row.get(key) is None]
        if len(missing) < len(known.keys):
            raise RowError(
                f"the row looks like {known.title}, but has no {' and no '.join(missing)} (its keys: {keys})"
            )
    formats = "; ".join(f"{known.title} ({', '.join(known.keys)})" for known in FORMATS)
    raise RowError(
        f"the row has a format that is not known. Its keys: {keys}. Known formats and their keys: {formats}. "
        "Map other names with data.columns, for example {question: problem}, or the row with data.transform"
    )


def read_example(row: Row, name: str | None = None) -> Example:
    """The row as a conversation, a prompt with its completion, or text.

    Args:
        name: the format, if the recipe names it; otherwise it is recognised.
    """
    row = present(row)
    known = recognise(row) if name is None else FORMATS_BY_NAME[name]
    _require_keys(row, known)
    media = [key for key in MEDIA_KEYS if row.get(key)]
    if media:
        raise RowError(f"the row has {media[0]}, but this model takes text only")
    return known.read(row)


def in_format(row: Row, name: str) -> Row:
    """The row of the format that the recipe names, in a form that is recognised; a row with images stays as it is."""
    row = present(row)
    if not _has_media(row):
        return as_row(read_example(row, name))
    known = FORMATS_BY_NAME[name]
    _require_keys(row, known)
    others = {key for other in FORMATS for key in other.keys} - set(known.keys)
    return {key: value for key, value in row.items() if key not in others}


def _has_media(row: Row) -> bool:
    """Whether a row holds more than text, under a separate key or as part of a turn."""
    if any(row.get(key) is not None for key in MEDIA_KEYS):
        return True
    turns = [turn for key in ("messages", "conversations", "prompt", "completion") for turn in _listed(row.get(key))]
    parts = [part for turn in turns if isinstance(turn, Mapping) for part in _listed(turn.get("content"))]
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _require_keys(row: Row, known: RowFormat) -> None:
    missing = [key for key in known.keys if row.get(key) is None]
    if missing:
        raise RowError(
            f"the row has no {' and no '.join(missing)}, which {known.title} needs (its keys: {', '.join(row)})"
        )


def as_row(example: Example) -> dict[str, object]:
    """The example as a row that `read_example` recognises and reads back unchanged."""
    if isinstance(example, Text):
        return {"text": example.text}
    if isinstance(example, Completion):
        return {"prompt": example.prompt, "completion": example.completion}
    pairs = zip(example.messages, example.weights, strict=True)
    messages = [message if weight is None else {**message, "loss_weight": weight} for message, weight in pairs]
    return {"messages": messages, "tools": list(example.tools) if example.tools else None}


def rename_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """The row with the standard names: `columns` maps each to the row's own name for it."""
    if not columns:
        return row
    missing = [name for name in columns.values() if name not in row]
    if missing:
        raise RowError(f"data.columns names {missing[0]!r}, which the row does not have (its keys: {', '.join(row)})")
    taken = set(columns.values())
    kept = {key: value for key, value in row.items() if key not in taken}
    return {**kept, **{name: row[column] for name, column in columns.items()}}


def _read_messages(row: Row) -> Chat:
    return _chat(_turns(row["messages"], "messages"), row)


def _read_sharegpt(row: Row) -> Chat:
    return _chat(_turns(row["conversations"], "conversations"), row)


def _read_alpaca(row: Row) -> Chat:
    question = "\n\n".join(text for text in (_text(row, "instruction"), _text(row, "input")) if text)
    turns = [turn for pair in _history(row) for turn in _exchange(*pair)]
    return _chat([*turns, *_exchange(_filled(question, "instruction"), _text(row, "output"), row)], row)


def _history(row: Row) -> list[tuple[str, str]]:
    pairs = row.get("history") or []
    if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        raise RowError("history is not a list of [question, answer] pairs")
    return [(str(question), str(answer)) for question, answer in pairs]


def _read_question(row: Row) -> Chat:
    return _chat(_exchange(_filled(_text(row, "question"), "question"), _text(row, "answer"), row), row)


def _read_completion(row: Row) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(prompt, _filled(completion, "completion"))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise RowError("prompt and completion must both be text, or both lists of messages")
    before = _turns(prompt, "prompt")
    # Only the completion is trained, so assistant turns in the prompt get weight 0.
    given = [{**turn, "loss_weight": 0, "weight": None} if _role(turn) == "assistant" else turn for turn in before]
    return _chat([*given, *_turns(completion, "completion")], row)


def _read_text(row: Row) -> Text:
    return Text(_filled(_text(row, "text"), "text"))


FORMATS = (
    RowFormat("messages", "chat messages", ("messages",), _read_messages),
    RowFormat("sharegpt", "ShareGPT conversations", ("conversations",), _read_sharegpt),
    RowFormat("instruction", "instruction/input/output", ("instruction", "output"), _read_alpaca),
    RowFormat("prompt_completion", "prompt/completion", ("prompt", "completion"), _read_completion),
    RowFormat("question_answer", "question/answer", ("question", "answer"), _read_question),
    RowFormat("text", "plain text", ("text",), _read_text),
)
FORMATS_BY_NAME = {known.name: known for known in FORMATS}


def _exchange(question: str, answer: str, row: Row | None = None) -> list[dict[str, Any]]:
    """A question and its answer, with the reasoning that the row has under a key of its own."""
    given = {} if row is None else {key: row[key] for key in REASONING_KEYS[:2] if row.get(key) is not None}
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **given}]


def _text(row: Row, key: str) -> str:
    value = row.get(key)
    if value is None:
        return ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise RowError(f"{key} is {type(value).__name__}, not text")
    return value


def _filled(text: str, key: str) -> str:
    if not text.strip():
        raise RowError(f"the {key} is empty")
    return text


def _turns(value: object, key: str) -> list[Mapping[str, object]]:
    """The list of messages under `key`; as a JSON string too, as CSV files have it."""
    turns = _parsed(value, key)
    if not isinstance(turns, Sequence) or not turns:
        raise RowError(f"{key} is not a list of messages" if not isinstance(turns, Sequence) else f"{key} is empty")
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping):
            raise RowError(f"message {number} of {key} is {type(turn).__name__}, not an object with role and content")
    return list(turns)


def _parsed(value: object, key: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise RowError(f"{key} is text, but not JSON: {error.msg} at character {error.pos + 1}") from error


def _chat(turns: Sequence[Mapping[str, object]], row: Row) -> Chat:
    if row.get("loss_weight") is not None:
        raise RowError("loss_weight is a key of a message, not of a row: write it into the assistant's turns")
    messages = list(read_turns(turns))
    weights = [_numbered(number, turn, _loss_weight) for number, turn in enumerate(turns, 1)]
    system = _text(row, "system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
        weights.insert(0, None)
    _require_answers(messages, weights)
    _name_calls(messages)
    return Chat(tuple(messages), tuple(weights), _tools(row.get("tools")))


def _require_answers(messages: list[dict[str, Any]], weights: list[float | None]) -> None:
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise RowError("the row has no assistant turn, so there is nothing to learn")
    for index in answers:
        message = messages[index]
        filled = message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")
        if not filled and weights[index] != 0:
            raise RowError(f"message {index + 1}: the assistant's answer is empty")


def _name_calls(messages: list[dict[str, Any]]) -> None:
    """Adds matching ids to calls and their results where the row has none; some templates require them."""
    waiting: list[str] = []
    count = 0
    for message in messages:
        if message["role"] == "tool":
            called = waiting.pop(0) if waiting else None
            if called is not None:
                message.setdefault("tool_call_id", called)
            continue
        for call in message.get("tool_calls") or ():
            count += 1
            waiting.append(call.setdefault("id", f"call{count:05d}"))


def read_turns(turns: Sequence[Mapping[str, object]]) -> tuple[dict[str, Any], ...]:
    """The messages of a conversation to be continued, read like those of a row."""
    return tuple(_numbered(number, turn, _message) for number, turn in enumerate(turns, 1))


def _numbered(number: int, turn: Mapping[str, object], read: Callable[[Mapping[str, object]], _Read]) -> _Read:
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


def _role(turn: Mapping[str, object]) -> str:
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
    role, content = _role(turn), _either(turn, "content", "value")
    calls = [turn[key] for key in ("tool_calls", "function_call") if turn.get(key)]
    if content is None and role != "assistant":
        raise RowError(f"no content (its keys: {', '.join(turn)})")
    if _named_role(turn) == "function_call":
        content, calls = "", [_parsed(content, "the function call"), *calls]
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
    if not isinstance(part.get("text"), str):
        raise RowError(f"a content part of type {part['type']!r} without text")
    unused = [key for key, value in part.items() if key not in ("type", "text") and value not in (None, [])]
    if unused:
        raise RowError(f"a content part of type {part['type']!r}: {unknown_key(unused[0], ['type', 'text'])}")
    return part["text"]


def _loss_weight(turn: Mapping[str, object]) -> float | None:
    given = [key for key in ("loss_weight", "weight") if turn.get(key) is not None]
    if not given:
        return None
    if len(given) == 2:
        raise RowError("both loss_weight and weight are given; they mean the same")
    value = turn[given[0]]
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise RowError(f"{given[0]} is {value!r}; it must be a number of at least 0")
    return float(value)


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    calls = _parsed(calls, "tool_calls")
    return [_tool_call(call) for call in ([calls] if isinstance(calls, Mapping) else calls)]


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(f"a tool call without a name: {_excerpt(call)}")
    known = {"name", "arguments"} | _CALL_KEYS
    unused = [key for key, value in function.items() if key not in known and value is not None]
    unused += [key for key, value in call.items() if key not in known | {"function"} and value is not None]
    if unused:
        raise RowError(f"a call of {function['name']}: {unknown_key(unused[0], ['name', 'arguments'])}")
    # Templates write the arguments with `tojson`; a JSON string would come out quoted twice.
    arguments = _parsed(function.get("arguments") or {}, f"the arguments of {function['name']}")
    if not isinstance(arguments, Mapping):
        raise RowError(f"the arguments of {function['name']} are not an object: {_excerpt(arguments)}")
    tool_call = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    return tool_call if call.get("id") is None else {"id": call["id"], **tool_call}


def _tools(value: object) -> tuple[dict[str, Any], ...] | None:
    tools = _parsed(value, "tools") if value else None
    if not tools:
        return None
    if not isinstance(tools, Sequence):
        raise RowError(f"tools is {type(tools).__name__}, not a list of tool definitions")
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError(f"a tool definition without a name: {_excerpt(tool)}")
    return tuple(dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools)


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
