"""The encoder of vision-language models: chats and texts with images to tokens with their targets marked."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shardtune.batch import Prompt, Sample
from shardtune.data.chat import ChatEncoder, TrainOn
from shardtune.data.encoder import Row, RowDropped, RowError, TooLong
from shardtune.data.formats import MEDIA_KEYS, Chat, Completion, Text, read_example, recognise
from shardtune.data.image_text import Expanded, ImageText
from shardtune.data.images import StoredImage, read_image, to_fields
from shardtune.data.template import ChatTemplate, Rendering, Span, missing_template
from shardtune.errors import DataError

IMAGE_MARK = "\ue0f7"
"""Stands for an image in a turn until the chat template is rendered; no text has it."""
IMAGE_TAG = "<image>"
IMAGE_STOP = "image_stop"
"""The field of a sample that says where its last image ends, in tokens; no row is cut before that."""
ENCODING_VERSION = 1
_PARTS = ("image", "image_url", "input_image")
_SOURCES = ("image", "image_url", "url", "path", "base64", "bytes", "video")
_PROBE = "\ue0f5\ue0f6"


class ImageTemplate(ChatTemplate):
    """A chat template that is given turns as parts of text and image, or as text where it takes no parts.

    Args:
        text: the Jinja source.
        images: the model's processor.
    """

    def __init__(self, text: str, images: ImageText) -> None:
        super().__init__(text, images.tokenizer)
        self._placeholder = images.placeholder
        self._takes_parts = self._shows(takes_parts=True)
        if not self._takes_parts and not self._shows(takes_parts=False):
            raise DataError(
                f"the chat template leaves out images: it writes no {images.placeholder!r} for one",
                where="the chat template",
                remedy="use the template of the model's own processor (data.chat_template: null)",
            )

    def _shows(self, *, takes_parts: bool) -> bool:
        """Whether a turn with an image comes out with its placeholder and its text."""
        self._takes_parts = takes_parts
        turns = [{"role": "user", "content": f"{IMAGE_MARK}{_PROBE}"}, {"role": "assistant", "content": _PROBE}]
        try:
            shown = self.render(turns, None)
        except RowError:
            return False
        return shown.count(_PROBE) == 2 and shown.count(self._placeholder) == 1

    def _render(
        self, messages: Sequence[dict], tools: Sequence[dict] | None, prompt: bool, marked: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        shown = [{**message, "content": self._content(message["content"])} for message in messages]
        return super()._render(shown, tools, prompt, marked)

    def _content(self, content: str) -> Any:
        if not self._takes_parts:
            return content.replace(IMAGE_MARK, self._placeholder)
        parts: list[dict[str, str]] = []
        for number, text in enumerate(content.split(IMAGE_MARK)):
            parts += [{"type": "image"}] * bool(number) + [{"type": "text", "text": text}] * bool(text)
        return parts


class ImageChatEncoder(ChatEncoder):
    """Renders a row with its images, tokenises the text once, and marks the tokens that are targets.

    Images stand in `images` (or `image`) with `<image>` where they belong, or as parts of a turn's content. Their
    tokens are counted by their sizes; pixels are read when a micro-batch is made.

    Args:
        images: the model's processor at work.
        template: the Jinja text of the chat template; None is an error as soon as a conversation comes.
        train_on, system_prompt, max_length, on_too_long, with_prompts: as for `ChatEncoder`. A row that would be cut
            before the end of its last image is left out instead.
        folder: from where the paths in rows begin.
    """

    def __init__(
        self,
        images: ImageText,
        template: str | None,
        *,
        train_on: TrainOn = "assistant",
        system_prompt: str | None = None,
        max_length: int = 2048,
        on_too_long: TooLong = "truncate",
        with_prompts: bool = False,
        folder: Path | None = None,
    ) -> None:
        super().__init__(
            images.tokenizer, None, train_on=train_on, system_prompt=system_prompt, max_length=max_length,
            on_too_long=on_too_long, with_prompts=with_prompts,
        )  # fmt: skip
        self.images = images
        self.template = None if template is None else ImageTemplate(template, images)
        self._folder = Path.cwd() if folder is None else folder

    def at(self, folder: Path) -> ImageChatEncoder:
        placed = copy.copy(self)
        placed._folder = folder
        return placed

    def cache_key(self) -> str:
        parts = [super().cache_key(), self.images.cache_key(), str(self._folder), str(ENCODING_VERSION)]
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=20).hexdigest()

    @property
    def title(self) -> Callable[[Row], str]:
        """The format of a row, and whether it has images."""
        return _title

    def encode(self, row: Row) -> Sample:
        plain, named = take_images(row)
        images = [read_image(value, self._folder) for value in named]
        example = read_example(plain)
        if isinstance(example, Chat):
            sample, in_prompt, stop = self._encode_images_chat(self._with_system(example), images)
        elif self.system_prompt is not None:
            raise RowError("data.system_prompt is set, but a row of plain text has no turns to put it before")
        else:
            sample, in_prompt, stop = self._encode_images_text(example, images)
        return replace(sample, fields={**to_fields(images, in_prompt), IMAGE_STOP: np.array(stop, np.int32)})

    def fit(self, sample: Sample) -> Sample:
        stop = int(sample.fields[IMAGE_STOP])
        if self.limit.on_too_long == "truncate" and sample.length > self.limit.max_length < stop:
            raise RowDropped(f"{sample.length:,} tokens, its last image ends at {stop:,}: no image is cut")
        return super().fit(sample)

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]] | None = None) -> Prompt:
        """A conversation with images that the assistant is to go on."""
        if self.template is None:
            raise missing_template("data.chat_template")
        plain, named = take_images({"messages": messages})
        images = [read_image(value, self._folder) for value in named]
        turns = [dict(turn) for turn in plain["messages"]]
        chat = self._with_system(Chat(tuple(turns), (None,) * len(turns)))
        text = self._expand(self.template.render(chat.messages, tools, prompt=True), images).text
        return Prompt(self._tokens(text)[0], to_fields(images, len(images)))

    def text_prompt(self, text: str) -> Prompt:
        return Prompt(super().text_prompt(text).tokens, to_fields([], 0))

    # -- rows ------------------------------------------------------------------------------------------------------

    def _expand(self, text: str, images: Sequence[StoredImage]) -> Expanded:
        return self.images.expand(text, [image.size for image in images])

    def _encode_images_chat(self, chat: Chat, images: Sequence[StoredImage]) -> tuple[Sample, int, int]:
        """The sample, how many images its prompt has, and the token at which the last image ends."""
        if self.template is None:
            raise missing_template("data.chat_template")
        self._check_weights(chat)
        rendering = self.template.render_turns(chat)
        expanded = self._expand(rendering.text, images)
        shown = Rendering(expanded.text, tuple(self._moved(rendering.text, expanded, rendering.spans)))
        ids, weights = self._weigh(chat, shown)
        stop = self._leave_out_images(expanded, weights)
        if not self.with_prompts:
            return Sample(ids, weights), 0, stop
        prompt, reference = self._question(chat, rendering)
        if prompt is None:
            return Sample(ids, weights), 0, stop
        count = prompt.count(self.images.placeholder)
        tokens = self._tokens(self._expand(prompt, images[:count]).text)[0]
        return Sample(ids, weights, tokens, reference), count, stop

    def _encode_images_text(self, example: Completion | Text, images: Sequence[StoredImage]) -> tuple[Sample, int, int]:
        prompt, text = ("", example.text) if isinstance(example, Text) else (example.prompt, example.completion)
        shown = [part.replace(IMAGE_MARK, self.images.placeholder) for part in (prompt, text)]
        count = shown[0].count(self.images.placeholder)
        before, after = self._expand(shown[0], images[:count]), self._expand(shown[1], images[count:])
        told = Text(after.text) if isinstance(example, Text) else Completion(before.text, after.text)
        sample = self._encode_text(told)
        moved = [(start + len(before.text), end + len(before.text)) for start, end in after.images]
        whole = Expanded(before.text + after.text, (*before.images, *moved))
        opened = len(sample.input_ids) - len(self._tokens(whole.text)[0]) > 1  # a begin token stands before the text
        weights = sample.loss_weights.copy()
        stop = self._leave_out_images(whole, weights[1:] if opened else weights)
        return replace(sample, loss_weights=weights), count, stop + opened

    def _leave_out_images(self, expanded: Expanded, weights: np.ndarray) -> int:
        """Nothing is to be predicted in an image; returns where the last one ends, in tokens."""
        if not expanded.images:
            return 0
        _, starts, stops = self._tokens(expanded.text)
        inside = np.zeros(len(starts), bool)
        for start, stop in expanded.images:
            inside |= (starts < stop) & (stops > start)
        weights[: len(inside)][inside] = 0.0
        return int(np.flatnonzero(inside)[-1]) + 1

    def _moved(self, text: str, expanded: Expanded, spans: Sequence[Span]) -> Iterator[Span]:
        """Spans of a rendering, in the text with its images expanded."""
        places, at = [], -1
        for start, stop in expanded.images:
            at = text.index(self.images.placeholder, at + 1)
            places.append((at, stop - start - len(self.images.placeholder)))

        def move(place: int) -> int:
            return place + sum(gain for start, gain in places if start < place)

        return (Span(span.message, move(span.start), move(span.stop)) for span in spans)


def _title(row: Row) -> str:
    plain, images = take_images(row)
    read_example(plain)
    return recognise(plain).title + (" with images" if images or any(row.get(key) for key in MEDIA_KEYS) else "")


def take_images(row: Row) -> tuple[dict[str, Any], list[Any]]:
    """The row without its images, each of them a mark in the text, and what names them, in order.

    Raises:
        RowError: images and the places for them do not match.
    """
    other = [key for key in MEDIA_KEYS if row.get(key) and not key.startswith("image")]
    if other:
        raise RowError(f"the row has {other[0]}; of media this model takes images only")
    listed = _listed(row)
    plain = {key: value for key, value in row.items() if key not in MEDIA_KEYS}
    taken = _Taken(listed)
    for key, value in plain.items():
        if key in ("messages", "conversations", "prompt", "completion") and isinstance(value, Sequence):
            plain[key] = taken.text(value) if isinstance(value, str) else [taken.turn(turn) for turn in value]
        elif isinstance(value, str) and key != "system":
            plain[key] = taken.text(value)
    if listed and not taken.images:
        plain = _in_front(plain, len(listed))
        taken.images += listed
    if len(listed) != taken.from_list and listed and taken.from_list:
        raise RowError(f"the row has {len(listed)} images and {taken.from_list} places for them ({IMAGE_TAG})")
    if taken.missing:
        raise RowError(f"the row has {taken.from_list} places for images ({IMAGE_TAG}) and {len(listed)} images")
    return plain, taken.images


def _listed(row: Row) -> list[Any]:
    value = row.get("images") if row.get("images") is not None else row.get("image")
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else [value]


class _Taken:
    """Collects images in the order in which a row shows them; `<image>` and parts without a source take listed ones."""

    def __init__(self, listed: Sequence[Any]) -> None:
        self._listed = listed
        self.images: list[Any] = []
        self.from_list = 0
        self.missing = False

    def text(self, text: str) -> str:
        pieces = text.split(IMAGE_TAG)
        for _ in pieces[1:]:
            self._next()
        return IMAGE_MARK.join(pieces)

    def turn(self, turn: Any) -> Any:
        if not isinstance(turn, Mapping):
            return turn
        key = "content" if turn.get("content") is not None else "value"
        content = turn.get(key)
        if isinstance(content, str):
            return {**turn, key: self.text(content)}
        if isinstance(content, Sequence):
            return {**turn, key: "".join(self._part(part) for part in content)}
        return turn

    def _part(self, part: Any) -> str:
        if isinstance(part, str):
            return self.text(part)
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind == "text" and isinstance(part.get("text"), str):
            return self.text(part["text"])
        if kind not in _PARTS:
            raise RowError(f"a content part of type {kind!r}; this model takes text and images")
        source = next((part[key] for key in _SOURCES if part.get(key) is not None), None)
        if source is None:
            self._next()
        else:
            self.images.append(part if isinstance(part.get("video"), str) else source)
        return IMAGE_MARK

    def _next(self) -> None:
        if self.from_list < len(self._listed):
            self.images.append(self._listed[self.from_list])
        else:
            self.missing = True
        self.from_list += 1


def _in_front(plain: dict[str, Any], count: int) -> dict[str, Any]:
    """The row with all images before the first words of the user, where it does not say where they belong."""
    marks = IMAGE_MARK * count
    first = recognise(plain).keys[0]
    if isinstance(plain[first], str):
        return {**plain, first: marks + plain[first]}
    turns = list(plain[first])
    for number, turn in enumerate(turns):
        if isinstance(turn, Mapping) and (turn.get("role") or turn.get("from")) in ("user", "human"):
            key = "content" if turn.get("content") is not None else "value"
            turns[number] = {**turn, key: marks + str(turn[key])}
            return {**plain, first: turns}
    raise RowError("the row has images, but no user turn to put them into")
