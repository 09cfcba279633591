"""Evaluation rows that training has too: as they are, or most of their n-grams in one training row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardtune.data.audit.ngrams import FEWEST, SLOTS, Grams

COVERED = 0.7
"""An evaluation row of which one training row has this part of the n-grams, or of those of the prompt, is a near
copy."""
_MASK = np.uint64(SLOTS - 1)
_MOST_ROWS_PER_GRAM = 64


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


class EvaluationGrams:
    """The n-grams of an evaluation set, which training rows are looked up in: 17 bytes per token of the set.

    Args:
        rows: of the set.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._best = _Best(np.full(rows, -1, np.int64), np.zeros(rows, np.float32))

    def add(self, start: int, grams: Grams) -> None:
        """The n-grams of the evaluation rows from `start` on, each once per row."""
        order = np.lexsort((~grams.trained, grams.hashes, grams.rows))
        hashes, rows, trained = grams.hashes[order], grams.rows[order], grams.trained[order]
        new = np.ones(len(order), bool)
        new[1:] = (hashes[1:] != hashes[:-1]) | (rows[1:] != rows[:-1])
        self._pieces.append((hashes[new], (rows[new] + start).astype(np.int32), trained[new]))

    def finish(self) -> None:
        """All rows of the set are added."""
        hashes, rows, trained = (np.concatenate(column) for column in zip(*self._pieces, strict=True))
        self._pieces = []
        self._all = np.bincount(rows, minlength=self._rows)
        self._of_prompt = np.bincount(rows[~trained], minlength=self._rows)
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._rows_of, self._trained = hashes[order], rows[order], trained[order]
        self._has = np.zeros(SLOTS, bool)
        self._has[(hashes & _MASK).astype(np.int64)] = True

    def look_up(self, start: int, grams: Grams) -> None:
        """Find training rows, from `start` on, that have n-grams of the set."""
        hits = grams.only(self._has[(grams.hashes & _MASK).astype(np.int64)])
        if not len(hits.hashes):
            return
        order = np.lexsort((hits.hashes, hits.rows))
        hashes, others = hits.hashes[order], hits.rows[order]
        new = np.ones(len(order), bool)
        new[1:] = (hashes[1:] != hashes[:-1]) | (others[1:] != others[:-1])
        hashes, others = hashes[new], others[new]
        first = np.searchsorted(self._hashes, hashes)
        counts = np.minimum(np.searchsorted(self._hashes, hashes, side="right") - first, _MOST_ROWS_PER_GRAM)
        # N-grams at the places 4 and 9, of 2 and 1 evaluation rows, have the rows at 4 5 and 9.
        ends = np.cumsum(counts)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - counts), counts)
        pairs = np.repeat(others, counts) * self._rows + self._rows_of[places]
        both, inverse = np.unique(pairs, return_inverse=True)
        found = np.bincount(inverse, minlength=len(both))
        of_prompt = np.bincount(inverse[~self._trained[places]], minlength=len(both))
        rows = both % self._rows
        shares = np.maximum(_part(found, self._all[rows]), _part(of_prompt, self._of_prompt[rows]))
        self._best.update(rows, both // self._rows + start, shares)

    @property
    def compared(self) -> np.ndarray:
        """Bool [rows]: those with enough n-grams."""
        return self._all >= FEWEST

    def covered(self) -> Mapping[int, tuple[int, float]]:
        """Evaluation row -> the training row that is nearest, and what part of the n-grams it has."""
        rows = np.flatnonzero(self._best.share >= COVERED).tolist()
        return {row: (int(self._best.row[row]), float(self._best.share[row])) for row in rows}


def _part(found: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """What part of them was found; 0 where there are too few to say."""
    return np.where(whole >= FEWEST, found / np.maximum(whole, 1), 0.0).astype(np.float32)
