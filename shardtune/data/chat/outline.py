"""The text that a chat template writes around turns, found once for all conversations of one shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardtune.data.chat.changes import num_common, quoted
from shardtune.data.chat.reasoning import TAGS
from shardtune.data.row_formats import Chat

# Private-use characters like those of `template`, but others: a conversation may hold both.
_PROBE = "\ue0f3\ue0f4"

Shape = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """The assistant's turn `message` (its index): characters `[start, stop)` of the rendering, end-of-turn included."""

    message: int
    start: int
    stop: int


# The filters that templates apply to the text of a turn: none, `trim`, `tojson`, or both.
_EDITS: tuple[Callable[[str], str], ...] = (str, quoted, str.strip, lambda text: quoted(text.strip()))


def _probe(number: object) -> str:
    """A text that each edit changes into another one."""
    return f' \n"{_PROBE}{number}" \n'


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of piece `number` of the conversation, which the template edits in way `edit`."""

    number: int
    edit: int


@dataclass(frozen=True, slots=True)
class _Gap:
    """A part of a rendering that differs between conversations.

    Attributes:
        message: the assistant's turn; None for tool definitions.
        num_closing: how many characters of the run after the gap end the turn.
    """

    message: int | None
    num_closing: int = 0


def shape_of(chat: Chat, separator: str) -> Shape:
    """Everything a template's layout of a conversation depends on, apart from the text of its turns."""
    given = tuple((name, type(value).__name__, value) for name, value in sorted(chat.arguments.items()))
    return (bool(chat.tools), given, *(_shape_of_turn(message, separator) for message in chat.messages))


def _shape_of_turn(message: dict, separator: str) -> Shape:
    content = message["content"]
    keys = tuple(sorted(message))
    if message["role"] == "assistant":
        calls = len(message.get("tool_calls") or ())
        return (*keys, calls, bool(content.strip()), TAGS.search(content) is not None)
    return (message["role"], *keys, *(piece if not piece.strip() else None for piece in _pieces(content, separator)))


def _pieces(content: str, separator: str) -> list[str]:
    return content.split(separator) if separator else [content]


def given_pieces(chat: Chat, separator: str) -> list[str]:
    """The pieces of text that the conversation gives, which is all but the assistant's, in order."""
    contents = [message["content"] for message in chat.messages if message["role"] != "assistant"]
    return [piece for content in contents for piece in _pieces(content, separator) if piece.strip()]


def probed(chat: Chat, separator: str) -> Chat:
    """The conversation with a numbered probe in place of each given piece of text."""
    numbers = iter(range(len(given_pieces(chat, separator))))

    def content(text: str) -> str:
        pieces = [_probe(next(numbers)) if piece.strip() else piece for piece in _pieces(text, separator)]
        return separator.join(pieces)

    messages = [
        message if message["role"] == "assistant" else {**message, "content": content(message["content"])}
        for message in chat.messages
    ]
    return replace(chat, messages=tuple(messages))


@dataclass(frozen=True, slots=True)
class Outline:
    """The part of a rendering that is the same for all conversations of one shape.

    For a question and an answer in ChatML: run 0 is `<|im_start|>user⏎`, piece 0 and
    `<|im_end|>⏎<|im_start|>assistant⏎`; then comes the gap of message 1, which is the whole answer up to its
    `<|im_end|>`; run 1 is `<|im_end|>⏎`.

    Attributes:
        runs: literal texts and places of given pieces; one run more than there are gaps between them.
        gaps: the parts between two runs: an assistant's turn, or tool definitions.
        prompt_is_prefix: the rendering begins with the prompt of its last answer.
    """

    runs: tuple[tuple[str | _Slot, ...], ...]
    gaps: tuple[_Gap, ...]
    prompt_is_prefix: bool

    @classmethod
    def learn(
        cls,
        text: str,
        pieces: int,
        spans: Sequence[Span],
        endings: Sequence[str],
        befores: Sequence[str | None] | None,
        prompt: str | None,
        without_tools: str | None,
    ) -> Outline | None:
        """The outline of a `probed` conversation; None where it may not hold for others of the same shape.

        Args:
            text: its rendering.
            pieces: how many probes it has.
            spans: of its assistant turns.
            endings: the token that each of them ends with, "" where it has none.
            befores: for each of them the rendering up to its beginning; None if the template marks its turns.
            prompt: the rendering up to the beginning of the last of them; None where it cannot be rendered.
            without_tools: the rendering without tool definitions, where there are any.
        """
        # If a turn does not begin where the prompt ends, its beginning depends on its text.
        if befores is not None and any(
            before is None or _tail(before) != _tail(text[: span.start])
            for span, before in zip(spans, befores, strict=True)
        ):
            return None
        gaps = [
            (span.start, span.stop - len(ending), _Gap(span.message, len(ending)))
            for span, ending in zip(spans, endings, strict=True)
        ]
        if without_tools is not None:
            gaps.append((*_difference(text, without_tools), _Gap(None)))
        gaps.sort(key=lambda gap: gap[:2])
        bounds = [0, *(bound for start, stop, _ in gaps for bound in (start, stop)), len(text)]
        slots = {edit(_probe(n)): _Slot(n, how) for n in range(pieces) for how, edit in enumerate(_EDITS)}
        runs = tuple(
            tuple(_parts(text[start:stop], slots)) for start, stop in zip(bounds[::2], bounds[1::2], strict=True)
        )
        found = {part.number for run in runs for part in run if isinstance(part, _Slot)}
        if bounds != sorted(bounds) or len(found) != pieces:
            return None
        is_prefix = prompt == text[: spans[-1].start]
        return cls(runs, tuple(gap for _, _, gap in gaps), is_prefix)

    def find(self, chat: Chat, text: str, separator: str) -> list[Span] | None:
        """The assistant's turns in the rendering of a conversation; None unless there is exactly one way to find them.

        Every character outside of the gaps is compared with the expected one.
        """
        pieces = given_pieces(chat, separator)
        runs = [
            "".join(part if isinstance(part, str) else _EDITS[part.edit](pieces[part.number]) for part in run)
            for run in self.runs
        ]
        bounds = _gaps_between(text, runs)
        if bounds is None or any(start == stop for start, stop in bounds):
            return None
        return [
            Span(gap.message, start, stop + gap.num_closing)
            for gap, (start, stop) in zip(self.gaps, bounds, strict=True)
            if gap.message is not None
        ]


def _gaps_between(text: str, runs: Sequence[str]) -> list[tuple[int, int]] | None:
    """`[start, stop)` of the parts between the runs; None if a run is missing, or there is more than one solution.

    With the first and the last run at the ends, the others are sought from the left and from the right: "a|b|b|c" in
    "a1b2b3c" is found at the same places both ways, "a|b|c" is not.
    """
    first, last = len(runs[0]), len(text) - len(runs[-1])
    if first > last or not (text.startswith(runs[0]) and text.endswith(runs[-1])):
        return None
    leftmost, rightmost = [first], [last]
    for run in runs[1:-1]:
        place = text.find(run, leftmost[-1], last)
        if place < 0:
            return None
        leftmost += [place, place + len(run)]
    for run in reversed(runs[1:-1]):
        place = text.rfind(run, first, rightmost[-1])
        rightmost += [place + len(run), place]
    bounds = [*leftmost, last]
    is_only_way = bounds == [first, *reversed(rightmost)]
    return list(zip(bounds[::2], bounds[1::2], strict=True)) if is_only_way else None


def _parts(text: str, slots: Mapping[str, _Slot]) -> list[str | _Slot]:
    longest_first = sorted(slots, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if slots else [text]
    return [slots.get(piece, piece) for piece in pieces if piece]


def _tail(text: str) -> str:
    """The text after the last probe."""
    return text[text.rfind(_PROBE) + 1 :]


def _difference(text: str, other: str) -> tuple[int, int]:
    """`[start, stop)` of the part of a text that another one has differently, or not at all."""
    start = num_common(text, other)
    same = num_common(text[::-1], other[::-1])
    return start, len(text) - min(same, min(len(text), len(other)) - start)
