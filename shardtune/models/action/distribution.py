"""The distribution that action tokens are drawn from, and what a method needs of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from shardtune.models.action.tokens import ActionTokens


class ActionEvaluation(NamedTuple):
    """Actions under a policy, token by token, with a graph.

    Attributes:
        log_probs: [rows, steps * dimensions], natural logarithms of the probabilities of the given tokens; the sum over
            a row's is that of the whole chunk.
        entropy: [rows, steps * dimensions], in nats.
        values: [rows, steps * dimensions, 1]; zeros where the model has no value head.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    values: torch.Tensor


class ActionDistribution:
    """Probabilities of action tokens from a model's logits: over the action tokens alone, after temperature, top-k and
    top-p, as `predict_action_batch` draws. Computed in float32 at least.

    Args:
        logits: [..., vocabulary], such as `ActionBatch.logits`.
        tokens: the action tokens.
        temperature: logits are divided by it.
        top_k: only so many of the likeliest tokens can be drawn; 0: all.
        top_p: only the likeliest tokens of this total probability can be drawn.

    Attributes:
        log_probabilities: [..., number of action tokens]: of each, by its id from `tokens.first` on; -inf for one that
            cannot be drawn.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        tokens: ActionTokens,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> None:
        own = logits[..., tokens.first : tokens.top]
        own = own.to(torch.promote_types(own.dtype, torch.float32))
        flat = own.reshape(-1, own.shape[-1])
        for warp in warpers(temperature, top_k, top_p):
            flat = warp(torch.empty(0, dtype=torch.int64), flat)  # pyright: ignore[reportArgumentType] (not read)
        self.log_probabilities = torch.log_softmax(flat, dim=-1).reshape(own.shape)
        self._first = tokens.first

    def log_prob(self, ids: torch.Tensor) -> torch.Tensor:
        """The logarithm of the probability of tokens, int64 [...] by their ids in the vocabulary: [...]."""
        numbers = (ids - self._first).to(self.log_probabilities.device)
        return self.log_probabilities.gather(-1, numbers[..., None])[..., 0]

    def entropy(self) -> torch.Tensor:
        """In nats: [...]."""
        drawable = torch.isfinite(self.log_probabilities)
        finite = torch.where(drawable, self.log_probabilities, 0.0)
        return -torch.where(drawable, finite.exp() * finite, 0.0).sum(-1)


def warpers(temperature: float | None, top_k: int | None, top_p: float | None) -> list[LogitsProcessor]:
    """The processors that transformers applies to logits before sampling."""
    found: list[LogitsProcessor] = []
    if temperature is not None and temperature != 1.0:
        found.append(TemperatureLogitsWarper(temperature))
    if top_k:
        found.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1.0:
        found.append(TopPLogitsWarper(top_p))
    return found
