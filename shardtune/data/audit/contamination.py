"""Evaluation rows that training has too: as they are, or most of their n-grams in one training row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardtune.data.audit.near import TRAINED_NEAR
from shardtune.data.audit.ngrams import FEWEST, Grams

COVERED = 0.7
"""An evaluation row is a near copy if one training row has this part of its n-grams, and `TRAINED_NEAR` of those of its
targets; or this part of those of its prompt, and `END_COVERED` of those of the prompt's end. So another question on the
same text is none."""
END_COVERED = 0.5
PROMPT_END = 16
"""The n-grams before the first target that count as the end of a prompt."""
_SLOTS_PER_GRAM, _MOST_SLOTS = 32, 1 << 27
_MOST_ROWS_PER_GRAM = 64
"""An n-gram of more evaluation rows is common text too, and not looked for."""


@dataclass(slots=True)
class _Best:
    """For each evaluation row the training row that has most of its n-grams: int64 and float32 [rows]."""

    row: np.ndarray
    share: np.ndarray

    def update(self, rows: np.ndarray, others: np.ndarray, shares: np.ndarray) -> None:
        order = np.argsort(shares, kind="stable")  # of several for one row the last assignment counts
        rows, others, shares = rows[order], others[order], shares[order]
        better = shares > self.share[rows]
        self.row[rows[better]], self.share[rows[better]] = others[better], shares[better]


_TARGET, _PROMPT, _END = 1, 2, 4
"""The parts of a row that an n-gram is in."""


class EvaluationGrams:
    """The n-grams of an evaluation set, in which those of training rows are looked up.

    At most 77 bytes per token of the set.

    Args:
        rows: of the set.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._best = _Best(np.full(rows, -1, np.int64), np.zeros(rows, np.float32))

    def add(self, start: int, grams: Grams) -> None:
        """The n-grams of the evaluation rows from `start` on, each once per row."""
        parts = _parts(grams)
        order = np.lexsort((grams.hashes, grams.rows))
        hashes, rows = grams.hashes[order], grams.rows[order]
        new = np.flatnonzero(_is_new(hashes, rows))
        merged = np.bitwise_or.reduceat(parts[order], new) if len(new) else parts
        self._pieces.append((hashes[new], (rows[new] + start).astype(np.int32), merged))

    def finish(self) -> None:
        """All rows of the set are added."""
        hashes, rows, parts = (np.concatenate(column) for column in zip(*self._pieces, strict=True))
        self._pieces = []
        order = np.argsort(hashes, kind="stable")
        hashes, rows, parts = hashes[order], rows[order], parts[order]
        starts = np.flatnonzero(_is_new(hashes, np.zeros(len(hashes), np.int32)))
        sizes = np.diff(starts, append=len(hashes))
        rare = np.repeat(sizes <= _MOST_ROWS_PER_GRAM, sizes)
        hashes, self._rows_of, self._parts = hashes[rare], rows[rare], parts[rare]
        self._hashes, self._all = hashes, np.bincount(self._rows_of, minlength=self._rows)
        self._in_part = {
            part: np.bincount(self._rows_of[self._parts & part > 0], minlength=self._rows)
            for part in (_TARGET, _PROMPT, _END)
        }
        # Most n-grams of training are in no evaluation row, which one look at a table shows.
        size = 1 << min(_MOST_SLOTS, _SLOTS_PER_GRAM * len(hashes)).bit_length()
        self._mask = np.uint64(size - 1)
        self._has = np.zeros(size, bool)
        self._has[(hashes & self._mask).astype(np.int64)] = True

    def look_up(self, start: int, grams: Grams) -> None:
        """Find training rows, from `start` on, that have n-grams of the set."""
        hits = grams.only(self._has[(grams.hashes & self._mask).astype(np.int64)])
        if not len(hits.hashes):
            return
        order = np.lexsort((hits.hashes, hits.rows))
        hashes, others = hits.hashes[order], hits.rows[order]
        new = _is_new(hashes, others)
        hashes, others = hashes[new], others[new]
        first = np.searchsorted(self._hashes, hashes)
        counts = np.searchsorted(self._hashes, hashes, side="right") - first
        # N-grams at the places 4 and 9, of 2 and 1 evaluation rows, have the rows at 4 5 and 9.
        ends = np.cumsum(counts)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - counts), counts)
        pairs = np.repeat(others, counts) * self._rows + self._rows_of[places]
        both, inverse = np.unique(pairs, return_inverse=True)
        rows, parts = both % self._rows, self._parts[places]
        found = {
            part: np.bincount(inverse[parts & part > 0], minlength=len(both)) / np.maximum(whole[rows], 1)
            for part, whole in self._in_part.items()
        }
        whole = np.bincount(inverse, minlength=len(both)) / np.maximum(self._all[rows], 1)
        of_targets = np.where(self._in_part[_TARGET][rows] > 0, found[_TARGET], 1.0)
        shares = np.maximum(
            np.where((self._all[rows] >= FEWEST) & (of_targets >= TRAINED_NEAR), whole, 0.0),
            np.where((self._in_part[_END][rows] >= FEWEST) & (found[_END] >= END_COVERED), found[_PROMPT], 0.0),
        ).astype(np.float32)
        self._best.update(rows, both // self._rows + start, shares)

    @property
    def compared(self) -> np.ndarray:
        """Bool [rows]: those with enough n-grams."""
        return self._all >= FEWEST

    def covered(self) -> Mapping[int, tuple[int, float]]:
        """Evaluation row -> the training row that is nearest, and what part of the n-grams it has."""
        rows = np.flatnonzero(self._best.share >= COVERED).tolist()
        return {row: (int(self._best.row[row]), float(self._best.share[row])) for row in rows}


def _is_new(hashes: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Bool: the first of each row and hash, of n-grams in that order."""
    new = np.ones(len(hashes), bool)
    new[1:] = (hashes[1:] != hashes[:-1]) | (rows[1:] != rows[:-1])
    return new


def _parts(grams: Grams) -> np.ndarray:
    """uint8 [n-grams]: the parts that each is in, as a sum."""
    number = np.arange(len(grams.rows))
    count = int(grams.rows[-1]) + 1 if len(number) else 0
    first = np.searchsorted(grams.rows, np.arange(count), side="right")
    np.minimum.at(first, grams.rows[grams.trained], number[grams.trained])
    ahead = first[grams.rows] - number  # n-grams until the first one of targets
    is_end = (ahead > 0) & (ahead <= PROMPT_END)
    return (np.where(grams.trained, _TARGET, _PROMPT) + np.where(is_end, _END, 0)).astype(np.uint8)
