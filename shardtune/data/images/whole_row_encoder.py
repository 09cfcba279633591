"""Encodes rows whose text and images only their processor puts together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from PIL import Image

from shardtune.batch import Prompt, Sample
from shardtune.data.chat.encoder import no_end_token
from shardtune.data.chat.template import missing_template
from shardtune.data.encoder import RowDropped, RowError
from shardtune.data.images.chat_encoder import ImageChatEncoder
from shardtune.data.images.images import PROMPT_TEXT, ROW_TEXT, SUFFIX_START, StoredImage, to_fields
from shardtune.data.images.rows import IMAGE_MARK, SHOWN_IMAGE
from shardtune.data.images.whole_rows import WholeRow, WholeRows
from shardtune.data.messages import shown_question
from shardtune.data.row_formats import Chat, Completion, Text
from shardtune.data.token_rows import Tokens


class WholeRowEncoder(ImageChatEncoder):
    """Encodes rows by their processor as wholes.

    A row keeps its text, of which its inputs are made again when a micro-batch is: no row is cut.
    """

    images: WholeRows  # pyright: ignore[reportIncompatibleVariableOverride]

    def _tokens_alone(self, example: Tokens) -> tuple[Sample, int, np.ndarray]:
        raise RowError(f"input_ids: {type(self.images.processor).__name__} makes rows of text, not of tokens")

    def fit(self, sample: Sample) -> Sample | list[Sample]:
        if self.limit.on_too_long == "truncate" and sample.length > self.limit.max_length:
            kind = type(self.images.processor).__name__
            raise RowDropped(f"{sample.length:,} tokens: {kind} makes a row as a whole, so none is cut")
        return super().fit(sample)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        ids = super().stop_token_ids
        return ids or tuple(self._ends)

    @property
    def _ends(self) -> list[int]:
        """The tokens that end a text: of BERT's tokenizers the separator."""
        return [
            number for number in (self.tokenizer.eos_token_id, self.tokenizer.sep_token_id) if isinstance(number, int)
        ]

    def _made_prompt(self, text: str, images: Sequence[StoredImage], *, is_plain: bool = False) -> Prompt:
        # Its processor writes the begin token.
        return Prompt(self._prompt_tokens(text, images), {**to_fields(images, len(images)), **_texts("", -1, text)})

    def _row(self, text: str, images: Sequence[StoredImage], suffix_start: int | None = None) -> WholeRow:
        self.images.expand(text, [image.size for image in images])
        return self.images.row(text, [Image.new("RGB", image.size) for image in images], suffix_start)

    def _prompt_tokens(self, text: str, images: Sequence[StoredImage]) -> np.ndarray:
        """The tokens of a prompt, without an end token that the processor writes after every text."""
        made = self._row(text, images)
        ends = bool(made.added) and int(made.ids[-1]) in self._ends
        return made.ids[:-1] if ends else made.ids

    def _encode_images_chat(self, chat: Chat, images: Sequence[StoredImage]) -> tuple[Sample, int, np.ndarray]:
        if self.template is None:
            raise missing_template("data.chat_template")
        self._check_weights(chat)
        chat, rendering, about = self._rendered(chat, self.template)
        text, last = rendering.text, rendering.spans[-1] if rendering.spans else None
        neutral = 1.0 if self.train_on == "all" else 0.0
        characters = np.full(len(text), neutral, np.float32)
        for span in rendering.spans:
            assert last is not None
            characters[span.start : span.stop] = self._span_weight(chat, span, last)
        sample, spans = self._weighed(text, characters, images)
        sample = replace(sample, **about)
        prompt, reference = self._question(chat, rendering) if self.with_prompts else (None, None)
        if prompt is None:
            return sample, 0, spans
        count = prompt.count(self.images.image_token)
        asked = self._asked(sample, prompt, (reference or "").replace(IMAGE_MARK, ""), images[:count])
        question = shown_question(chat.messages[: rendering.spans[-1].message]).replace(IMAGE_MARK, SHOWN_IMAGE)
        return replace(asked, question=question), count, spans

    def _encode_images_text(
        self, example: Completion | Text, images: Sequence[StoredImage]
    ) -> tuple[Sample, int, np.ndarray]:
        shown = ("", example.text) if isinstance(example, Text) else (example.prompt, example.completion)
        prompt, answer = (part.replace(IMAGE_MARK, self.images.image_token) for part in shown)
        text, count = prompt + answer, prompt.count(self.images.image_token)
        characters = np.ones(len(text), np.float32)
        if self.train_on != "all" or self.images.image_token in prompt:
            characters[: len(prompt)] = 0.0
        if isinstance(example, Text) and self.images.image_token in text:
            characters[: text.rfind(self.images.image_token) + len(self.images.image_token)] = 0.0
        if not self._closes(text, characters, images):
            eos = self.tokenizer.eos_token
            if not isinstance(eos, str):
                raise no_end_token()
            text, characters = text + eos, np.append(characters, np.ones(len(eos), np.float32))
        sample, spans = self._weighed(text, characters, images)
        if not self.with_prompts or isinstance(example, Text):
            return sample, count, spans
        asked = self._asked(sample, prompt, example.completion, images[:count])
        return replace(asked, question=example.prompt.replace(IMAGE_MARK, SHOWN_IMAGE)), count, spans

    def _closes(self, text: str, characters: np.ndarray, images: Sequence[StoredImage]) -> bool:
        """Whether the processor writes an end token after a row by itself."""
        made = self._row(text, images, self._suffix_start(text, characters))
        return bool(len(made.ids)) and int(made.ids[-1]) in self._ends

    def _suffix_start(self, text: str, characters: np.ndarray) -> int:
        targets = np.flatnonzero(characters)
        return self.images.suffix_start(text, int(targets[0]) if len(targets) else len(text))

    def _weighed(self, text: str, characters: np.ndarray, images: Sequence[StoredImage]) -> tuple[Sample, np.ndarray]:
        """The tokens of a row, each with the largest weight of its characters, and where its images are.

        What the processor adds at the end counts as the character before it.
        """
        start = self._suffix_start(text, characters)
        made = self._row(text, images, start)
        weights = np.array(
            [characters[a:b].max(initial=0.0) for a, b in zip(made.starts, made.stops, strict=True)], np.float32
        )
        if made.added and len(weights) > made.added:
            weights[-made.added :] = weights[-made.added - 1]
        is_image = self.images.token_type_ids(made.ids).astype(bool)
        weights[is_image] = 0.0
        weights[:1] = 0.0
        edges = np.flatnonzero(np.diff(np.concatenate([[0], is_image, [0]]).astype(np.int8))).reshape(-1, 2)
        spans = edges if len(edges) == len(images) else np.empty((0, 2))
        return Sample(made.ids, weights, fields=_texts(text, start, "")), spans.astype(np.int32)

    def _asked(self, sample: Sample, prompt: str, reference: str, images: Sequence[StoredImage]) -> Sample:
        tokens = self._prompt_tokens(prompt, images)
        fields = {**sample.fields, PROMPT_TEXT: _bytes(prompt)}
        return replace(sample, prompt_ids=tokens, reference=reference, fields=fields)


def _texts(row: str, suffix_start: int, prompt: str) -> dict[str, np.ndarray]:
    return {ROW_TEXT: _bytes(row), SUFFIX_START: np.array(suffix_start, np.int32), PROMPT_TEXT: _bytes(prompt)}


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)
