"""A value of a recipe in a message, as it is written in a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NAMES: Mapping[object, str] = {None: "null", True: "true", False: "false"}


def as_written(value: object) -> str:
    """A value as a recipe has it: a path, a pattern or a list of them as they are typed, without escapes.

    Only a text that could not be seen otherwise, as one of blanks, is in quotes.
    """
    if value is None or isinstance(value, bool):
        return NAMES[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_written(inner) for inner in value) + "]"
    if isinstance(value, str | Path):
        text = str(value)
        return text if text and text == text.strip() else f"'{text}'"
    return str(value) if isinstance(value, int | float) else repr(value)
