"""Mean, standard deviation, minimum and maximum of many vectors, computed piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Moments:
    """Of the vectors seen so far, per dimension, in float64.

    Attributes:
        count: how many vectors.
        mean, squares: float64 [D]; `squares` is the sum of squared differences from the mean.
        least, greatest: float64 [D].
    """

    count: int
    mean: np.ndarray
    squares: np.ndarray
    least: np.ndarray
    greatest: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> Moments:
        """Of at least one vector: [N, D], finite."""
        wide = values.astype(np.float64)
        mean = wide.mean(axis=0)
        return cls(len(wide), mean, np.square(wide - mean).sum(axis=0), wide.min(axis=0), wide.max(axis=0))

    @property
    def std(self) -> np.ndarray:
        """As `np.std`: the population's, not an estimate from a sample."""
        return np.sqrt(self.squares / self.count)

    def joined(self, other: Moments) -> Moments:
        """Of both sets of vectors together (Chan, Golub and LeVeque, 1979: no difference of large squares)."""
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        squares = self.squares + other.squares + np.square(apart) * (self.count * other.count / count)
        least, greatest = np.minimum(self.least, other.least), np.maximum(self.greatest, other.greatest)
        return Moments(count, mean, squares, least, greatest)
