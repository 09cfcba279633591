"""Encodes rows of texts; one that is too long is cut where its tokenizer cuts: at the end of each text, before its
closing tokens, or (`truncation_side`) at its beginning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizer, PreTrainedTokenizerBase

from shardtune.batch import Sample
from shardtune.config import Recipe
from shardtune.data.encoder import Row, RowDropped, RowError
from shardtune.errors import DataError
from shardtune.models.adapter_encoder import FieldEncoder, RowEncoding

PADDED = -1
"""Pads token ids, in rows and in batches; no tokenizer has such an id."""


@dataclass(frozen=True, slots=True)
class TextSample(Sample):
    """A row of tokens, or of texts, that is not cut yet.

    Attributes:
        parts: of long rows, in the shape of `input_ids`: 1 and 2 for tokens of the first and of the second text, 0 for
            what the tokenizer puts around them. None where it is not known.
    """

    parts: np.ndarray | None = None


class TextRows(RowEncoding, Protocol):
    """The part of a task that deals with texts."""

    token_fields: ClassVar[Sequence[str]]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def max_positions(self) -> int | None: ...
    def title(self, row: Row) -> str: ...
    def unread(self, row: Row) -> Sequence[str]: ...
    def beside(self, name: str) -> Sequence[str]: ...
    def size_of(self, fields: Mapping[str, np.ndarray]) -> int: ...


class TextEncoder(FieldEncoder):
    """`FieldEncoder` for rows whose fields hold tokens [length], or those of several texts [texts, longest].

    Args:
        task: whose methods are called.
        recipe: from which other processes make the same task.
        tokenizer: as for `FieldEncoder`.
    """

    def __init__(self, task: TextRows, recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        super().__init__(task, recipe, tokenizer)
        self._task = task

    def title(self, row: Row) -> str:
        return self._task.title(row)

    def unread(self, row: Row) -> Sequence[str]:
        return self._task.unread(row)

    def fit(self, sample: Sample) -> Sample:
        most, positions = self._limit.max_length, self._task.max_positions
        longest = self._longest(sample)
        if positions is not None and min(longest, most) > positions:
            raise DataError(
                f"the row has {longest:,} tokens, {self._recipe.actor.model.model_path} has positions for "
                f"{positions:,}",
                remedy=f"set data.max_length: {positions}, which cuts longer rows",
            )
        if longest <= most:
            return sample
        if self._limit.on_too_long == "drop":
            raise RowDropped(f"{longest:,} tokens")
        if self._limit.on_too_long in ("fail", "split"):
            raise DataError(
                f"the row has {longest:,} tokens, data.max_length is {most:,}"
                + (", and rows of a task are not split" if self._limit.on_too_long == "split" else ""),
                remedy="raise data.max_length, or set data.on_too_long to truncate or drop",
            )
        return self._cut(sample, most)

    def within(self, sample: Sample) -> Sample:
        """A row to be predicted, cut at `data.max_length` or the model's positions."""
        most = min(self._limit.max_length, self._task.max_positions or self._limit.max_length)
        return sample if self._longest(sample) <= most else self._cut(sample, most)

    def _longest(self, sample: Sample) -> int:
        return max(int(real_lengths(sample.fields[name]).max()) for name in self._task.token_fields)

    def _cut(self, sample: Sample, most: int) -> Sample:
        cut = Cut.of(self._task.tokenizer, most)
        parts = sample.parts if isinstance(sample, TextSample) else None
        fields = dict(sample.fields)
        for name in self._task.token_fields:
            ids = sample.fields[name]
            around = parts if name == "input_ids" else None
            for other in (name, *self._task.beside(name)):
                if other in fields:
                    fields[other] = shortened(fields[other], ids, cut, around)
        return replace(sample, fields=fields, size=self._task.size_of(fields))


def require_tokens(ids: Sequence[int]) -> None:
    """Refuse a text without a token, of which a model can make nothing."""
    if not len(ids):
        raise RowError("the text is empty: the tokenizer makes no token of it")


def real_lengths(ids: np.ndarray) -> np.ndarray:
    """The lengths of the texts of a field of ids, without padding."""
    return np.atleast_1d((ids != PADDED).sum(-1)) if ids.size else np.zeros(1, int)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tokenizer cuts long texts.

    Attributes:
        most: tokens that are kept.
        special: ids of special tokens.
        left: whether the beginning of a text is cut off, not its end.
        odd_to_first: of two long texts that share an odd number of tokens the first has one more; otherwise the longer.
    """

    most: int
    special: np.ndarray
    left: bool = False
    odd_to_first: bool = False

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, most: int) -> Cut:
        """As `tokenizer(..., truncation="longest_first", max_length=most)` does."""
        special, left = np.asarray(tokenizer.all_special_ids), tokenizer.truncation_side == "left"
        return cls(most, special, left, odd_to_first=isinstance(tokenizer, PreTrainedTokenizer))


def shortened(values: np.ndarray, ids: np.ndarray, cut: Cut, parts: np.ndarray | None = None) -> np.ndarray:
    """Up to `cut.most` entries of each text, without those at its end; special tokens that close a text are kept.

    Of a pair the longer text is cut first, as tokenizers do with `truncation="longest_first"`. With `cut.left` all this
    is done from the other end.

    Worked example: [CLS] a b c [SEP] cut to 4 is [CLS] a b [SEP]; [CLS] a b c d [SEP] x y [SEP] cut to 7 is
    [CLS] a b [SEP] x y [SEP].

    Args:
        values: [length] or [texts, longest]: ids, or what stands beside each of them.
        ids: the token ids, in the same shape.
        cut: how many are kept, and where.
        parts: `TextSample.parts`.
    """
    most = cut.most
    if values.ndim == 2:
        of_pairs = [None] * len(ids) if parts is None else parts
        together = zip(values, ids, of_pairs, strict=True)
        rows = [shortened(one, each, cut, pair) for one, each, pair in together]
        return np.stack(rows) if rows else values[:, :most]
    length = int((ids != PADDED).sum())
    if length <= most:
        return values[:most]
    along = slice(None, None, -1 if cut.left else 1)
    values, ids = values[:length][along], ids[:length][along]
    parts = None if parts is None else parts[:length][along]
    if parts is not None and int((parts == 0).sum()) < most:
        return values[_of_pair(parts, cut)][along]
    closing = int(np.isin(ids, cut.special)[::-1].cumprod().sum()) if len(cut.special) else 0
    closing = min(closing, most - 1)
    return np.concatenate([values[: most - closing], values[length - closing :]])[along]


def _of_pair(parts: np.ndarray, cut: Cut) -> np.ndarray:
    """Which tokens of a pair are kept: all special ones, and of the texts the first ones, as many as there is room for.

    The shorter text is whole if it fits into half of the room; otherwise each has half of it.
    """
    room = cut.most - int((parts == 0).sum())
    counts = {part: int((parts == part).sum()) for part in (1, 2)}
    less = 1 if counts[1] <= counts[2] and not cut.odd_to_first else 2
    kept = {less: max(room - counts[3 - less], min(counts[less], room // 2))}
    kept[3 - less] = room - kept[less]
    first, second = ((parts == part) & ((parts == part).cumsum() <= kept[part]) for part in (1, 2))
    return (parts == 0) | first | second


def parts_of(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], encoded: BatchEncoding) -> np.ndarray | None:
    """The parts of an encoded text or pair, as in `TextSample`.

    Args:
        tokenizer: which made it.
        texts: one or two.
        encoded: a batch of these alone.

    Returns:
        int8 [length]; None of a single text by a tokenizer written in Python, and where such a one changes tokens of a
        text beside the other.
    """
    ids = encoded["input_ids"][0]
    if encoded.is_fast:
        return np.array([0 if part is None else part + 1 for part in encoded.sequence_ids(0)], np.int8)
    if len(texts) == 1:
        return None
    parts, begin = np.zeros(len(ids), np.int8), 0
    for number, text in enumerate(texts, 1):
        alone = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        starts = (at for at in range(begin, len(ids) - len(alone) + 1) if ids[at : at + len(alone)] == alone)
        start = next(starts, None)
        if start is None:
            return None
        begin = start + len(alone)
        parts[start:begin] = number
    return parts
