"""Text of a turn that a chat template leaves out, or prints otherwise than the row has it."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

# Private-use characters like those of `rendering` and `outline`, but others.
_OPEN, _CLOSE = "\ue0f5\ue0fa", "\ue0fb\ue0f6"
_SHOWN = 30


@dataclass(frozen=True, slots=True)
class Change:
    """The text of turn `message` (its index) is not printed as it is; `reason` is to be shown."""

    message: int
    reason: str


def quoted(text: str) -> str:
    """The text as `tojson` writes it, without the quotation marks around it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def num_common(text: str, other: str) -> int:
    """The length of the common beginning of two texts."""
    return sum(1 for _ in takewhile(bool, map(str.__eq__, text, other)))


def pieces_of(content: str, separator: str) -> list[str]:
    """The texts of a turn between its separators, without the blanks around them, which templates may strip."""
    pieces = content.split(separator) if separator else [content]
    return [piece.strip() for piece in pieces if piece.strip()]


def is_printed(piece: str, text: str) -> bool:
    """Whether a text has a piece, as it is or as `tojson` writes it."""
    return piece in text or quoted(piece) in text


def enclosed(content: str, separator: str) -> str:
    """The content with marks around each of its `pieces_of`; the marks alone where it has none."""
    pieces = content.split(separator) if separator else [content]
    shown = [f"{_OPEN}{piece.strip()}{_CLOSE}" if piece.strip() else "" for piece in pieces]
    return separator.join(shown) if any(shown) else f"{_OPEN}{_CLOSE}"


def is_left_out(marked: str) -> bool:
    """Whether a rendering has none of the marks of a turn that is `enclosed`."""
    return _OPEN not in marked and _CLOSE not in marked


def values_of(arguments: object, place: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """The texts, numbers and truth values in the arguments of a call that are not empty, each with its place."""
    if isinstance(arguments, Mapping | list):
        pairs = arguments.items() if isinstance(arguments, Mapping) else enumerate(arguments)
        for key, value in pairs:
            yield from values_of(value, (*place, key))
    elif arguments is not None and str(arguments).strip():
        yield place, arguments


def enclosed_value(arguments: Any, place: Sequence[str | int]) -> Any:
    """The arguments with marks around the text at a place, or instead of a value that is no text."""
    if not place:
        return f"{_OPEN}{arguments if isinstance(arguments, str) else ''}{_CLOSE}"
    changed: Any = dict(arguments) if isinstance(arguments, Mapping) else list(arguments)
    changed[place[0]] = enclosed_value(arguments[place[0]], place[1:])
    return changed


def is_value_printed(value: object, text: str) -> bool:
    """Whether a text has a value of arguments, as it is or as JSON or Python write it, in a text within a text too."""
    forms = {value.strip()} if isinstance(value, str) else {str(value), json.dumps(value, default=str)}
    for _ in range(2):
        if any(form in text for form in forms):
            return True
        forms = {written for form in forms for written in (quoted(form), json.dumps(form)[1:-1], repr(form)[1:-1])}
    return any(form in text for form in forms)


def has_both_marks(marked: str) -> bool:
    """Whether a rendering has both marks of one value, which may be written as `\\ue0f5` there."""
    written = marked.lower()
    return all(mark in written or f"u{ord(mark):04x}" in written for mark in (_OPEN[0], _CLOSE[-1]))


def is_at_its_place(piece: str, marked: str, text: str) -> bool:
    """Whether a piece, which a text may have elsewhere as well, stands there where its turn is printed.

    Args:
        piece: the only one of its turn.
        marked: the rendering with the turn `enclosed`.
        text: the rendering as it is.
    """
    if is_printed(f"{_OPEN}{piece}{_CLOSE}", marked):
        return True
    head, opened, _ = marked.partition(_OPEN)
    _, closed, tail = marked.rpartition(_CLOSE)
    if opened:
        return not text.startswith(head) or text[len(head) :].lstrip().startswith(piece)
    return not closed or not text.endswith(tail) or text.removesuffix(tail).rstrip().endswith(piece)


def reason_of_change(pieces: Sequence[str], marked: str, text: str, role: str) -> str:
    """How the turn of a role is printed, of which one of the pieces is not printed as it is.

    Args:
        pieces: of the turn.
        marked: the rendering with the turn `enclosed`.
        text: the turn as it is rendered, or the whole rendering.
        role: of the turn.
    """
    turn = f"the {role}'s turn"
    shown = [part.partition(_CLOSE) for part in marked.split(_OPEN)[1:]]
    if len(shown) < len(pieces):
        return f"the chat template leaves out part of {turn}"
    for piece, (printed, close, _) in zip(pieces, shown, strict=False):
        if not close:
            # The marks are text as well: where a text is cut at a length, its own rendering has more of it.
            given = piece[_num_printed(piece, text) :][:_SHOWN]
            return f"the chat template leaves out part of {turn}, from {given!r} on"
        if printed not in (piece, quoted(piece)):
            place = num_common(piece, printed)
            instead, given = (one[place : place + _SHOWN] for one in (printed, piece))
            return f"the chat template changes {turn}: it prints {instead!r} where the row has {given!r}"
    return f"the chat template changes {turn}"


def _num_printed(piece: str, text: str) -> int:
    """How many characters the longest beginning of a piece has that a text has."""
    return bisect_left(range(1, len(piece) + 1), 1, key=lambda size: int(piece[:size] not in text))
