"""One pass over the rows of a set: what each of them is, and what other passes need of it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from shardtune.data.audit.contamination import EvaluationGrams
from shardtune.data.audit.content import content_keys, field_keys
from shardtune.data.audit.near import Sketches
from shardtune.data.audit.ngrams import BLOCK_ROWS, BLOCK_TOKENS, grams_of
from shardtune.data.cache.blocks import TokenBlock
from shardtune.data.cache.dataset import TokenDataset

SHORT_ANSWER = 8
"""A row with more trained tokens than this is not looked at for letters and digits."""
_AFTER_END = 2
"""Tokens that a template may write after the end of a turn: a line break, the end of the sequence."""


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What the rows of a set are.

    Attributes:
        keys: uint64 [rows]; equal for rows that are the same to the model. others: of what they have besides tokens.
        trained: int32 [rows]; trained tokens.
        near_empty: bool [rows]; without a letter, digit or symbol in what is trained.
        untrained_end: bool [rows]; with a trained text that no trained end-of-turn token follows.
    """

    keys: np.ndarray
    others: np.ndarray
    trained: np.ndarray
    near_empty: np.ndarray
    untrained_end: np.ndarray


class Written:
    """Which tokens are more than space and punctuation.

    Args:
        tokenizer: None where there is none: then a row with one trained token at most is near-empty.
        stops: tokens that end a turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stops: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bool] = dict.fromkeys(stops, False)
        if tokenizer is not None:
            self._known.update(dict.fromkeys(tokenizer.all_special_ids, False))

    def near_empty(self, block: TokenBlock, trained: np.ndarray) -> np.ndarray:
        """Bool [rows]."""
        if self._tokenizer is None:
            return (trained <= 1) & (block.lengths > 0)
        short = (trained <= SHORT_ANSWER) & (block.lengths > 0)
        looked_at = block.trained & short[block.row_of_token]
        tokens, inverse = np.unique(block.tokens[looked_at], return_inverse=True)
        is_written = np.zeros(len(block.tokens), bool)
        is_written[looked_at] = np.array([self._is_written(token) for token in tokens.tolist()], bool)[inverse]
        return short & (block.counts(is_written) == 0)

    def _is_written(self, token: int) -> bool:
        if token not in self._known and self._tokenizer is not None:
            text = str(self._tokenizer.decode([token]))
            # A part of a character that takes several tokens has no category of its own.
            self._known[token] = any(letter == "\ufffd" or unicodedata.category(letter)[0] in "LNS" for letter in text)
        return self._known[token]


def untrained_ends(block: TokenBlock, stops: Sequence[int]) -> np.ndarray:
    """Bool [rows]: those with a run of trained tokens at whose end no token of `stops` is trained.

    A run that a template continues behind the end of the turn (`train_on: all`) may have two more tokens.
    """
    edges = np.zeros(len(block.tokens) + 1, np.int8)
    edges[:-1] += block.trained
    edges[1:] -= block.trained
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    stop_places = np.concatenate([[-1], np.flatnonzero(np.isin(block.tokens, stops))])
    last = stop_places[np.searchsorted(stop_places, ends) - 1]
    faulty = (last < starts) | (last < ends - 1 - _AFTER_END)
    found = np.zeros(len(block), bool)
    found[np.searchsorted(block.offsets, starts[faulty], side="right") - 1] = True
    return found


def scan(
    rows: TokenDataset,
    stops: Sequence[int],
    written: Written,
    *,
    common: np.ndarray | None = None,
    sketches: Sketches | None = None,
    collect: EvaluationGrams | None = None,
    look_up: Mapping[str, EvaluationGrams] | None = None,
    sample: int | None = None,
    step: Callable[[int], None],
) -> RowFacts:
    """Read all rows of a set once.

    Args:
        rows: the set.
        stops: tokens that end a turn; none: ends are not looked at.
        written: judges short answers.
        common: text that is not compared, from `common_text`; needed for the following.
        sketches: receives what near duplicates are found by.
        collect: receives the n-grams of an evaluation set.
        look_up: the evaluation sets whose n-grams are looked for.
        sample: how many rows are compared at most, evenly spaced; None: all.
        step: receives how many rows are done.
    """
    count = len(rows)
    facts = RowFacts(
        np.empty(count, np.uint64), np.zeros(count, np.uint64), np.zeros(count, np.int32), np.zeros(count, bool),
        np.zeros(count, bool),
    )  # fmt: skip
    every = 1 if sample is None else max(1, -(-count // sample))
    for start, block in rows.blocks(BLOCK_TOKENS, BLOCK_ROWS):
        here = slice(start, start + len(block))
        facts.others[here] = field_keys(rows, start, len(block))
        facts.keys[here] = content_keys(block, facts.others[here])
        facts.trained[here] = block.counts(block.trained)
        facts.near_empty[here] = written.near_empty(block, facts.trained[here])
        if len(stops):
            facts.untrained_end[here] = untrained_ends(block, stops)
        if common is not None:
            grams = grams_of(block).own(common).of_rows_with(facts.others[here])
            grams = grams if every == 1 else grams.only((grams.rows + start) % every == 0)
            if sketches is not None:
                sketches.add(start, grams, len(block))
            if collect is not None:
                collect.add(start, grams)
            for index in (look_up or {}).values():
                index.look_up(start, grams)
        step(start + len(block))
    return facts
