"""Attention of pieces of documents by torch's FlashAttention, as `attention_pieces` computes it on any device.

Where it does not agree with that on this device, it is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache

import torch

from shardtune.parallel.attention_pieces import Rule, add_attention, add_gradients
from shardtune.parallel.ring_plan import Piece, RingPlan, Sight
from shardtune.parallel.torch_private.operations import flash_attention_backward, flash_attention_forward

logger = logging.getLogger(__name__)
AGREE = 2e-2
"""Of the largest number: outputs and gradients in half precision, beside the same inputs in fp32."""
UNLIMITED = -1
Limits = tuple[int, int]
"""How many keys before and behind the diagonal that ends at the last query and the last key a query sees."""


def usable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule) -> bool:
    """Whether the kernel takes these tensors, and has been found to agree on this device."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or rule.softcap:
        return False
    size = query.shape[-1]
    if size != value.shape[-1] or size % 8 or size > 256:
        return False
    return agrees(query.device, query.dtype, query.shape[0] // key.shape[1], size)


@lru_cache
def agrees(device: torch.device, dtype: torch.dtype, groups: int, size: int) -> bool:
    """Whether outputs and gradients of a few small pieces are those of `attention_pieces`."""
    draw = torch.Generator().manual_seed(0)
    plan = RingPlan.of((0, 9, 64), 1, 0)
    far = "it gives other numbers"
    try:
        for sight in (Sight(True, None), Sight(True, 20), Sight(False, None), Sight(False, 20)):
            rule = Rule(sight.causal, sight.window or 0, 0.0, size**-0.5)
            shapes = (2 * groups, 64, size), (64, 2, size), (64, 2, size), (2 * groups, 64, size)
            tensors = [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]
            pieces = plan.exchanges(sight).own
            exact = _both(tensors, pieces, rule, flash=False)
            for found, wanted in zip(_both(tensors, pieces, rule, flash=True), exact, strict=True):
                if not float((found - wanted).abs().max()) <= AGREE * float(wanted.abs().max()):  # nor is NaN
                    raise ArithmeticError(far)
    except (RuntimeError, ArithmeticError) as error:
        logger.warning(
            "ring attention computes without FlashAttention on %s: %s", device, str(error).partition("\n")[0]
        )
        return False
    return True


def _both(tensors: Sequence[torch.Tensor], pieces: Sequence[Piece], rule: Rule, *, flash: bool) -> list[torch.Tensor]:
    """Output and gradients of queries, keys and values, for queries, keys, values and the gradient of the output."""
    query, key, value, grad = tensors
    output = torch.zeros(query.shape, device=query.device)
    sums = torch.full(query.shape[:2], -torch.inf, device=query.device)
    (attend if flash else add_attention)(output, sums, query, key, value, pieces, rule)
    result = output.to(query.dtype)
    of_query, of_key, of_value = (torch.zeros(tensor.shape, device=query.device) for tensor in (query, key, value))
    if flash:
        attend_backward(of_query, of_key, of_value, grad, result, sums, query, key, value, pieces, rule)
    else:
        products = (grad.float() * result).sum(-1)
        add_gradients(of_query, of_key, of_value, grad, sums, products, query, key, value, pieces, rule)
    return [output, of_query, of_key, of_value]


def attend(
    output: torch.Tensor,
    sums: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pieces: Sequence[Piece],
    rule: Rule,
) -> None:
    """As `attention_pieces.add_attention`."""
    for limits, some in _calls(pieces, rule).items():
        ends = _ends(some, query.device)
        q, k, v = _queries(query, some), _keys(key, some), _keys(value, some)
        added, found = flash_attention_forward(q, k, v, *ends, *_longest(some), *limits, rule.scale)
        start = 0
        for piece in some:
            end = start + piece.query_end - piece.query
            mine = slice(piece.query, piece.query_end)
            after = torch.logaddexp(sums[:, mine], found[:, start:end])
            share = (sums[:, mine] - after).exp_()[..., None]
            own = (found[:, start:end] - after).exp_()[..., None]
            output[:, mine] = output[:, mine] * share + added[start:end].transpose(0, 1) * own
            sums[:, mine] = after
            start = end


def attend_backward(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    grad_output: torch.Tensor,
    result: torch.Tensor,
    sums: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pieces: Sequence[Piece],
    rule: Rule,
) -> None:
    """As `attention_pieces.add_gradients`, with the output of all keys, [heads, queries, value_dim], in place of its
    products."""
    for limits, some in _calls(pieces, rule).items():
        ends = _ends(some, query.device)
        q, k, v = _queries(query, some), _keys(key, some), _keys(value, some)
        of_all = torch.cat([sums[:, piece.query : piece.query_end] for piece in some], dim=1)
        grads = flash_attention_backward(
            _queries(grad_output, some), q, k, v, _queries(result, some), of_all,
            *ends, *_longest(some), *limits, rule.scale,
        )  # fmt: skip
        start = first = 0
        for piece in some:
            end, last = start + piece.query_end - piece.query, first + piece.key_end - piece.key
            grad_query[:, piece.query : piece.query_end] += grads[0][start:end].transpose(0, 1)
            grad_key[piece.key : piece.key_end] += grads[1][first:last]
            grad_value[piece.key : piece.key_end] += grads[2][first:last]
            start, first = end, last


def _calls(pieces: Sequence[Piece], rule: Rule) -> dict[Limits, list[Piece]]:
    """The pieces that one call computes.

    The kernel aligns the last query with the last key: of 3 queries and 5 keys the diagonal goes through keys 2, 3, 4.
    """
    found: dict[Limits, list[Piece]] = {}
    for piece in pieces:
        queries, keys = piece.query_end - piece.query, piece.key_end - piece.key
        aligned = keys - queries - piece.distance  # position of the last key minus that of the last query
        before = behind = UNLIMITED
        if rule.causal and piece.distance < keys:
            behind = 0  # such pieces begin with the same token: the diagonal is theirs
        if rule.window and piece.distance + queries - 1 >= rule.window:
            before = rule.window - 1 + aligned
        if rule.window and not rule.causal and keys - 1 - piece.distance >= rule.window:
            behind = rule.window - 1 - aligned
        found.setdefault((before, behind), []).append(piece)
    return found


def _queries(tensor: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
    """Of [heads, tokens, size] the pieces' queries: [queries, heads, size]."""
    parts = [tensor[:, piece.query : piece.query_end] for piece in pieces]
    return torch.cat(parts, dim=1).transpose(0, 1).contiguous()


def _keys(tensor: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
    """Of [tokens, heads, size] the pieces' keys."""
    return torch.cat([tensor[piece.key : piece.key_end] for piece in pieces])


def _ends(pieces: Sequence[Piece], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where pieces end among the queries, and among the keys: int32 [pieces + 1]."""
    queries, keys = [0], [0]
    for piece in pieces:
        queries.append(queries[-1] + piece.query_end - piece.query)
        keys.append(keys[-1] + piece.key_end - piece.key)
    first, second = (torch.tensor(ends, dtype=torch.int32).to(device, non_blocking=True) for ends in (queries, keys))
    return first, second


def _longest(pieces: Sequence[Piece]) -> tuple[int, int]:
    return (
        max(piece.query_end - piece.query for piece in pieces),
        max(piece.key_end - piece.key for piece in pieces),
    )
