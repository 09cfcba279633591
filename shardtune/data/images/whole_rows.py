"""Rows whose text and images only their processor puts together: it is applied to each row as a whole."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Encoding
from transformers import BatchEncoding, PreTrainedTokenizerFast, ProcessorMixin

from shardtune.data.encoder import RowError
from shardtune.data.images.images import ROW_TEXT, SUFFIX_START
from shardtune.data.images.placeholders import BLANK, OF_TEXT, AppliedImages, Expanded
from shardtune.data.images.rows import IMAGE_MARK
from shardtune.errors import ModelError, counted

_KEY_SIZES = ((32, 32), (640, 480))


@dataclass(frozen=True, slots=True)
class WholeRow:
    """The tokens that a processor makes of a row.

    Attributes:
        ids: int32 [tokens].
        starts, stops: int32 [tokens], the characters of the row's text that each token stands for; both 0 for a token
            that the processor has added.
        added: number of tokens that it has added at the end.
        inputs: all other inputs of the model.
    """

    ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    added: int
    inputs: Mapping[str, torch.Tensor]


class WholeRows(AppliedImages):
    """Applies a processor to whole rows, one by one, where its output is not that of text and images by themselves.

    What it returns counts: its tokens, its masks, its pixels. A token belongs to a character of the row if the
    tokenizer, called by the processor, says so; which characters are targets is known from the row alone.

    Args:
        processor: of a vision-language model.

    Attributes:
        outside_text: whether the model takes images beside the text, so that no token stands for them.
        most_images: of a row; None: any number.

    Raises:
        RowError: its output cannot be followed, or it raises for a row of one image.
    """

    @property
    def one_row(self) -> bool:
        return True

    def __init__(self, processor: ProcessorMixin) -> None:
        super().__init__(processor)
        ids = vars(processor).get("image_token_id")
        named = _token(vars(processor).get("image_token"))
        self._image_ids = [] if not isinstance(ids, int) else [ids]
        if named is not None:
            self._image_ids += [number for number in [self.tokenizer.get_vocab().get(named)] if number is not None]
        self._named = named
        self._takes_suffix = "suffix" in inspect.signature(type(processor).__call__).parameters
        self.image_token, self._nests, self.most_images = IMAGE_MARK, True, None
        self._choose()
        self.outside_text = not self._count(1)
        self._check_inputs()

    def _choose(self) -> None:
        """Find how the processor is called: with or without a token for each image, images by row or in one list."""
        problems: list[str] = []
        for token in [IMAGE_MARK] if self._named is None else [self._named, IMAGE_MARK]:
            for nests in (True, False):
                self.image_token, self._nests = token, nests
                try:
                    placed = self._count(1)
                    if token != IMAGE_MARK and self._takes_token_for_text(placed):
                        raise RowError(f"it takes {token!r} in a text for text")
                except (RowError, ModelError) as error:
                    problems.append(error.reason if isinstance(error, RowError) else str(error))
                    continue
                try:
                    self.most_images = None if self._count(2) == 2 * placed > 0 else 1
                except (RowError, ModelError):
                    self.most_images = 1
                return
        raise RowError(problems[0])

    def _check_inputs(self) -> None:
        """Refuse inputs besides the tokens that depend on the text (InstructBLIP's second tokens): whatever the model
        computes of them would know the answer that it has to predict."""
        images = [Image.new("RGB", BLANK)]
        one, other = (self.row(f"{self.image_token}{text}", images).inputs for text in ("ab", "ac"))
        for name in one:
            if not torch.equal(one[name], other[name]):
                kind = type(self.processor).__name__
                raise RowError(f"its {name} hold the text, the answer included, which the model has to predict: {kind}")

    def _takes_token_for_text(self, placed: int) -> bool:
        """Whether the processor places images by itself, beside a token for them in the text."""
        token, self.image_token = self.image_token, IMAGE_MARK
        try:
            return self._count(1) == placed - 1 > 0
        except (RowError, ModelError):
            return False
        finally:
            self.image_token = token

    def _count(self, images: int) -> int:
        """Tokens of some blank images in a row."""
        text = f"{self.image_token * images}ab"
        return int(self.token_type_ids(self.row(text, [Image.new("RGB", BLANK)] * images).ids).sum())

    def token_type_ids(self, input_ids: np.ndarray) -> np.ndarray:
        return np.isin(input_ids, self._image_ids).astype(np.int64)

    def expand(self, text: str, sizes: Sequence[tuple[int, int]]) -> Expanded:
        """The text itself; the tokens of its images are not known apart from the row."""
        places = [found.span() for found in re.finditer(re.escape(self.image_token), text)]
        if len(places) != len(sizes):
            held = f"{self.image_token!r} {counted(len(places), 'time')}"
            raise RowError(f"the text holds {held} for {counted(len(sizes), 'image')}")
        return Expanded(text, tuple(places))

    def pixels(self, images: Sequence[Image.Image], counts: Sequence[int] | None = None) -> dict[str, torch.Tensor]:
        return dict(self.row(f"{self.image_token * len(images)}ab", images).inputs)

    def cache_key(self) -> str:
        shown = [self.row(f"{self.image_token}ab", [Image.new("RGB", size)]).ids.tolist() for size in _KEY_SIZES]
        settings = {**self.processor.to_dict(), "tokenizer": None, "chat_template": None, "shown": shown}
        return hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=20).hexdigest()

    def suffix_start(self, text: str, first_target: int) -> int:
        """Where the part of a row's text begins that the processor takes as the suffix, the text to be predicted;
        its length where it takes none.

        Raises:
            RowError: an image follows.
        """
        if not self._takes_suffix:
            return len(text)
        stop = text.rfind(self.image_token) + len(self.image_token) if self.image_token in text else 0
        if stop > first_target:
            raise RowError(f"an image follows the first answer, which {type(self.processor).__name__} cannot express")
        return first_target

    def of_row(
        self, fields: Mapping[str, np.ndarray], input_ids: np.ndarray, images: Sequence[Image.Image]
    ) -> dict[str, torch.Tensor]:
        """The inputs of the model for a row besides its tokens.

        Args:
            fields: of the row or prompt.
            input_ids: int [tokens], its tokens.
            images: all of them.

        Raises:
            ModelError: the processor makes other tokens than when the row was read.
        """
        text = fields[ROW_TEXT].tobytes().decode()
        made = self.row(text, images, int(fields[SUFFIX_START]))
        if not np.array_equal(made.ids[: len(input_ids)], input_ids):
            raise ModelError(
                f"{type(self.processor).__name__} makes other tokens of a row than when it was read",
                where="data.cache_dir",
                remedy="let all rows be read again: name another data.cache_dir, or empty this one",
            )
        cut = slice(0, len(input_ids))  # a prompt has no end token
        return {
            name: value[:, cut] if value.shape[:2] == (1, len(made.ids)) else value
            for name, value in made.inputs.items()
        }

    def row(self, text: str, images: Sequence[Image.Image], suffix_start: int | None = None) -> WholeRow:
        """A text with an `image_token` for each image, by the processor.

        Raises:
            RowError: the processor raises, or its tokens cannot be found in the text.
        """
        kind = type(self.processor).__name__
        if self.most_images is not None and len(images) > self.most_images:
            raise RowError(f"the row has {counted(len(images), 'image')}; {kind} takes {self.most_images} per row")
        if self._named is not None and self._named != self.image_token and self._named in text:
            raise RowError(f"the text contains {self._named!r}, which the model takes for part of an image")
        split = len(text) if suffix_start is None or suffix_start < 0 else suffix_start
        before, after = text[:split], text[split:]
        given = (before if self._takes_suffix else text).replace(IMAGE_MARK, "")
        recorder = _Recorder(self.tokenizer)
        applied = copy(self.applied)
        vars(applied)["tokenizer"] = recorder
        options: dict[str, Any] = {"suffix": [after]} if after and self._takes_suffix else {}
        bos = self.tokenizer.bos_token
        if isinstance(bos, str) and text.startswith(bos):  # as `apply_chat_template`
            options["add_special_tokens"] = False
        if images:
            options["images"] = [list(images)] if self._nests else list(images)
        call: Any = applied
        try:
            made = call(text=[given], return_tensors="pt", **options)
            ids = made["input_ids"][0].numpy().astype(np.int32)
        except Exception as error:  # a processor is third-party code and may raise anything
            raise RowError(f"{kind} refuses it: {type(error).__name__}: {error}") from error
        parts = [before, after] if self._takes_suffix else [text]
        starts, stops = self._characters(ids, recorder, parts)
        mapped = np.flatnonzero(stops)
        inputs = {name: made[name] for name in made if name not in OF_TEXT}
        loose = [name for name, value in inputs.items() if not isinstance(value, torch.Tensor)]
        if loose:
            raise RowError(f"{kind} gives {loose[0]} as a {type(inputs[loose[0]]).__name__}, not as a tensor")
        added = len(ids) - 1 - int(mapped[-1]) if len(mapped) else 0
        return WholeRow(ids, starts, stops, added, inputs)

    def _characters(self, ids: np.ndarray, recorder: _Recorder, parts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Of each token the characters of the text that it stands for, [start, stop); 0 and 0 for an added one."""
        encoding, places = self._call_of_text(recorder, parts)
        if encoding.overflowing:
            raise RowError(f"{type(self.processor).__name__} cuts it off after {len(encoding.ids):,} tokens")
        first, last = _common(ids, encoding.ids)
        begins = np.cumsum([0, *map(len, parts)])
        starts, stops = np.zeros(len(ids), np.int32), np.zeros(len(ids), np.int32)
        shift = len(ids) - len(encoding.ids)
        for number, (sequence, (start, stop)) in enumerate(zip(encoding.sequence_ids, encoding.offsets, strict=True)):
            if sequence is None or first <= number < len(encoding.ids) - last:
                continue
            inside = places[sequence][start:stop]
            inside = inside[inside >= 0]
            if len(inside):
                token = number if number < first else number + shift
                starts[token], stops[token] = begins[sequence] + inside[0], begins[sequence] + inside[-1] + 1
        return starts, stops

    def _call_of_text(self, recorder: _Recorder, parts: Sequence[str]) -> tuple[Encoding, list[np.ndarray]]:
        """The call of the tokenizer that was given the row's text, and the places of its characters, by part."""
        problem = RowError(f"{type(self.processor).__name__} does not call its tokenizer")
        for given, encoding in recorder.calls:
            try:
                places = [self._places(text, part) for text, part in zip(given, parts, strict=False)]
            except RowError as error:
                problem = error
                continue
            return encoding, places
        raise problem

    def _places(self, given: str, text: str) -> np.ndarray:
        """Of each character of what the tokenizer was given, its place in a row's text; -1 for an added one.

        Between the row's words only added tokens and white space may be written.
        """
        places = np.full(len(given), -1, np.int64)
        special = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.content in given}
        added = "(?:{}|\\s)*?".format("|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)))
        pieces = list(_pieces(text, self.image_token))
        found = re.fullmatch(added + "".join(f"({re.escape(piece)}){added}" for _, piece in pieces), given)
        if found is None:
            raise RowError(f"{type(self.processor).__name__} writes a text in another way: {given[:80]!r}")
        for number, (start, piece) in enumerate(pieces, 1):
            low, high = found.span(number)
            places[low:high] = np.arange(start, start + len(piece))
            end = start + len(piece)
            while high < len(given) and end < len(text) and given[high] == text[end] and given[high].isspace():
                places[high], high, end = end, high + 1, end + 1
            while low and start and given[low - 1] == text[start - 1] and given[low - 1].isspace():
                low, start = low - 1, start - 1
                places[low] = start
        return places


class _Recorder:
    """In the place of a tokenizer: keeps what it was given and what it made of it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.calls: list[tuple[list[str], Encoding]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any = None, text_pair: Any = None, **options: Any) -> BatchEncoding:
        made = self._tokenizer(text, text_pair, **options)
        given = [one if isinstance(one, str) else one[0] for one in (text, text_pair) if one is not None]
        self.calls += [(given, encoding) for encoding in (made.encodings or [])[:1]]
        return made


def _token(named: object) -> str | None:
    """A token as text; some processors keep it as an `AddedToken`."""
    return None if named is None else str(named)


def _pieces(text: str, token: str) -> Iterator[tuple[int, str]]:
    """The parts of a text between image tokens, without white space at their ends, and where each begins."""
    start = 0
    for part in text.split(token):
        if part.strip():
            yield start + len(part) - len(part.lstrip()), part.strip()
        start += len(part) + len(token)


def _common(ids: np.ndarray, others: Sequence[int]) -> tuple[int, int]:
    """How many tokens two lists share at the beginning, and then at the end."""
    fewest = min(len(ids), len(others))
    own, other = ids.tolist(), list(others)
    first = next((place for place in range(fewest) if own[place] != other[place]), fewest)
    rest = fewest - first
    return first, next((place for place in range(rest) if own[-1 - place] != other[-1 - place]), rest)
