"""Texts as numbers, and the place of the first right document among all of a set."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

BLOCK = 1024
"""Queries whose scores are computed together."""


def text_number(text: str) -> int:
    """A number in int64 that stands for a text: texts with equal numbers are taken for the same."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def ranks_of_right(queries: np.ndarray, documents: np.ndarray, right: np.ndarray) -> list[float]:
    """For each query the place of its document among all, from 1: one more than documents with a higher score.

    Among documents with the same score it is the mean of their places; where a score is NaN, it is NaN.

    Args:
        queries: [queries, width].
        documents: [documents, width].
        right: [queries], the number of each query's document.
    """
    found: list[float] = []
    everything = torch.from_numpy(documents)
    for start in range(0, len(queries), BLOCK):
        scores = torch.from_numpy(queries[start : start + BLOCK]) @ everything.T
        own = scores.gather(1, torch.from_numpy(right[start : start + BLOCK])[:, None])
        places = 1 + (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2
        found += places.masked_fill(scores.isnan().any(1), torch.nan).tolist()
    return found
