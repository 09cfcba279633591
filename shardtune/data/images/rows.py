"""Rows with images: the row's text with a mark for each image, and the references to its images."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any

import numpy as np

from shardtune.data.encoder import Row, RowError
from shardtune.data.messages import REASONING_KEYS, TEXT_PARTS, role_of, split_reasoning, text_of_part
from shardtune.data.row_formats import (
    MEDIA_KEYS,
    Chat,
    Completion,
    Example,
    Text,
    conversation,
    read_example,
    recognise,
)
from shardtune.data.token_rows import Tokens
from shardtune.errors import counted

IMAGE_MARK = "\ue0f7"
"""Marks the place of an image in a turn until the chat template is rendered."""
IMAGE_TAG = "<image>"
SHOWN_IMAGE = "⟨image⟩ "
"""An image in a text for a reader."""
_OTHER_TAG = re.compile(r"<\|?image[ _-]?(?:\d+|pad|here)?\|?>", re.IGNORECASE)
"""Marks of images in other systems' texts."""
_KEYS = ("images", "image")
_PARTS = ("image", "image_url", "input_image")
_SOURCES = ("image", "image_url", "url", "path", "base64", "bytes", "video")
# The keys of each format that are rendered, in this order.
_SHOWN = {
    "tokens": (),
    "messages": ("system", "messages"),
    "sharegpt": ("system", "conversations"),
    "instruction": ("system", "history", "instruction", "input", "output"),
    "prompt_completion": ("system", "prompt", "completion"),
    "question_answer": ("system", "question", "answer"),
    "text": ("text",),
}
_TURNS = ("messages", "conversations", "prompt", "completion")


def read_image_row(row: Row) -> tuple[Example, list[object]]:
    """The row's text, with an `IMAGE_MARK` in the place of each image, and the references to the images, in that order.

    If the row has no places for them, they go before the text of the first user turn.

    Raises:
        RowError: images and the places for them do not match, or the row holds another medium.
    """
    plain = {key: value for key, value in row.items() if key not in MEDIA_KEYS}
    listed = listed_images(row)
    taken = _Taken(listed)
    for key in _SHOWN[recognise(plain).name]:
        if plain.get(key) is not None:
            plain[key] = taken.value(key, plain[key])
    in_front = bool(listed) and taken.has_none
    if not in_front:
        taken.check()
    example = read_example(plain)
    return (_in_front(example, len(listed)), listed) if in_front else (example, taken.images)


def listed_images(row: Row) -> list[object]:
    """The images that a row lists. Raises `RowError` for one under two keys, and for other media."""
    other = [key for key in MEDIA_KEYS if key not in _KEYS and _is_given(row.get(key))]
    if other:
        raise RowError(f"the row has {other[0]}; of media this model takes images only")
    given = [key for key in _KEYS if _is_given(row.get(key))]
    if not given:
        return []
    if len(given) == 2:
        raise RowError("the row has both image and images")
    value = row[given[0]]
    if isinstance(value, str) and value.lstrip().startswith("["):  # as CSV files have lists
        value = _parsed(value)
    if isinstance(value, np.ndarray):
        return list(value) if value.ndim == 4 else [value]
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview)):
        return list(value)
    return [value]


def mark_images(messages: Sequence[Mapping[str, object]], images: Sequence[object] = ()) -> tuple[Chat, list[object]]:
    """The turns of a conversation to be continued, read like those of a row.

    Args:
        messages: with `<image>` or parts in the places of images.
        images: for these places; if there are none, they go before the last user turn.
    """
    taken = _Taken(images)
    chat = conversation([taken.turn(turn) for turn in messages])
    if images and taken.has_none:
        last_user = [number for number, turn in enumerate(chat.messages) if turn["role"] == "user"][-1:]
        return _before_turn(chat, last_user, len(images)), list(images)
    taken.check()
    return chat, taken.images


def with_places(turns: Sequence[Mapping[str, object]], images: Sequence[object]) -> list[dict[str, Any]]:
    """The turns of a row with a place for each image: where they have none, before the first user turn, as in training.

    Args:
        turns: with `<image>` or parts in the places of images, or without.
        images: that the row lists.
    """
    placed: list[dict[str, Any]] = [dict(turn) for turn in turns]
    taken = _Taken(images)
    for turn in placed:
        taken.turn(turn)
    user = next((turn for turn in placed if role_of(turn) == "user"), None)
    if not images or not taken.has_none or user is None:
        return placed
    key, tags = "content" if user.get("content") is not None else "value", IMAGE_TAG * len(images)
    user[key] = f"{tags}{user[key]}" if isinstance(user[key], str) else [{"type": "text", "text": tags}, *user[key]]
    return placed


def image_parts(text: str, images: Sequence[object]) -> list[dict[str, object]]:
    """The parts of a turn: images in the places of `<image>`, or before the text if it has none."""
    pieces = text.split(IMAGE_TAG) if images else [text]
    if len(pieces) == 1:
        pieces = [""] * len(images) + [text]
    if len(pieces) - 1 != len(images):
        of_both = f"{counted(len(images), 'image')} for {counted(len(pieces) - 1, 'place')}"
        raise RowError(f"the places of images do not match: {of_both} ({IMAGE_TAG})")
    parts: list[dict[str, object]] = []
    for piece, image in zip(pieces, [*images, None], strict=True):
        if piece:
            parts.append({"type": "text", "text": piece})
        if image is not None:
            parts.append({"type": "image", "image": image})
    return parts


def _is_given(value: object) -> bool:
    return value is not None and not (isinstance(value, Sized) and len(value) == 0)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


class _Taken:
    """Collects images in the order of their places; `<image>` and parts without a source take listed ones."""

    def __init__(self, listed: Sequence[object]) -> None:
        self._listed = listed
        self.images: list[object] = []
        self._places: list[int] = []

    def value(self, key: str, value: object) -> object:
        """The value of a key of the row, with its images marked."""
        if isinstance(value, str) and key in (*_TURNS[:2], "history"):
            value = _parsed(value)
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Sequence) and key in _TURNS:
            return [self.turn(turn) if isinstance(turn, Mapping) else turn for turn in value]
        if isinstance(value, Sequence) and key == "history":
            return [[self._said(text) for text in pair] if _is_pair(pair) else pair for pair in value]
        return value

    def turn(self, turn: Mapping[str, object]) -> dict[str, object]:
        """A turn whose content is text."""
        key = "content" if turn.get("content") is not None else "value"
        content = turn.get(key)
        if isinstance(content, str):
            return {**turn, key: self._text(content)}
        if isinstance(content, Sequence):
            others, reasoning = split_reasoning(content)
            text = "".join(self._part(part) for part in others)
            if reasoning is None:
                return {**turn, key: text}
            if any(turn.get(name) is not None for name in REASONING_KEYS):
                raise RowError("reasoning under a key of the message and as a part of its content")
            return {**turn, key: text, REASONING_KEYS[0]: reasoning}
        return dict(turn)

    @property
    def has_none(self) -> bool:
        """Whether there was no place for an image."""
        return not self.images and not self._places

    def check(self) -> None:
        """Raises `RowError` unless each image has its place and each place its image."""
        places, listed = len(self._places), len(self._listed)
        if sorted(self._places) == list(range(listed)):
            return
        if not places:
            raise RowError(f"{counted(listed, 'image')} {'is' if listed == 1 else 'are'} listed, and parts name others")
        if listed == places:  # an index is given more than once
            unshown = min(set(range(listed)) - set(self._places))
            raise RowError(
                f"images[{unshown}] has no place: the parts of type image show others twice, or beyond the list"
            )
        there = f"there {'is' if listed == 1 else 'are'} {counted(listed, 'image')} and {counted(places, 'place')}"
        raise RowError(f"{there} for images ({IMAGE_TAG}, parts of type image)")

    def _text(self, text: str) -> str:
        if IMAGE_MARK in text:
            raise RowError(f"the text holds the character U+{ord(IMAGE_MARK):04X}, which is reserved for images")
        pieces = text.split(IMAGE_TAG)
        for _ in pieces[1:]:
            self._take(len(self._places))
        return IMAGE_MARK.join(pieces)

    def _said(self, text: object) -> object:
        return self._text(text) if isinstance(text, str) else text

    def _part(self, part: object) -> str:
        if isinstance(part, str):
            return self._text(part)
        if not isinstance(part, Mapping):
            part = {"type": type(part).__name__}
        kind = part.get("type")
        if kind in TEXT_PARTS:
            return self._text(text_of_part(part))
        if kind not in _PARTS:
            raise RowError(f"a content part of type {kind!r}; this model takes text and images")
        given = [key for key in _SOURCES if part.get(key) is not None]
        source = part[given[0]] if given else None
        is_frame = isinstance(part.get("video"), str)
        known = {"type", *(("video", "seconds") if is_frame else (given or ["index"])[:1])}
        unused = [key for key, value in part.items() if key not in known and value not in (None, [], "")]
        # Data sets that have all parts in one form number the images of the row, those with a source too.
        unused = [key for key in unused if not (key == "index" and given)]
        unused = [key for key in unused if not (key == "detail" and part[key] == "auto")]
        if unused:
            raise RowError(
                f"a content part of type {kind!r} has {unused[0]}, which is not read: it names an image, its index in "
                "images, or neither (data.transform leaves the key out)"
            )
        if source is None:
            index = part.get("index")
            self._take(len(self._places) if index is None else _whole(index))
        else:
            self.images.append(part if isinstance(part.get("video"), str) else source)
        return IMAGE_MARK

    def _take(self, number: int) -> None:
        self._places.append(number)
        self.images += self._listed[number : number + 1]


def _whole(index: object) -> int:
    """The number of an image in the row's list."""
    if isinstance(index, float) and index.is_integer():
        index = int(index)
    if isinstance(index, int) and not isinstance(index, bool) and index >= 0:
        return index
    raise RowError(f"the index of an image is {index!r:.40}, not its number in images, from 0")


def _is_pair(pair: object) -> bool:
    return isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2


def _refuse_other_tags(texts: Iterable[object]) -> None:
    """Refuse texts whose images would go before them although they have marks in other words."""
    for text in texts:
        found = _OTHER_TAG.search(text) if isinstance(text, str) else None
        if found is not None:
            raise RowError(
                f"{found[0]!r} is no place of an image: write {IMAGE_TAG} where it belongs, or before the text if "
                f"{found[0]} is to stay as it is"
            )


def _in_front(example: Example, count: int) -> Example:
    marks = IMAGE_MARK * count
    if isinstance(example, Tokens):
        raise RowError("the row has input_ids and images; a row with images is given as text")
    if isinstance(example, Text):
        _refuse_other_tags([example.text])
        return Text(marks + example.text)
    if isinstance(example, Completion):
        _refuse_other_tags([example.prompt, example.completion])
        return Completion(marks + example.prompt, example.completion)
    return _before_turn(example, [n for n, turn in enumerate(example.messages) if turn["role"] == "user"][:1], count)


def _before_turn(chat: Chat, numbers: Sequence[int], count: int) -> Chat:
    """The conversation with images before the text of a turn."""
    if not numbers:
        raise RowError("the row has images, but no user turn to put them into")
    _refuse_other_tags(turn["content"] for turn in chat.messages)
    messages = list(chat.messages)
    turn = messages[numbers[0]]
    messages[numbers[0]] = {**turn, "content": IMAGE_MARK * count + str(turn["content"])}
    return replace(chat, messages=tuple(messages))
