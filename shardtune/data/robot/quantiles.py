"""Exact quantiles of more numbers than fit in memory, found by counting in two passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_BINS = 1 << 16
_SIGN = np.uint32(1 << 31)


class Quantiles:
    """Quantiles of float32 vectors per dimension, as `np.quantile` interpolates them (linearly) in float64.

    The bits of a float, its sign turned, are an integer of the same order. The first pass counts the upper 16 bits,
    which gives the bin of each quantile; the second counts the lower 16 bits of the numbers in these bins.
    A dimension takes 0.5 MB in the first pass and 1 MB per quantile in the second, however many numbers there are.

    Args:
        dimensions: D.
        probabilities: of the quantiles, between 0 and 1.
    """

    def __init__(self, dimensions: int, probabilities: Sequence[float]) -> None:
        self._probabilities = np.array(probabilities)
        self._first = np.arange(dimensions) * _BINS
        self._upper = np.zeros(dimensions * _BINS, np.int64)
        self._count = 0

    def count(self, values: np.ndarray) -> None:
        """The first pass: every vector once, float32 [N, D], finite."""
        np.add.at(self._upper, ((_ordered(values) >> 16) + self._first).reshape(-1), 1)
        self._count += len(values)

    def narrow(self) -> None:
        """Ends the first pass."""
        upper = np.cumsum(self._upper.reshape(len(self._first), _BINS), axis=1)
        exact = self._probabilities * (self._count - 1)
        below = np.floor(exact).astype(np.int64)
        self._share = exact - below
        ranks = np.stack([below, np.minimum(below + 1, self._count - 1)], axis=1).reshape(-1)
        # [D, ranks]: the upper bits of the number of that rank, and its rank among those that share them.
        self._bins = np.stack([np.searchsorted(one, ranks, side="right") for one in upper])
        before = np.take_along_axis(np.pad(upper, ((0, 0), (1, 0))), self._bins, axis=1)
        self._ranks = ranks - before
        self._lower = np.zeros((len(ranks), len(self._first) * _BINS), np.int64)

    def count_again(self, values: np.ndarray) -> None:
        """The second pass: the same vectors once more, in any order."""
        ordered = _ordered(values)
        upper, lower = ordered >> 16, (ordered & 0xFFFF) + self._first
        for place, counts in enumerate(self._lower):
            np.add.at(counts, lower[upper == self._bins[:, place]], 1)

    def values(self) -> np.ndarray:
        """float64 [probabilities, D]."""
        found = np.empty((len(self._lower), len(self._first)))
        for place, counts in enumerate(self._lower):
            sums = np.cumsum(counts.reshape(len(self._first), _BINS), axis=1)
            ranks = self._ranks[:, place]
            lower = [np.searchsorted(one, rank, side="right") for one, rank in zip(sums, ranks, strict=True)]
            found[place] = _number((self._bins[:, place] << 16) + np.array(lower))
        below, above = found[0::2], found[1::2]
        share, apart = self._share[:, None], above - below
        # The two forms of numpy's interpolation, so that both ends are exact.
        return np.where(share < 0.5, below + apart * share, above - apart * (1 - share))


def _ordered(values: np.ndarray) -> np.ndarray:
    """int64 [N, D]: integers in the order of the floats."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN).astype(np.int64)


def _number(ordered: np.ndarray) -> np.ndarray:
    """The reverse of `_ordered`, in float64."""
    bits = ordered.astype(np.uint32)
    return np.where(bits & _SIGN, bits ^ _SIGN, ~bits).astype(np.uint32).view(np.float32).astype(np.float64)
