"""Runs of tokens (n-grams) as hashes, by which rows are compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardtune.data.cache.blocks import TokenBlock
from shardtune.data.cache.dataset import TokenDataset

SIZE = 5
"""Tokens of an n-gram."""
FEWEST = 8
"""A row with fewer n-grams of its own is compared as a whole only."""
COMMON_SHARE = 0.1
"""An n-gram of more than this share of the rows is the text of a template or system prompt, and not compared."""
COMMON_FEWEST = 10
"""Nor is one of fewer rows than this taken for such text."""
SLOTS = 1 << 22
SAMPLED_ROWS, SAMPLED_TOKENS = 20_000, 8_000_000
BLOCK_TOKENS, BLOCK_ROWS = 1 << 19, 1 << 15
_MASK = np.uint64(SLOTS - 1)
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def mix(values: np.ndarray) -> np.ndarray:
    """uint64 values, scattered over their whole range."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(31))) * _MIX
    return values ^ (values >> np.uint64(29))


def distinct(values: np.ndarray) -> np.ndarray:
    """The different values, ascending; quicker than `np.unique` for integers."""
    ordered = np.sort(values)
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered[new]


@dataclass(frozen=True, slots=True)
class Grams:
    """The n-grams of some rows, row by row.

    Attributes:
        hashes: uint64 [n-grams].
        rows: int64 [n-grams], ascending, counted within the block.
        trained: bool [n-grams]; those whose last token is a target.
    """

    hashes: np.ndarray
    rows: np.ndarray
    trained: np.ndarray

    def only(self, chosen: np.ndarray) -> Grams:
        return Grams(self.hashes[chosen], self.rows[chosen], self.trained[chosen])

    def own(self, common: np.ndarray) -> Grams:
        """Those that are no common text.

        Args:
            common: bool [SLOTS], from `common_text`.
        """
        return self.only(~common[(self.hashes & _MASK).astype(np.int64)])

    def of_rows_with(self, keys: np.ndarray) -> Grams:
        """The same, with hashes that differ between rows of different keys (uint64 [rows]): of other images, say."""
        return Grams(self.hashes ^ keys[self.rows], self.rows, self.trained)


def grams_of(block: TokenBlock) -> Grams:
    """All n-grams of rows; none of a row with fewer tokens.

    Worked example: a row of tokens 7 8 9 7 8 9 has two of five tokens, (7 8 9 7 8) and (8 9 7 8 9).
    """
    count = len(block.tokens) - SIZE + 1
    if count <= 0:
        return Grams(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, bool))
    rows = block.row_of_token
    whole = rows[:count] == rows[SIZE - 1 :]
    with np.errstate(over="ignore"):
        scattered = mix((block.tokens.astype(np.uint64) + np.uint64(1)) * _STEP)
        hashes = scattered[:count].copy()
        for place in range(1, SIZE):
            hashes *= _STEP
            hashes += scattered[place : place + count]
    return Grams(mix(hashes[whole]), rows[:count][whole], block.trained[SIZE - 1 :][whole])


def common_text(rows: TokenDataset) -> np.ndarray:
    """Which n-grams are text that many rows share, counted over evenly spaced rows, each different row once.

    Returns:
        bool [SLOTS] by the lower bits of an n-gram's hash; another n-gram of the same bits is left out with it.
    """
    mean = max(1.0, float(rows.lengths.mean())) if len(rows) else 1.0
    number = min(len(rows), SAMPLED_ROWS, max(1, int(SAMPLED_TOKENS / mean)))
    sample = rows.select(np.unique(np.linspace(0, len(rows) - 1, number).astype(np.int64)))
    counts, seen, counted = np.zeros(SLOTS, np.int32), set[int](), 0
    for _, block in sample.blocks(BLOCK_TOKENS, BLOCK_ROWS):
        grams = grams_of(block)
        sums = np.zeros(len(block), np.uint64)
        np.add.at(sums, grams.rows, grams.hashes)
        first = np.array([value not in seen and not seen.add(value) for value in sums.tolist()], bool)
        counted += int(first.sum())
        slots = (grams.hashes & _MASK).astype(np.int64)[first[grams.rows]]
        each = distinct(grams.rows[first[grams.rows]] * SLOTS + slots)
        counts += np.bincount(each % SLOTS, minlength=SLOTS).astype(np.int32)
    return counts > max(COMMON_FEWEST, COMMON_SHARE * counted)
