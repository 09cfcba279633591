"""Rows that nearly repeat another one: candidates by MinHash, each compared n-gram by n-gram."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from shardtune.data.audit.ngrams import FEWEST, Grams, distinct, grams_of, mix
from shardtune.data.cache.blocks import block_of
from shardtune.data.cache.dataset import TokenDataset

NEAR = 0.7
"""Rows that share this part of their n-grams (those of both over those of either) are near duplicates,"""
TRAINED_NEAR = 0.3
"""if they also share this part of those that end in a target: different questions on one long text are none, and a
changed word of a short answer changes most of its n-grams."""
BANDS, BAND_VALUES = 16, 4
"""Rows that share 0.7 of their n-grams agree in all values of one band or more with a probability of 0.99."""
MOST_COMPARISONS = 1_000_000
_VALUES = BANDS * BAND_VALUES
_EMPTY = np.uint32(0xFFFFFFFF)
_CACHED_ROWS = 20_000
_STEP = 1_000


def sketches(grams: Grams, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The bands of a MinHash of each row, and which rows have enough n-grams for one.

    Each n-gram falls into one of 64 bins, whose smallest value is kept (one-permutation hashing); an empty bin has the
    value of the next one that is not (Shrivastava and Li, "Densifying one permutation hashing", 2014).

    Returns:
        uint32 [rows, BANDS], a hash of the values of each band; bool [rows].
    """
    bins = (grams.hashes >> np.uint64(58)).astype(np.int64)
    smallest = np.full(rows * _VALUES, _EMPTY, np.uint32)
    np.minimum.at(smallest, grams.rows * _VALUES + bins, (grams.hashes >> np.uint64(20)).astype(np.uint32))
    smallest = smallest.reshape(rows, _VALUES)
    enough = np.bincount(grams.rows, minlength=rows) >= FEWEST
    # Bins - 5 - - 9 take the values of 5 5 9 9 9: the next that is filled, around the end.
    around = np.concatenate([smallest, smallest], axis=1)
    places = np.where(around != _EMPTY, np.arange(2 * _VALUES), 4 * _VALUES)
    nearest = np.minimum.accumulate(places[:, ::-1], axis=1)[:, ::-1][:, :_VALUES]
    nearest[~enough] = 0
    filled = np.take_along_axis(around, nearest, axis=1).astype(np.uint64)
    with np.errstate(over="ignore"):
        filled += (nearest - np.arange(_VALUES)).astype(np.uint64) << np.uint64(32)
        hashes = np.zeros((rows, BANDS), np.uint64)
        for values in filled.reshape(rows, BANDS, BAND_VALUES).transpose(2, 0, 1):
            hashes = mix(hashes * np.uint64(0x9E3779B97F4A7C15) + mix(values + np.uint64(1)))
    return (hashes >> np.uint64(32)).astype(np.uint32), enough


class Sketches:
    """The bands of all rows of a set, in a file: 64 bytes of disk per row, of which one band is read at a time.

    Args:
        rows: how many.
    """

    def __init__(self, rows: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shardtune-audit-")
        self._bands = np.memmap(Path(self._folder.name) / "bands", np.uint32, "w+", shape=(BANDS, max(1, rows)))
        self.compared = np.zeros(rows, bool)

    def add(self, start: int, grams: Grams, rows: int) -> None:
        """The rows from `start` on."""
        bands, enough = sketches(grams, rows)
        self._bands[:, start : start + rows] = bands.T
        self.compared[start : start + rows] = enough

    def band(self, number: int) -> np.ndarray:
        """uint32 [rows]."""
        return np.array(self._bands[number, : len(self.compared)])

    def close(self) -> None:
        del self._bands
        self._folder.cleanup()


@dataclass(frozen=True, slots=True)
class NearRows:
    """Near duplicates within a set.

    Attributes:
        first: int64 [rows]; the first row of the group of near duplicates that a row is in, itself if in none.
        compared: how many rows have enough n-grams to be compared.
        pairs: the first pairs found: row, the row it resembles, and what part of their n-grams they share.
        is_complete: whether all candidates were compared.
    """

    first: np.ndarray
    compared: int
    pairs: list[tuple[int, int, float]]
    is_complete: bool


class Comparison:
    """Compares two rows of a set by their own n-grams.

    Args:
        rows: the set.
        keys: uint64 [rows]; rows of different keys share nothing.
        common: from `common_text`.
    """

    def __init__(self, rows: TokenDataset, keys: np.ndarray, common: np.ndarray) -> None:
        self._rows = rows
        self._keys = keys
        self._common = common
        self._grams = lru_cache(_CACHED_ROWS)(self._own_grams)

    def _own_grams(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        grams = grams_of(block_of(self._rows.row(row))).own(self._common)
        return distinct(grams.hashes), distinct(grams.hashes[grams.trained])

    def similarity(self, row: int, other: int) -> float:
        """The shared part of their n-grams; 0 where too little of what is trained is shared."""
        if self._keys[row] != self._keys[other]:
            return 0.0
        (one, of_targets), (two, other_targets) = self._grams(row), self._grams(other)
        return _jaccard(one, two) if _jaccard(of_targets, other_targets) >= TRAINED_NEAR else 0.0


def _jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Of two sets the size of the intersection over that of the union; 1 for two empty ones."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared) if len(one) or len(other) else 1.0


def near_rows(
    found: Sketches,
    first_copies: np.ndarray,
    similarity: Callable[[int, int], float],
    *,
    most_pairs: int,
    step: Callable[[int], None],
) -> NearRows:
    """Groups of rows of which each nearly repeats another one of the group.

    Rows that agree in a band are compared with the first of them and with the one before. A comparison that has been
    made, or that two groups make needless, is not made again.

    Args:
        found: the sketches of all rows.
        first_copies: bool [rows]; False for exact copies, which are not compared.
        similarity: of two rows.
        most_pairs: how many pairs to keep as examples.
        step: receives how many rows are done, of all in the end.
    """
    parent = np.arange(len(first_copies))
    candidates = np.flatnonzero(found.compared & first_copies)
    different, count = set[int](), len(first_copies)
    pairs: list[tuple[int, int, float]] = []
    left = MOST_COMPARISONS

    def group(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = int(parent[row])
        return row

    for number in range(BANDS):
        step(number * count // BANDS)
        band = found.band(number)[candidates]
        order = np.argsort(band, kind="stable")
        same = band[order][1:] == band[order][:-1]
        head = -1
        for place in np.flatnonzero(same).tolist():
            row = int(candidates[order[place + 1]])
            before = int(candidates[order[place]])
            head = before if not place or not same[place - 1] else head
            for other in dict.fromkeys((head, before)):
                one, two = group(other), group(row)
                if one == two or other * count + row in different or left <= 0:
                    continue
                left -= 1
                if not left % _STEP:
                    step(number * count // BANDS)
                share = similarity(row, other)
                if share < NEAR:
                    different.add(other * count + row)
                    continue
                parent[max(one, two)] = min(one, two)
                if len(pairs) < most_pairs:
                    pairs.append((row, other, share))
    for row in candidates[parent[candidates] != candidates].tolist():
        parent[row] = group(row)
    return NearRows(parent, len(candidates), pairs, left > 0)
