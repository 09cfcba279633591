"""Advice for rows of a shape that no format has: the recipe's line that reads this very row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

QUESTION = ("question", "problem", "query", "prompt", "instruction", "input", "user", "human", "request", "q")
ANSWER = (
    "answer",
    "solution",
    "response",
    "completion",
    "output",
    "target",
    "assistant",
    "reply",
    "chosen",
    "label",
    "a",
)
_ALIASES: Mapping[str, Sequence[str]] = {
    "question": QUESTION,
    "prompt": QUESTION,
    "instruction": QUESTION,
    "answer": ANSWER,
    "completion": ANSWER,
    "output": ANSWER,
    "text": ("content", "document", "body", "passage"),
}
CHOSEN, REJECTED = "chosen", "rejected"
_OF_CHOSEN = (
    "\n    This is supervised fine-tuning on the chosen answers: the rejected ones are not read. Losses of preferences "
    "are\n    methods on the engine (docs/your-method.md)"
)
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*")
_NEVER = re.compile(
    r"(?i)(.*[_-])?(id|uuid|index|idx|hash|split|source|url|date|lang|language|license|path|file|(image|video|audio)s?)"
)


def advice(row: Mapping[str, object], keys: Sequence[str] = ()) -> str:
    """How the recipe can read a row whose format is not known, in lines of a message.

    Args:
        row: as it is.
        keys: what it lacks of the format that it looks like; () where it looks like none.
    """
    found = _chosen(row, keys)
    columns = ", ".join(f"{key}: {_yaml(column)}" for key, column in found.items())
    whole = {**{key: key for key in _known(row, keys)}, **found}
    ends = _OF_CHOSEN if CHOSEN in found.values() and REJECTED in row else ""
    parts = ", ".join(
        f"{json.dumps(key)}: row[{json.dumps(column, ensure_ascii=False)}]" for key, column in whole.items()
    )
    return (
        f"    Name its columns in the recipe, data.columns: {{{columns}}},\n"
        f"    or as a flag, --data.columns '{{{columns}}}',\n"
        "    or make another row of it, data.transform: prepare.py:prepare, with this line in prepare.py:\n"
        f"    def prepare(row): return {{{parts}}}{ends}"
    )


def shown_key(key: object) -> str:
    """A key of a row as a message has it: in quotes where it is empty, or begins or ends with a blank."""
    text = str(key)
    return text if text and text == text.strip() else repr(text)


def shown_keys(row: Iterable[object]) -> str:
    return ", ".join(map(shown_key, row))


def _known(row: Mapping[str, object], keys: Sequence[str]) -> list[str]:
    """The keys of the format that the row looks like which it has, where it lacks some."""
    pairs = (("question", "answer"), ("prompt", "completion"), ("instruction", "output"))
    return [key for pair in pairs if set(keys) & set(pair) for key in pair if key not in keys and key in row]


def _chosen(row: Mapping[str, object], keys: Sequence[str]) -> dict[str, str]:
    """Which column is read under which name: by its name, otherwise by its place."""
    for name, value in row.items():
        if not keys and (key := _key_of_turns(value)) is not None:
            return {key: name}
    taken = set(_known(row, keys))
    texts = [str(name) for name, value in row.items() if _is_text(value) and name not in taken]
    texts = [name for name in texts if not _NEVER.fullmatch(name)] or texts or [str(name) for name in row]
    if not keys:
        keys = ("question", "answer") if len(texts) > 1 else ("text",)
    named = {key: found for key in keys if (found := _named(key, texts)) is not None}
    chosen: dict[str, str] = {}
    for key in keys:
        others = [name for name in texts if name not in (*chosen.values(), *named.values())]
        column = named.get(key, others[0] if others else None)
        chosen[key] = column if column is not None and column not in chosen.values() else f"your_{key}"
    return chosen


def _named(key: str, columns: Sequence[str]) -> str | None:
    """The column with a usual name for this."""
    by_name = {column.casefold(): column for column in reversed(columns)}
    return next((by_name[alias] for alias in _ALIASES.get(key, ()) if alias in by_name), None)


def _key_of_turns(value: object) -> str | None:
    """The key for a list of turns: `messages`, or `conversations` for those of ShareGPT; None for anything else."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value or not isinstance(value[0], Mapping):
        return None
    if "from" in value[0]:
        return "conversations"
    return "messages" if "role" in value[0] else None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _yaml(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False)
