"""Rows whose text and images only their processor puts together: it is applied to each row as a whole."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Encoding
from transformers import BatchEncoding, PreTrainedTokenizerFast, ProcessorMixin

from shardtune.batch import Prompt, Sample
from shardtune.data.chat.encoder import no_end_token
from shardtune.data.chat.template import missing_template
from shardtune.data.encoder import RowDropped, RowError
from shardtune.data.images.chat_encoder import ImageChatEncoder
from shardtune.data.images.images import PROMPT_TEXT, ROW_TEXT, SUFFIX_START, StoredImage, to_fields
from shardtune.data.images.placeholders import BLANK, OF_TEXT, AppliedImages, Expanded
from shardtune.data.images.rows import IMAGE_MARK, mark_images
from shardtune.data.row_formats import Chat, Completion, Text
from shardtune.errors import ModelError

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
            raise RowError(f"the text holds {len(places)} times {self.image_token!r} for {len(sizes)} images")
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
            raise RowError(f"the row has {len(images)} images; {kind} takes {self.most_images} per row")
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


class WholeRowEncoder(ImageChatEncoder):
    """Encodes rows by their processor as wholes.

    A row keeps its text, of which its inputs are made again when a micro-batch is: no row is cut.
    """

    images: WholeRows  # pyright: ignore[reportIncompatibleVariableOverride]

    def fit(self, sample: Sample) -> Sample:
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

    def prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[dict[str, object]] | None = None,
        images: Sequence[object] = (),
    ) -> Prompt:
        if self.template is None:
            raise missing_template("data.chat_template")
        turns, named = mark_images(messages, images)
        stored = self.read_images(named)
        return self._prompt(self.template.render(self._prepared(turns).messages, tools, prompt=True), stored)

    def text_prompt(self, text: str, images: Sequence[object] = ()) -> Prompt:
        chat, named = mark_images([{"role": "user", "content": text}], images)
        whole = chat.messages[0]["content"].replace(IMAGE_MARK, self.images.image_token)
        return self._prompt(whole, self.read_images(named))

    def _prompt(self, text: str, stored: Sequence[StoredImage]) -> Prompt:
        return Prompt(self._prompt_tokens(text, stored), {**to_fields(stored, len(stored)), **_texts("", -1, text)})

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
        chat, rendering, left_out = self._rendered(chat, self.template)
        text, last = rendering.text, rendering.spans[-1] if rendering.spans else None
        neutral = 1.0 if self.train_on == "all" else 0.0
        characters = np.full(len(text), neutral, np.float32)
        for span in rendering.spans:
            assert last is not None
            characters[span.start : span.stop] = self._span_weight(chat, span, last)
        sample, spans = self._weighed(text, characters, images)
        sample = replace(sample, left_out=left_out)
        prompt, reference = self._question(chat, rendering) if self.with_prompts else (None, None)
        if prompt is None:
            return sample, 0, spans
        count = prompt.count(self.images.image_token)
        return self._asked(sample, prompt, (reference or "").replace(IMAGE_MARK, ""), images[:count]), count, spans

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
        return self._asked(sample, prompt, example.completion, images[:count]), count, spans

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


def _texts(row: str, suffix_start: int, prompt: str) -> dict[str, np.ndarray]:
    return {ROW_TEXT: _bytes(row), SUFFIX_START: np.array(suffix_start, np.int32), PROMPT_TEXT: _bytes(prompt)}


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)
