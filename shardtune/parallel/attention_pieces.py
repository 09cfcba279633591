"""Attention of pieces of documents, added up as it comes: the softmax over all keys of a query, whose keys are met in
several places (online softmax, Milakov and Gimelshein, 2018, arXiv:1805.02867).

Here for any device and dtype, with products and sums in at least fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from shardtune.parallel.ring_plan import Piece

SCORES = {"cpu": 2**20}
MOST_SCORES = 2**24
"""Scores that are computed at once, of all heads; on a CPU as many as its caches hold."""
KEYS = 1024
"""Keys of them at most."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Tile(NamedTuple):
    """Queries and keys whose scores are computed at once; `mask`: which see each other, None: all."""

    queries: slice
    keys: slice
    mask: torch.Tensor | None


class Rule(NamedTuple):
    """How scores are computed.

    Attributes:
        causal: queries do not see what comes after them.
        window: tokens that a query sees to a side, itself included; 0: all.
        softcap: scores become `softcap * tanh(scores / rule.softcap)`; 0: they do not.
        scale: factor on the scores.
    """

    causal: bool
    window: int
    softcap: float
    scale: float


def add_attention(
    output: torch.Tensor,
    sums: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pieces: Sequence[Piece],
    rule: Rule,
) -> None:
    """Add keys and values to the attention of queries.

    Args:
        output: [heads, queries, value_dim], of the keys before these; zeros where there were none.
        sums: [heads, queries], the logarithm of the sum of the exponentials of scores; -inf where there were none.
        query: [heads, queries, head_dim].
        key: [keys, key_value_heads, head_dim].
        value: [keys, key_value_heads, value_dim].
        pieces: which queries attend to which keys.
        rule: of the scores.
    """
    for tile in _tiles(pieces, rule, query):
        q, k, v = _of_tile(tile, query, key, value)
        scores = _scores(q, k, tile, rule)
        groups = scores.shape[:-1]
        found = scores.logsumexp(-1)
        weights = (scores - _finite(found)[..., None]).exp_().flatten(1, 2)
        before = sums[:, tile.queries].view(groups)
        after = torch.logaddexp(before, found)
        share, own = (before - _finite(after)).exp_(), (found - _finite(after)).exp_()
        held = output[:, tile.queries].view(*groups, -1)
        added = (weights @ v).view_as(held)
        output[:, tile.queries] = (held * share[..., None] + added * own[..., None]).flatten(0, 1)
        sums[:, tile.queries] = after.flatten(0, 1)


def add_gradients(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    grad_output: torch.Tensor,
    sums: torch.Tensor,
    products: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pieces: Sequence[Piece],
    rule: Rule,
) -> None:
    """Add the gradients that these keys and values have a part in; arguments as of `add_attention`.

    Args:
        grad_query: as `query`, of keys before these.
        grad_key: as `key`.
        grad_value: as `value`.
        grad_output: [heads, queries, value_dim].
        sums: of all keys.
        products: [heads, queries], sums over `value_dim` of the output of all keys times its gradient.
    """
    for tile in _tiles(pieces, rule, query):
        q, k, v = _of_tile(tile, query, key, value)
        scores = _scores(q, k, tile, rule)
        groups = scores.shape[:-1]
        weights = (scores - sums[:, tile.queries].view(groups)[..., None]).exp()
        grad = grad_output[:, tile.queries].to(q.dtype).reshape(*q.shape[:2], -1)
        of_values = weights.flatten(1, 2).transpose(1, 2) @ grad
        of_scores = (grad @ v.transpose(1, 2)).view_as(weights)
        of_scores = of_scores.sub_(products[:, tile.queries].view(groups)[..., None]).mul_(weights)
        if rule.softcap:
            of_scores.mul_(1 - (scores / rule.softcap).square_())
            of_scores.masked_fill_(weights == 0, 0.0)  # scores that are masked are infinite
        of_scores = of_scores.mul_(rule.scale).flatten(1, 2)
        grad_query[:, tile.queries] += (of_scores @ k).view(query.shape[0], -1, query.shape[-1])
        grad_key[tile.keys] += (of_scores.transpose(1, 2) @ q).transpose(0, 1)
        grad_value[tile.keys] += of_values.transpose(0, 1)


def _finite(sums: torch.Tensor) -> torch.Tensor:
    """Instead of -inf, of queries that have seen no key, a number that -inf can be subtracted from."""
    return sums.clamp(min=torch.finfo(sums.dtype).min)


def _of_tile(
    tile: _Tile, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tile's queries [key_value_heads, groups * queries, head_dim], keys and values [key_value_heads, keys, size]."""
    dtype = accumulation_dtype(query.dtype)
    heads = key.shape[1]
    q = query[:, tile.queries].to(dtype).reshape(heads, -1, query.shape[-1])
    return q, key[tile.keys].to(dtype).transpose(0, 1), value[tile.keys].to(dtype).transpose(0, 1)


def _scores(q: torch.Tensor, k: torch.Tensor, tile: _Tile, rule: Rule) -> torch.Tensor:
    """[key_value_heads, groups, queries, keys]."""
    queries = tile.queries.stop - tile.queries.start
    scores = (q @ k.transpose(1, 2)).mul_(rule.scale).view(k.shape[0], -1, queries, k.shape[1])
    if rule.softcap:
        scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    return scores if tile.mask is None else scores.masked_fill_(~tile.mask, float("-inf"))


def _tiles(pieces: Sequence[Piece], rule: Rule, query: torch.Tensor) -> Iterator[_Tile]:
    """The parts of pieces whose scores are computed at once, without those that are masked as a whole."""
    most = SCORES.get(query.device.type, MOST_SCORES)
    for piece in pieces:
        keys = piece.key_end - piece.key
        width = min(keys, KEYS)
        height = max(16, most // (query.shape[0] * width))
        for start in range(piece.query, piece.query_end, height):
            end = min(start + height, piece.query_end)
            low, high = piece.distance + start - piece.query, piece.distance + end - 1 - piece.query
            first, last = 0, keys  # of the keys that any of these queries sees
            if rule.causal:
                last = min(last, high + 1)
            if rule.window:
                first, last = max(first, low - rule.window + 1), min(last, high + rule.window)
            for place in range(first, last, width):
                stop = min(place + width, last)
                mask = None
                hidden = rule.causal and stop - 1 > low
                if hidden or (rule.window and max(high - place, stop - 1 - low) >= rule.window):
                    mask = _visible(low - place, end - start, stop - place, rule, query.device)
                yield _Tile(slice(start, end), slice(piece.key + place, piece.key + stop), mask)


def _visible(distance: int, queries: int, keys: int, rule: Rule, device: torch.device) -> torch.Tensor:
    """Bool [queries, keys]: which keys each query sees, if the first ones are `distance` apart."""
    apart = torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device) + distance
    mask = apart >= 0 if rule.causal else torch.ones_like(apart, dtype=torch.bool)
    return mask & (apart.abs() < rule.window) if rule.window else mask
