"""Losses of an embedding model over all rows of a step."""

from __future__ import annotations

import torch
from torch.nn import functional


def info_nce(queries: torch.Tensor, documents: torch.Tensor, own: torch.Tensor, left_out: torch.Tensor) -> torch.Tensor:
    """The sum of each query's cross-entropy among all documents (van den Oord et al., 2018, arXiv:1807.03748).

    Args:
        queries: [rows, width], divided by the temperature.
        documents: [documents, width].
        own: [rows], the number of each query's document.
        left_out: bool [rows, documents], which documents are no wrong answers to a query.
    """
    scores = (queries @ documents.T).masked_fill(left_out, -torch.inf)
    return functional.cross_entropy(scores, own, reduction="sum")


def cosent(similarities: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """CoSENT, the logarithm of one plus the sum of exp(s_i - s_j) over all pairs of rows with score_i < score_j.

    It is that of sentence-transformers' CoSENTLoss for one batch of all rows; 0 where all scores are equal.

    Args:
        similarities: [rows], divided by the temperature.
        scores: [rows].
    """
    apart = similarities[:, None] - similarities
    apart = apart.masked_fill(scores[:, None] >= scores, -torch.inf).flatten()
    return torch.cat([apart.new_zeros(1), apart]).logsumexp(0)
