"""Encodes rows of texts; one that is too long is cut at the end of each text, without its closing token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from shardtune.batch import Sample
from shardtune.config import Recipe
from shardtune.data.encoder import Row, RowDropped, RowError
from shardtune.errors import DataError
from shardtune.models.adapter_encoder import FieldEncoder, RowEncoding

PADDED = -1
"""Pads token ids, in rows and in batches; no tokenizer has such an id."""


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
        special = np.asarray(self._task.tokenizer.all_special_ids)
        fields = dict(sample.fields)
        for name in self._task.token_fields:
            ids = sample.fields[name]
            for other in (name, *self._task.beside(name)):
                if other in fields:
                    fields[other] = shortened(fields[other], ids, most, special)
        return replace(sample, fields=fields, size=self._task.size_of(fields))


def require_tokens(ids: Sequence[int]) -> None:
    """Refuse a text without a token, of which a model can make nothing."""
    if not len(ids):
        raise RowError("the text is empty: the tokenizer makes no token of it")


def real_lengths(ids: np.ndarray) -> np.ndarray:
    """The lengths of the texts of a field of ids, without padding."""
    return np.atleast_1d((ids != PADDED).sum(-1)) if ids.size else np.zeros(1, int)


def shortened(values: np.ndarray, ids: np.ndarray, most: int, special: np.ndarray) -> np.ndarray:
    """The first `most` entries of each text; of a longer one that ends with a special token the last one is kept.

    Worked example: [CLS] a b c [SEP] cut to 4 is [CLS] a b [SEP].

    Args:
        values: [length] or [texts, longest]: ids, or what stands beside each of them.
        ids: the token ids, in the same shape.
        most: entries that are kept.
        special: ids of special tokens.
    """
    if values.ndim == 2:
        rows = [shortened(one, each, most, special) for one, each in zip(values, ids, strict=True)]
        return np.stack(rows) if rows else values[:, :most]
    length = int((ids != PADDED).sum())
    cut = values[:most].copy()
    if length > most and ids[length - 1] in special:
        cut[-1] = values[length - 1]
    return cut
