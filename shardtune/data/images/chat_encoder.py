"""The encoder of vision-language models: chats and texts with images to tokens with their targets marked."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from shardtune.batch import Prompt, Sample
from shardtune.data.chat.encoder import NO_TURNS, ChatEncoder, TrainOn
from shardtune.data.chat.outline import Span
from shardtune.data.chat.prompt_check import PromptMismatch
from shardtune.data.chat.reasoning import Thinking
from shardtune.data.chat.rendering import ChatTemplate, Rendering
from shardtune.data.chat.template import missing_template, refuse_without_template
from shardtune.data.encoder import Row, RowDropped, RowError, TooLong
from shardtune.data.images.images import IMAGE_STOP, SPANS, StoredImage, read_image, to_fields
from shardtune.data.images.placeholders import AppliedImages, Expanded
from shardtune.data.images.rows import IMAGE_MARK, SHOWN_IMAGE, mark_images, read_image_row
from shardtune.data.messages import shown_question
from shardtune.data.row_formats import MEDIA_KEYS, Chat, ChatTitle, Completion, Text, recognise
from shardtune.data.token_rows import Tokens
from shardtune.errors import DataError

ENCODING_VERSION = 4
_PATH_KEYS = ("image", "images", "path", "video")
_LONGEST_PATH = 512
_PROBE = "\ue0f5\ue0f6"


class ImageTemplate(ChatTemplate):
    """A chat template that takes turns as parts of text and image, or as text if it does not support parts.

    Args:
        text: the Jinja source.
        images: the model's processor.
        arguments: as for `ChatTemplate`.
    """

    separator = IMAGE_MARK

    def __init__(
        self, text: str, images: AppliedImages, arguments: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        super().__init__(text, images.tokenizer, arguments)
        self._image_token = self._in_text = images.image_token
        self._takes_parts = self._shows("", takes_parts=True)
        if not self._takes_parts:
            self._in_text = _in_own_template(images, text)
        if not self._shows(IMAGE_MARK, takes_parts=self._takes_parts):
            raise DataError(
                f"the chat template leaves out images: it writes no {images.image_token!r} for one",
                where="the chat template",
                remedy="use the template of the model's own processor (data.chat_template: null)",
            )

    def _shows(self, mark: str, *, takes_parts: bool) -> bool:
        """Whether a turn comes out with its text, and with an image token where there is a mark."""
        self._takes_parts = takes_parts
        turns = [{"role": "user", "content": f"{mark}{_PROBE}"}, {"role": "assistant", "content": _PROBE}]
        try:
            shown = self.render(turns, None)
        except RowError:
            return False
        as_parts = takes_parts and "'type'" in shown  # the list itself was printed
        return shown.count(_PROBE) == 2 and shown.count(self._image_token) == len(mark) and not as_parts

    def shown(self, messages: Sequence[dict]) -> list[dict]:
        return super().shown([{**message, "content": self._content(message["content"])} for message in messages])

    def _content(self, content: str) -> str | list[dict[str, str]]:
        if not self._takes_parts:
            return content.replace(IMAGE_MARK, self._in_text)
        parts: list[dict[str, str]] = []
        marked = [content] if self._image_token == IMAGE_MARK else content.split(IMAGE_MARK)
        for number, text in enumerate(marked):
            parts += [{"type": "image"}] * bool(number) + [{"type": "text", "text": text}] * bool(text)
        return parts or [{"type": "text", "text": ""}]  # some templates look at the first part of each turn


def _in_own_template(images: AppliedImages, other: str) -> str:
    """The text of an image in a turn, with the text that the processor's own template writes around it."""
    own = images.processor.chat_template
    if not isinstance(own, str) or own == other:
        return images.image_token
    turns = [{"role": "user", "content": f"{_PROBE}{IMAGE_MARK}{_PROBE}"}, {"role": "assistant", "content": "?"}]
    try:
        found = ImageTemplate(own, images).render(turns, None).split(_PROBE)
    except (DataError, RowError):
        return images.image_token
    return found[1] if len(found) == 3 and found[1].count(images.image_token) == 1 else images.image_token


class ImageChatEncoder(ChatEncoder):
    """Renders a row with its images, tokenises the text once, and marks the tokens that are targets.

    Images are listed in `images` (or `image`) with `<image>` in their places, or are parts of a turn's content. Their
    tokens are counted by their sizes; pixels are read when a micro-batch is made.

    Args:
        images: applies the model's processor.
        template: the Jinja text of the chat template; None raises an error for the first conversation.
        train_on, system_prompt, max_length, on_too_long, split_stride, with_prompts, thinking, ignored_keys: as for
            `ChatEncoder`. A row that would be cut before the end of its last image is left out instead.
        template_kwargs, on_prompt_mismatch: likewise.
        folder: base of relative paths in rows.
        needs_image: refuse rows without an image, as the model cannot be called without.
        image_hosts: from which images named by URLs are fetched, see `shardtune.data.images.web`.
    """

    def __init__(
        self,
        images: AppliedImages,
        template: str | None,
        *,
        train_on: TrainOn = "assistant",
        system_prompt: str | None = None,
        max_length: int = 2048,
        on_too_long: TooLong = "truncate",
        split_stride: int | None = None,
        with_prompts: bool = False,
        thinking: Thinking | None = None,
        ignored_keys: Sequence[str] = (),
        template_kwargs: Mapping[str, object] = MappingProxyType({}),
        on_prompt_mismatch: PromptMismatch = "fail",
        folder: Path | None = None,
        needs_image: bool = False,
        image_hosts: Sequence[str] = (),
    ) -> None:
        super().__init__(
            images.tokenizer, None, train_on=train_on, system_prompt=system_prompt, max_length=max_length,
            on_too_long=on_too_long, with_prompts=with_prompts, thinking=thinking, ignored_keys=ignored_keys,
            split_stride=split_stride, on_prompt_mismatch=on_prompt_mismatch,
        )  # fmt: skip
        refuse_without_template(template, template_kwargs)
        self.images = images
        self.template = None if template is None else ImageTemplate(template, images, template_kwargs)
        self._folder = Path.cwd() if folder is None else folder
        self._needs_image = needs_image
        self._hosts = tuple(image_hosts)

    def at(self, folder: Path) -> ImageChatEncoder:
        placed = copy.copy(self)
        placed._folder = folder
        return placed

    def cache_key(self) -> str:
        parts = [super().cache_key(), self.images.cache_key(), str(self._folder), str(ENCODING_VERSION)]
        parts += self._hosts  # rows of hosts that are not allowed are bad
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=20).hexdigest()

    @property
    def title(self) -> Callable[[Row], str]:
        """The format of a row, and whether it has images."""
        return ChatTitle(_title)

    def read_images(self, named: Sequence[object]) -> list[StoredImage]:
        """The images of a row or of a prompt, see `read_image`. Raises `RowError` for one that cannot be used."""
        return [read_image(value, self._folder, self._hosts) for value in named]

    def encode(self, row: Row) -> Sample:
        example, named = read_image_row(row)
        images = self.read_images(named)
        if self._needs_image and not images:
            raise RowError("the row has no image, and the model's forward always takes one")
        if isinstance(example, Chat):
            sample, in_prompt, spans = self._encode_images_chat(self.prepared(example), images)
        elif self.system_prompt is not None:
            raise RowError(NO_TURNS)
        elif isinstance(example, Tokens):
            sample, in_prompt, spans = self._tokens_alone(example)
        else:
            sample, in_prompt, spans = self._encode_images_text(example, images)
        places = {SPANS: spans, IMAGE_STOP: spans.max(initial=0)}
        return replace(sample, fields={**sample.fields, **to_fields(images, in_prompt), **places})

    def _tokens_alone(self, example: Tokens) -> tuple[Sample, int, np.ndarray]:
        """A row of tokens, which has no images."""
        if self.tokenizer.convert_tokens_to_ids(self.images.image_token) in example.ids:
            raise RowError(f"input_ids has {self.images.image_token}; a row with images is given as text")
        return self._encode_tokens(example), 0, np.empty((0, 2), np.int32)

    def fit(self, sample: Sample) -> Sample | list[Sample]:
        stop = int(sample.fields[IMAGE_STOP])
        if self.limit.on_too_long == "truncate" and sample.length > self.limit.max_length < stop:
            raise RowDropped(f"{sample.length:,} tokens, its last image ends at {stop:,}: no image is cut")
        return super().fit(sample)

    def prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[dict[str, object]] | None = None,
        images: Sequence[object] = (),
        *,
        template_kwargs: Mapping[str, object] = MappingProxyType({}),
    ) -> Prompt:
        """A conversation with images for the assistant to continue.

        Args:
            images: for the places of `<image>`; if there are none, they go before the text of the last user turn.
        """
        chat, named = mark_images(messages, images)
        stored = self.read_images(named)
        return self._made_prompt(self._prompt_text(chat, tools, template_kwargs), stored)

    def text_prompt(self, text: str, images: Sequence[object] = ()) -> Prompt:
        """A text with images to continue, its images as for `prompt`."""
        chat, named = mark_images([{"role": "user", "content": text}], images)
        whole = chat.messages[0]["content"].replace(IMAGE_MARK, self.images.image_token)
        return self._made_prompt(whole, self.read_images(named), is_plain=True)

    def _made_prompt(self, text: str, images: Sequence[StoredImage], *, is_plain: bool = False) -> Prompt:
        """A text with image tokens as a prompt; one that no template has rendered gets the begin token."""
        tokens = self._tokens(self._expand(text, images).text)[0]
        return Prompt(self._opened(tokens) if is_plain else tokens, to_fields(images, len(images)))

    # -- rows ------------------------------------------------------------------------------------------------------

    def _expand(self, text: str, images: Sequence[StoredImage]) -> Expanded:
        return self.images.expand(text, [image.size for image in images])

    def _encode_images_chat(self, chat: Chat, images: Sequence[StoredImage]) -> tuple[Sample, int, np.ndarray]:
        """The sample, how many images its prompt has, and where each image begins and ends, in tokens."""
        if self.template is None:
            raise missing_template("data.chat_template")
        self._check_weights(chat)
        chat, rendering, about = self._rendered(chat, self.template)
        expanded = self._expand(rendering.text, images)
        shown = Rendering(expanded.text, tuple(self._moved(rendering.text, expanded, rendering.spans)))
        ids, weights = self._weigh(chat, shown)
        spans = self._leave_out_images(expanded, weights)
        whole = Sample(ids, weights, **about)
        if not self.with_prompts:
            return whole, 0, spans
        prompt, reference = self._question(chat, rendering)
        if prompt is None:
            return whole, 0, spans
        count = prompt.count(self.images.image_token)
        tokens = self._tokens(self._expand(prompt, images[:count]).text)[0]
        reference = (reference or "").replace(IMAGE_MARK, "")
        question = shown_question(chat.messages[: rendering.spans[-1].message]).replace(IMAGE_MARK, SHOWN_IMAGE)
        return replace(whole, prompt_ids=tokens, reference=reference, question=question), count, spans

    def _encode_images_text(
        self, example: Completion | Text, images: Sequence[StoredImage]
    ) -> tuple[Sample, int, np.ndarray]:
        prompt, text = ("", example.text) if isinstance(example, Text) else (example.prompt, example.completion)
        shown = [part.replace(IMAGE_MARK, self.images.image_token) for part in (prompt, text)]
        count = shown[0].count(self.images.image_token)
        before, after = self._expand(shown[0], images[:count]), self._expand(shown[1], images[count:])
        expanded = Text(after.text) if isinstance(example, Text) else Completion(before.text, after.text)
        sample = self._encode_text(expanded)
        moved = [(start + len(before.text), end + len(before.text)) for start, end in after.images]
        whole = Expanded(before.text + after.text, (*before.images, *moved))
        ids = self._tokens(whole.text)[0]
        opened = len(self._opened(ids)) - len(ids)  # the tokens that precede the text
        weights = sample.loss_weights.copy()
        spans = self._leave_out_images(whole, weights[opened:])
        if sample.prompt_ids is not None and isinstance(example, Completion):
            sample = replace(sample, question=example.prompt.replace(IMAGE_MARK, SHOWN_IMAGE))
        return replace(sample, loss_weights=weights), count, spans + opened

    def _leave_out_images(self, expanded: Expanded, weights: np.ndarray) -> np.ndarray:
        """Sets the weights of image tokens to 0; returns where each image begins and ends, int32 [images, 2]."""
        if not expanded.images:
            return np.empty((0, 2), np.int32)
        _, starts, stops = self._tokens(expanded.text)
        spans = []
        for start, stop in expanded.images:
            inside = np.flatnonzero((starts < stop) & (stops > start))
            weights[inside] = 0.0
            spans.append((inside[0], inside[-1] + 1))
        return np.array(spans, np.int32)

    def _moved(self, text: str, expanded: Expanded, spans: Sequence[Span]) -> Iterator[Span]:
        """Spans of a rendering, moved to the text with its images expanded."""
        places, at = [], -1
        for start, stop in expanded.images:
            at = text.index(self.images.image_token, at + 1)
            places.append((at, stop - start - len(self.images.image_token)))

        def move(place: int) -> int:
            return place + sum(gain for start, gain in places if start < place)

        return (Span(span.message, move(span.start), move(span.stop)) for span in spans)


def with_absolute_paths(row: Row, folder: Path) -> Row:
    """A row with its relative image paths made absolute."""
    return {key: _with_absolute_paths(value, folder, key) for key, value in row.items()}


def _with_absolute_paths(value: object, folder: Path, key: str) -> object:
    if isinstance(value, Mapping):
        return with_absolute_paths(value, folder)
    if isinstance(value, list | tuple):
        return [_with_absolute_paths(item, folder, key) for item in value]
    if not isinstance(value, str) or key not in _PATH_KEYS or len(value) > _LONGEST_PATH:
        return value
    return str(folder / value) if (folder / value).is_file() else value


def _title(row: Row) -> str:
    _, images = read_image_row(row)
    known = recognise({key: value for key, value in row.items() if key not in MEDIA_KEYS})
    return known.title + (" with images" if images else "")
