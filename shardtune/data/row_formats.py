"""The supported row formats: recognised by their keys and converted to one of three types."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from shardtune.data.encoder import Row, RowError
from shardtune.data.messages import REASONING_KEYS, excerpt, loss_weight_of, numbered, parsed, read_turns, role_of
from shardtune.data.row_shapes import advice, shown_keys
from shardtune.data.token_rows import TOKEN_COLUMNS, Tokens, read_tokens
from shardtune.errors import DataError

ARGUMENTS = "chat_template_kwargs"
"""The column of a row's own values for the chat template."""
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, the input of a chat template.

    Attributes:
        messages: role (system, user, assistant, tool), content (a string), `tool_calls`, `tool_call_id`, `name`,
            `reasoning_content`, and other keys of the row, for the chat template.
        weights: the `loss_weight` of each message, None where the row has none.
        tools: tool definitions as JSON schemas, None without.
        arguments: the row's own values for the chat template, by name.
    """

    messages: tuple[dict[str, Any], ...]
    weights: tuple[float | None, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its continuation; rendered without a chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text, every token of it a target; rendered without a chat template."""

    text: str


Example = Chat | Completion | Text | Tokens


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One supported format.

    Attributes:
        name: for `format:` of a recipe.
        title: in the log.
        keys: a row of it must have.
        read: a row.
        reads: further keys that `read` looks at; where prompt and completion are text, only `keys`.
    """

    name: str
    title: str
    keys: tuple[str, ...]
    read: Callable[[Row], Example]
    reads: tuple[str, ...] = ()


def present(row: Row) -> Row:
    """The row with None for NaN, by which pandas marks what is missing."""
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}


def recognise(row: Row) -> RowFormat:
    """The first format whose keys the row has. Raises `RowError` with the row's keys and the supported formats."""
    row = present(row)
    for known in FORMATS:
        if all(row.get(key) is not None for key in known.keys):
            return known
    _refuse_nulls(row, FORMATS)
    keys = shown_keys(row) or "none"
    for known in FORMATS:
        missing = [key for key in known.keys if row.get(key) is None]
        if len(missing) < len(known.keys):
            raise RowError(
                f"the row looks like {known.title}, but has no {' and no '.join(missing)} (its keys: {keys}).\n"
                + advice(row, missing)
            )
    formats = ", ".join("/".join(known.keys) for known in FORMATS)
    raise RowError(
        f"the row has a format that is not known. Its keys: {keys}.\n    Known rows: {formats}.\n" + advice(row)
    )


def _refuse_nulls(row: Row, formats: Sequence[RowFormat]) -> None:
    """Refuse a row that has all keys of a format, some of them null: another name for a column would be no remedy."""
    complete = [known for known in formats if all(key in row for key in known.keys)]
    if not complete:
        return
    known = min(complete, key=lambda one: sum(row[key] is None for key in one.keys) / len(one.keys))
    empty = [key for key in known.keys if row[key] is None]
    if empty:
        verb = "are" if len(empty) > 1 else "is"
        raise RowError(f"the row looks like {known.title}, but its {' and '.join(empty)} {verb} null")


def format_of(row: Row, name: str | None = None) -> RowFormat:
    """The format of a row: the one that the recipe names, otherwise the one that is recognised."""
    return recognise(row) if name is None else FORMATS_BY_NAME[name]


def read_example(row: Row, name: str | None = None) -> Example:
    """The row as a conversation, a prompt with its completion, text, or tokens.

    Args:
        name: the format, if the recipe names it; otherwise it is recognised.
    """
    row = present(row)
    known = format_of(row, name)
    _require_keys(row, known)
    media = [key for key in MEDIA_KEYS if row.get(key)]
    if media:
        raise RowError(f"the row has {media[0]}, but this model takes text only")
    _refuse_weight(row, known)
    return known.read(row)


def has_turns(row: Row, name: str | None = None) -> bool:
    """Whether a row of one of these formats is a conversation; the others are trained as they are written."""
    known = format_of(row, name)
    return known.name not in ("tokens", "text", "prompt_completion") or not isinstance(row.get("prompt", ""), str)


def _refuse_weight(row: Row, known: RowFormat) -> None:
    """Refuse a weight of the whole row, which no format has; a column `weight` of text is another thing."""
    weight = row.get("weight")
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    key = "loss_weight" if row.get("loss_weight") is not None else "weight" if is_number else None
    if key is None:
        return
    if known.name == "tokens":
        remedy = "loss_weights has one for each token"
    elif known.name == "text" or (known.name == "prompt_completion" and isinstance(row["prompt"], str)):
        remedy = "text has none; give messages, or leave such rows out (data.transform)"
    else:
        remedy = "write it into the assistant's turns"
    other = "" if key == "loss_weight" else "; a column of another meaning needs another name (data.transform)"
    raise RowError(f"{key} ({row[key]}) is a key of a message, not of a row: {remedy}{other}")


@dataclass(frozen=True, slots=True)
class ChatTitle:
    """Names rows that have one of these formats and may hold more: images.

    Attributes:
        name: of a row, raising `RowError` for one that cannot be used.
    """

    name: Callable[[Row], str]

    def __call__(self, row: Row) -> str:
        return self.name(row)


def unread_keys(row: Row, known: RowFormat) -> list[str]:
    """The keys of a row that its format does not look at."""
    is_text = known.name == "prompt_completion" and isinstance(row.get("prompt"), str)
    read = {*known.keys, *MEDIA_KEYS, *(() if is_text else known.reads)}
    return [str(key) for key in row if key not in read]


def check_columns(columns: Mapping[str, str]) -> None:
    """Raises `DataError` for a name in `data.columns` that no format reads, so that its column would be in no row."""
    known = sorted({key for known in FORMATS for key in (*known.keys, *known.reads)} | set(MEDIA_KEYS))
    for name, column in columns.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise DataError(
                f"the column {column!r} is to be read as {name!r}, which no format of rows has",
                where="data.columns",
                remedy=f"did you mean {near[0]}?" if near else f"the names are {', '.join(known)}",
            )


def check_columns_read(row: Row, columns: Mapping[str, str], known: RowFormat) -> None:
    """Raises `DataError` for a name in `data.columns` that the format of a row does not read."""
    unread = [name for name in columns if name in unread_keys(row, known)]
    if not unread:
        return
    other = next((one.name for one in FORMATS if unread[0] in one.keys), None)
    raise DataError(
        f"the column {columns[unread[0]]!r} is to be read as {unread[0]!r}, and the first row is {known.title}, which "
        "has none",
        where="data.columns",
        remedy="leave it out"
        + (f", or name the format of the rows: {{path: …, format: {other}}}" if other is not None else ""),
    )


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
    _refuse_nulls(row, [known])
    missing = [key for key in known.keys if row.get(key) is None]
    if missing:
        raise RowError(
            f"the row has no {' and no '.join(missing)}, which {known.title} needs (its keys: {shown_keys(row)}).\n"
            + advice(row, missing)
        )


def as_row(example: Example) -> dict[str, object]:
    """The example as a row that `read_example` recognises and reads back unchanged."""
    if isinstance(example, Tokens):
        weights = {"loss_weights": example.weights.tolist()} if example.marked else {}
        return {"input_ids": example.ids.tolist(), **weights}
    if isinstance(example, Text):
        return {"text": example.text}
    if isinstance(example, Completion):
        return {"prompt": example.prompt, "completion": example.completion}
    pairs = zip(example.messages, example.weights, strict=True)
    messages = [message if weight is None else {**message, "loss_weight": weight} for message, weight in pairs]
    row = {"messages": messages, "tools": list(example.tools) if example.tools else None}
    return {**row, ARGUMENTS: dict(example.arguments)} if example.arguments else row


def rename_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """The row with the standard names: `columns` maps each to the row's own name for it."""
    if not columns:
        return row
    missing = [name for name in columns.values() if name not in row]
    if missing:
        near = get_close_matches(missing[0], [str(key) for key in row], 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise RowError(
            f"data.columns names {missing[0]!r}, which the row does not have (its keys: {shown_keys(row)}){meant}"
        )
    taken = set(columns.values())
    kept = {key: value for key, value in row.items() if key not in taken}
    return {**kept, **{name: row[column] for name, column in columns.items()}}


def replaced_columns(row: Row, columns: Mapping[str, str]) -> list[str]:
    """The columns of a row in whose place `rename_columns` puts others, and that it gives no other name."""
    return [name for name in columns if name in row and name not in columns.values()]


def _read_messages(row: Row) -> Chat:
    return _chat(_turns(row["messages"], "messages"), row)


def _read_sharegpt(row: Row) -> Chat:
    return _chat(_turns(row["conversations"], "conversations"), row)


def _read_alpaca(row: Row) -> Chat:
    question = "\n\n".join(text for text in (_text(row, "instruction"), _text(row, "input")) if text)
    turns = [turn for pair in _history(row) for turn in _exchange(*pair)]
    return _chat([*turns, *_exchange(_filled(question, "instruction"), _text(row, "output"), row)], row)


def _history(row: Row) -> list[tuple[str, str]]:
    pairs = parsed(row.get("history") or [], "history")
    if not isinstance(pairs, Sequence) or not all(_is_pair(pair) for pair in pairs):
        raise RowError("history is not a list of [question, answer] pairs")
    texts = [[_text({"history": text}, "history") for text in pair] for pair in pairs]
    return [
        (_filled(question, "question in history"), _filled(answer, "answer in history")) for question, answer in texts
    ]


def _is_pair(pair: object) -> bool:
    return isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2


def _read_question(row: Row) -> Chat:
    return _chat(_exchange(_filled(_text(row, "question"), "question"), _text(row, "answer"), row), row)


def _read_completion(row: Row) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        _refuse_arguments(row)
        return Completion(prompt, _filled(completion, "completion"))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise RowError("prompt and completion must both be text, or both lists of messages")
    before = _turns(prompt, "prompt")
    for number, turn in enumerate(before, 1):
        weight = numbered(number, turn, loss_weight_of) if role_of(turn) == "assistant" else None
        if weight not in (None, 0, 1):
            raise RowError(
                f"message {number} of the prompt has the loss_weight {weight:g}, and only the completion is trained; "
                "begin the completion with it, or give messages"
            )
    # Only the completion is trained, so assistant turns in the prompt get weight 0.
    given = [{**turn, "loss_weight": 0, "weight": None} if role_of(turn) == "assistant" else turn for turn in before]
    return _chat([*given, *_turns(completion, "completion")], row)


def _read_text(row: Row) -> Text:
    _refuse_arguments(row)
    return Text(_filled(_text(row, "text"), "text"))


def _refuse_arguments(row: Row) -> None:
    if row.get(ARGUMENTS):
        raise RowError(f"{ARGUMENTS} is for a chat template, which plain text has none of; give messages")


_OF_CHATS = ("system", "tools", ARGUMENTS)
_OF_ANSWERS = (*_OF_CHATS, *REASONING_KEYS[:2])
FORMATS = (
    RowFormat("tokens", "tokens", ("input_ids",), read_tokens, TOKEN_COLUMNS),
    RowFormat("messages", "chat messages", ("messages",), _read_messages, _OF_CHATS),
    RowFormat("sharegpt", "ShareGPT conversations", ("conversations",), _read_sharegpt, _OF_CHATS),
    RowFormat(
        "instruction",
        "instruction/input/output",
        ("instruction", "output"),
        _read_alpaca,
        ("input", "history", *_OF_ANSWERS),
    ),
    RowFormat("prompt_completion", "prompt/completion", ("prompt", "completion"), _read_completion, _OF_CHATS),
    RowFormat("question_answer", "question/answer", ("question", "answer"), _read_question, _OF_ANSWERS),
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
    if isinstance(value, float) and math.isinf(value):
        raise RowError(f"{key} is the number {value}, not text")
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
    turns = parsed(value, key)
    if not isinstance(turns, Sequence) or not turns:
        raise RowError(f"{key} is not a list of messages" if not isinstance(turns, Sequence) else f"{key} is empty")
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping):
            raise RowError(f"message {number} of {key} is {type(turn).__name__}, not an object with role and content")
    return list(turns)


def conversation(turns: Sequence[Mapping[str, object]]) -> Chat:
    """The messages of a row, or of a prompt, with their weights."""
    weights = (numbered(number, turn, loss_weight_of) for number, turn in enumerate(turns, 1))
    return Chat(read_turns(turns), tuple(weights))


def _chat(turns: Sequence[Mapping[str, object]], row: Row) -> Chat:
    opened = conversation(turns)
    messages, weights = list(opened.messages), list(opened.weights)
    system = _text(row, "system")
    check_system(system, messages[0])
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
        weights.insert(0, None)
    _require_answers(messages, weights)
    name_calls(messages)
    return Chat(tuple(messages), tuple(weights), read_tools(row.get("tools")), read_arguments(row.get(ARGUMENTS)))


def check_system(system: str, first: Mapping[str, object]) -> None:
    """Raises `RowError` if a row has two system prompts, which differ.

    Args:
        system: of the row's column.
        first: the first message of its conversation, as it is read.
    """
    if system and first["role"] == "system" and first["content"] != system:
        raise RowError(
            f"the column system is {excerpt(system)}, and the conversation begins with the system turn "
            f"{excerpt(first['content'])}; keep one of them"
        )


def _require_answers(messages: list[dict[str, Any]], weights: list[float | None]) -> None:
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise RowError("the row has no assistant turn, so there is nothing to learn")
    for index in answers:
        message = messages[index]
        filled = message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")
        if not filled and weights[index] != 0:
            raise RowError(f"message {index + 1}: the assistant's answer is empty")


def name_calls(messages: Sequence[dict[str, Any]]) -> None:
    """Adds matching ids to calls and their results where the row has none; some templates require them.

    A result without an id answers the first call before it that no other result answers; those of earlier questions,
    and of turns before the last results, wait no longer. A call without an id has that of a result that names none of
    the others.
    """
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    count = 0
    for message in messages:
        made = message.get("tool_calls") or ()
        if message["role"] == "tool":
            results.append(message)
        elif (made and results) or message["role"] != "assistant":
            count = _pair(calls, results, count)
            calls, results = [], []
        calls += made
    _pair(calls, results, count)


def _pair(calls: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]], count: int) -> int:
    """Give ids to calls and to the results that follow them; returns how many calls there were so far."""
    waiting = list(calls)
    for result in results:
        own = result.get("tool_call_id")
        alike = [call for call in waiting if call.get("id") == own] or [call for call in waiting if "id" not in call]
        if own is not None and alike:
            called = alike[0]
            called.setdefault("id", own)
            waiting.remove(called)
    for number, call in enumerate(calls, count + 1):
        call.setdefault("id", f"call{number:05d}")
    for result in results:
        if waiting and result.get("tool_call_id") is None:
            result["tool_call_id"] = waiting.pop(0)["id"]
    return count + len(calls)


def read_arguments(value: object) -> dict[str, Any]:
    """A row's own values for the chat template, a mapping or its JSON text; null counts as not given.

    Raises:
        RowError: it is something else.
    """
    given = parsed(value, ARGUMENTS) if value else {}
    if not isinstance(given, Mapping):
        raise RowError(f"{ARGUMENTS} is {excerpt(value)}, not a mapping of names to values")
    return {str(name): one for name, one in given.items() if one is not None}


def read_tools(value: object) -> tuple[dict[str, Any], ...] | None:
    """The definitions of a row's tools, a list or its JSON text; None without. Raises `RowError` for others."""
    tools = parsed(value, "tools") if value else None
    if not tools:
        return None
    if not isinstance(tools, Sequence):
        raise RowError(f"tools is {type(tools).__name__}, not a list of tool definitions")
    tools = [parsed(tool, "a tool definition") for tool in tools]
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError(f"a tool definition without a name: {excerpt(tool)}")
    return tuple(dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools)
