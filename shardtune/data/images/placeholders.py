"""Applies a processor: the text that replaces an image, and a model's input tensors for images."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import PIL
import torch
import transformers
from PIL import Image, features
from transformers import BatchEncoding, PreTrainedTokenizerBase, ProcessorMixin
from transformers.image_processing_base import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

from shardtune.data.chat.encoder import with_offsets
from shardtune.data.encoder import RowError
from shardtune.data.images.pixel_bytes import ImageBytes, PixelBytes
from shardtune.data.images.pixel_table import by_table
from shardtune.errors import ModelError, counted

OF_TEXT = ("input_ids", "attention_mask", "labels")
"""What a processor returns of a text."""
_KEPT_SIZES = 65_536
_TRIED_SIZES = ((48, 64), (80, 32), (33, 33))
_KEY_SIZES = ((32, 32), (640, 480), (301, 1000))
BLANK = (32, 32)
"""Width and height of the blank image of a micro-batch without images."""


@runtime_checkable
class MarksImages(Protocol):
    """A processor that knows the token of an image in a text."""

    @property
    def image_token(self) -> str: ...


class AppliedProcessor(Protocol):
    """The interface of processors that `ImageText` needs; those of transformers have it undeclared."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def image_processor(self) -> BaseImageProcessor: ...
    @property
    def image_token(self) -> str: ...
    @property
    def image_token_ids(self) -> Sequence[int | None] | int | None: ...

    def __call__(
        self, *, images: list[list[Image.Image]], text: list[str], return_tensors: str, **options: bool
    ) -> BatchFeature:
        """The tensors of images and text.

        Args:
            **options: `return_text_replacement_offsets`: also what took the place of each image token, under
                `text_replacement_offsets`; `add_special_tokens`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Expanded:
    """A text with the tokens of its images.

    Attributes:
        text: with each image token replaced by the image's tokens.
        images: characters `[start, stop)` of each image.
    """

    text: str
    images: tuple[tuple[int, int], ...]


class AppliedImages(ABC):
    """Applies a processor to images and texts, in one of two ways: `ImageText`, `WholeRows`.

    Args:
        processor: of a vision-language model.
        applied: applied in its place, if its own call has another signature.

    Attributes:
        processor: the same.
        applied: the same, or the one that is applied in its place.
        tokenizer: of the one that is applied.
        image_token: the token of an image in a text.
        token_types: the name of the model input that marks the tokens of images; None without one.
        pixel_bytes: makes bytes of images one by one; None if that was not shown to be equal.
        follows_tokens: whether the model's inputs for images depend on the tokens around them (Mllama's mask).
        outside_text: whether the model takes images beside the text, so that no token stands for them.
    """

    image_token: str
    token_types: str | None = None
    pixel_bytes: PixelBytes | None = None
    follows_tokens: bool = False
    outside_text: bool = False

    def __init__(self, processor: ProcessorMixin, applied: AppliedProcessor | None = None) -> None:
        self.processor = processor
        self.applied = cast(AppliedProcessor, processor) if applied is None else applied
        self.tokenizer = with_offsets(self.applied.tokenizer)

    @property
    @abstractmethod
    def one_row(self) -> bool:
        """Whether the model's inputs are those of one row alone, so that each forward holds one."""

    @abstractmethod
    def expand(self, text: str, sizes: Sequence[tuple[int, int]]) -> Expanded:
        """The text with each image token replaced, in order.

        Raises:
            RowError: there are more or fewer placeholders than images, or the text contains a token that stands for an
                image, a video or a sound.
        """

    @abstractmethod
    def pixels(self, images: Sequence[Image.Image], counts: Sequence[int] | None = None) -> dict[str, torch.Tensor]:
        """The model's inputs for images, in their order."""

    @abstractmethod
    def of_row(
        self, fields: Mapping[str, np.ndarray], input_ids: np.ndarray, images: Sequence[Image.Image]
    ) -> dict[str, torch.Tensor]:
        """The model's inputs for one row besides its tokens, where each forward holds one.

        Args:
            fields: of its sample.
            input_ids: int [tokens].
            images: in order.
        """

    @abstractmethod
    def token_type_ids(self, input_ids: np.ndarray) -> np.ndarray:
        """int64 [tokens]: 1 for the tokens of images, 0 for others."""

    @abstractmethod
    def cache_key(self) -> str:
        """A hash of everything that the tokens of a row depend on besides its text."""

    def bytes_of(self, image: Image.Image) -> ImageBytes | None:
        """One image before it is rescaled and normalised; None if bytes cannot represent it."""
        return None

    def numbers(self, fields: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's inputs from the fields of a micro-batch, in which pixels may be bytes."""
        return dict(fields) if self.pixel_bytes is None else self.pixel_bytes.numbers(fields)


class ImageText(AppliedImages):
    """Applies a processor to images by themselves: the text that replaces each, and its pixels.

    Args:
        processor: of a vision-language model.
        applied: applied in its place, if its own call has another signature.

    Attributes:
        image_processor: a copy of the processor's, with the settings that it is called with.
        spaces_words: whether a space is written between an image and a word attached to it (Idefics2).
        side_by_side: whether two images may follow each other without text in between.
        needs_gaps: whether the model takes image tokens that follow each other for one image (Qwen-VL).
    """

    def __init__(self, processor: ProcessorMixin, applied: AppliedProcessor | None = None) -> None:
        super().__init__(processor, applied)
        self.image_token = self.applied.image_token
        self._stands_for: dict[tuple[int, int], str] = {}
        self.image_processor = self._as_called()
        first = self._process([Image.new("RGB", BLANK)])
        keys = set(first)
        self.token_types = next((key for key in ("mm_token_type_ids", "token_type_ids") if key in keys), None)
        self._pixel_keys = sorted(keys - {*OF_TEXT, "text_replacement_offsets", self.token_types})
        ids = self.applied.image_token_ids
        self._image_ids = [number for number in (ids if isinstance(ids, Sequence) else [ids]) if number is not None]
        if not self._image_ids:  # Janus names the token alone
            self._image_ids = [self.tokenizer.get_vocab()[self.image_token]]
        self.follows_tokens = self._differs_with_text(first)
        self._pixel_token = self._token_of_pixels()
        self._other_media = self._tokens_of_other_media()
        self._by_row = self._depends_on_row()
        self.side_by_side, self.spaces_words, self.needs_gaps = True, False, False
        self._quick = by_table(self.image_processor)
        tried = [*(Image.effect_noise(size, 90.0).convert("RGB") for size in _TRIED_SIZES), Image.new("RGB", BLANK)]
        whole = self._process(tried)
        self._needs_no_text = self._agrees_without_text(tried, whole)
        pixels = {key: whole[key] for key in self._pixel_keys}
        proved = None if self._by_row or self.follows_tokens else PixelBytes.proved(self.image_processor, tried, pixels)
        self.pixel_bytes = proved

    def _as_called(self) -> BaseImageProcessor:
        """The image processor with the settings that the processor calls it with.

        Some classes call it with settings of their own, which precede those of its file (Gemma 3: `do_pan_and_scan`,
        InternVL: `crop_to_patches`) and count for images of certain sizes only.
        """
        called = _Called(self.applied.image_processor)
        applied = copy(self.applied)
        vars(applied)["image_processor"] = called
        with self._at_work([blank := Image.new("RGB", BLANK)]):
            applied(images=[[blank]], text=[self.image_token], return_tensors="pt")
        found = copy(self.applied.image_processor)
        vars(found).update({key: value for key, value in called.settings.items() if key != "return_tensors"})
        return found

    def _agrees_without_text(self, tried: Sequence[Image.Image], whole: BatchFeature) -> bool:
        """Whether the image processor by itself gives the same bits; processing a text as well takes time."""
        try:
            alone = self._process_alone(tried)
        except ModelError:
            return False
        return all(key in alone and torch.equal(alone[key], whole[key]) for key in self._pixel_keys)

    def _token_of_pixels(self) -> str:
        """The token that the model replaces by an image's features: the most frequent one of an image."""
        ids = self.tokenizer(self.stands_for(BLANK), add_special_tokens=False)["input_ids"]
        return str(self.tokenizer.convert_ids_to_tokens(max(self._image_ids, key=ids.count)))

    def _tokens_of_other_media(self) -> list[str]:
        """The tokens that stand for a video or a sound in a text."""
        known, named = self.tokenizer.get_vocab(), vars(self.processor)
        found = [token for token in map(named.get, ("video_token", "audio_token")) if isinstance(token, str)]
        return [token for token in found if token in known and token not in (self.image_token, self._pixel_token)]

    def stands_for(self, size: tuple[int, int]) -> str:
        """The text that replaces the image token for an image of a size.

        It depends on the size alone, so a blank image is processed for it, once for each size.
        """
        if size not in self._stands_for:
            if len(self._stands_for) >= _KEPT_SIZES:
                self._stands_for.clear()
            self._stands_for[size] = self._replacements([size])[0]
        return self._stands_for[size]

    def _replacements(self, sizes: Sequence[tuple[int, int]]) -> list[str]:
        """The text that replaces each image token of a row with images of these sizes."""
        made = self._process([Image.new("RGB", size) for size in sizes])
        if "text_replacement_offsets" in made:
            return [part["replacement"] for part in made["text_replacement_offsets"][0]]
        if self.follows_tokens:  # an image token stays as it is
            return [self.image_token for _ in sizes]
        # Processors that replace image tokens in a call of their own (Idefics2): from the tokens of an image alone.
        alone = [self._process([Image.new("RGB", size)], add_special_tokens=False) for size in sizes]
        return [str(self.tokenizer.decode(one["input_ids"][0], skip_special_tokens=False)) for one in alone]

    def _differs_with_text(self, first: BatchFeature) -> bool:
        """Whether inputs for an image have another shape if text follows it."""
        longer = self._process([Image.new("RGB", BLANK)], text=f"{self.image_token}abc")
        return any(longer[key].shape != first[key].shape for key in self._pixel_keys)

    def _depends_on_row(self) -> bool:
        """Whether the tokens of an image depend on how many images its row has (LLaVA-OneVision)."""
        sizes = list(_TRIED_SIZES[:2])
        return self._replacements(sizes) != [self.stands_for(size) for size in sizes]

    def expand(self, text: str, sizes: Sequence[tuple[int, int]]) -> Expanded:
        if self._pixel_token != self.image_token and self._pixel_token in text:
            raise RowError(f"the text contains {self._pixel_token!r}, which the model takes for part of an image")
        other = next((token for token in self._other_media if token in text), None)
        if other is not None:
            raise RowError(
                f"the text contains {other!r}, which the model takes for a video or a sound, and there is none; "
                "frames of a video are images, each at an <image> of its own"
            )
        pieces = text.split(self.image_token)
        if len(pieces) - 1 != len(sizes):
            raise RowError(
                f"the text holds {self.image_token!r} {counted(len(pieces) - 1, 'time')} "
                f"for {counted(len(sizes), 'image')}: the chat template leaves some out, or a turn contains it itself"
            )
        parts, spans, length = [pieces[0]], [], len(pieces[0])
        kind = type(self.processor).__name__
        if not self.side_by_side and not all(pieces[1:-1]):
            raise RowError(f"two images follow each other, which {kind} writes in another way")
        by_row = self._by_row and len(sizes) > 1
        try:
            images = self._replacements(sizes) if by_row else [self.stands_for(size) for size in sizes]
        except ModelError as error:  # of a size that the processor does not take; it took others when it was loaded
            raise RowError(error.what) from error
        if not all(images):
            width, height = sizes[images.index("")]
            raise RowError(f"an image of {width} x {height} is too small or too narrow: {kind} makes no token of it")
        if self.needs_gaps and any(map(self._join, images, pieces[1:-1], images[1:])):
            raise RowError(
                "two images follow each other without a token in between, which the model takes for one: write text "
                "between them, or around each <image> what the model's chat template writes there"
            )
        for image, piece in zip(images, pieces[1:], strict=True):
            if self.spaces_words and piece[:1].strip(" \t\n\r<"):
                image += " "
            spans.append((length, length + len(image)))
            parts += [image, piece]
            length += len(image) + len(piece)
        return Expanded("".join(parts), tuple(spans))

    def _join(self, image: str, text: str, following: str) -> bool:
        """Whether the tokens of two images with a text in between are one run."""
        return not text and image.endswith(self._pixel_token) and following.startswith(self._pixel_token)

    def pixels(self, images: Sequence[Image.Image], counts: Sequence[int] | None = None) -> dict[str, torch.Tensor]:
        """The model's inputs for images, in their order; shapes depend on the model family.

        Args:
            images: of all rows.
            counts: how many of them each row has; None: all belong to one row.

        LLaVA, Gemma 3, InternVL: pixel_values [images or tiles, 3, height, width]. Idefics3, SmolVLM: [1, tiles, 3,
        height, width] with pixel_attention_mask [1, tiles, height, width]. Qwen-VL: [patches of all images, values of a
        patch] with image_grid_thw [images, 3].
        """
        rows = [count for count in counts or () if count] if self._by_row else []
        made = self._process_alone(images, rows) if self._needs_no_text else self._process(images, rows)
        return {key: made[key] for key in self._pixel_keys}

    def bytes_of(self, image: Image.Image) -> ImageBytes | None:
        with self._at_work([image]):
            return None if self.pixel_bytes is None else self.pixel_bytes.of(image)

    def pixel_settings(self) -> dict[str, object]:
        """Everything the bytes of an image depend on: settings, and the versions of the libraries that resize it."""
        processor = self.image_processor
        kind = f"{type(processor).__module__}.{type(processor).__qualname__}"
        versions = [transformers.__version__, PIL.__version__, features.version("jpg")]
        return {"settings": processor.to_dict(), "kind": kind, "versions": versions}

    def token_type_ids(self, input_ids: np.ndarray) -> np.ndarray:
        return np.isin(input_ids, self._image_ids).astype(np.int64)

    def cache_key(self) -> str:
        settings = {**self.processor.to_dict(), "tokenizer": None, "chat_template": None}
        settings["stands_for"] = [self.stands_for(size) for size in _KEY_SIZES]  # by this version of transformers
        return hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=20).hexdigest()

    @property
    def one_row(self) -> bool:
        return self.follows_tokens

    def of_row(
        self, fields: Mapping[str, np.ndarray], input_ids: np.ndarray, images: Sequence[Image.Image]
    ) -> dict[str, torch.Tensor]:
        return self.of_tokens(input_ids, images) if images else {}

    def of_tokens(self, input_ids: np.ndarray, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        """The model's inputs for the images of a sequence of tokens, where these depend on the tokens.

        Args:
            input_ids: int [tokens].
            images: in order, one for each image token.
        """
        applied = copy(self.applied)
        vars(applied)["tokenizer"] = _GivenTokens(self.tokenizer, input_ids)
        with self._at_work(images):
            made = applied(images=[list(images)], text=[self.image_token * len(images)], return_tensors="pt")
        types = [] if self.token_types is None else [self.token_types]
        return {key: made[key] for key in (*self._pixel_keys, *types)}

    def _process(
        self, images: Sequence[Image.Image], rows: Sequence[int] = (), text: str | None = None, **options: bool
    ) -> BatchFeature:
        nested = _nested(images, rows)
        texts = [self.image_token * len(row) for row in nested] if text is None else [text]
        with self._at_work(images):
            return self.applied(
                images=nested, text=texts, return_tensors="pt", return_text_replacement_offsets=True, **options
            )

    def _process_alone(self, images: Sequence[Image.Image], rows: Sequence[int] = ()) -> BatchFeature:
        with self._at_work(images):
            nested = _nested(images, rows)  # families with tiles need lists of rows
            return self._quick(images=nested, return_tensors="pt")  # pyright: ignore[reportArgumentType]

    @contextmanager
    def _at_work(self, images: Sequence[Image.Image]) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a processor is third-party code and may raise anything
            sizes = ", ".join(f"{image.width} x {image.height}" for image in images[:4])
            raise ModelError(
                f"{type(self.processor).__name__} refuses images of {sizes}: {error}",
                where="actor.model.model_path: processor_config.json",
                remedy="leave such images out, or mend the processor's settings",
            ) from error


class _Called:
    """In the place of an image processor: it is called, and the settings of the call are kept."""

    def __init__(self, image_processor: BaseImageProcessor) -> None:
        self._image_processor = image_processor
        self.settings: dict[str, object] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._image_processor, name)

    def __call__(self, images: list[list[Image.Image]], **settings: Any) -> BatchFeature:
        self.settings = settings
        return self._image_processor(images, **settings)  # pyright: ignore[reportArgumentType] (a list per row)


class _GivenTokens:
    """In the place of a tokenizer: every text has the same tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, input_ids: np.ndarray) -> None:
        self._tokenizer = tokenizer
        self._input_ids = input_ids.tolist()

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: object, **kwargs: object) -> BatchEncoding:
        return BatchEncoding({"input_ids": [self._input_ids], "attention_mask": [[1] * len(self._input_ids)]})


def _nested(images: Sequence[Image.Image], rows: Sequence[int]) -> list[list[Image.Image]]:
    """Images by row, from how many each row has; all in one row where nothing is given."""
    ends = np.cumsum(rows or [len(images)])
    return [list(images[end - count : end]) for end, count in zip(ends, rows or [len(images)], strict=True)]
