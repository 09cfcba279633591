"""Attention of pieces of documents as operations of torch, so that what they compute inside is neither saved by
selective checkpointing nor needed to count memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap

import torch

from shardtune.parallel import flash_pieces
from shardtune.parallel.attention_pieces import Rule, add_attention, add_gradients
from shardtune.parallel.ring_plan import Piece


@torch.library.custom_op("shardtune::attend", mutates_args=("output", "sums"))
def attend(
    output: torch.Tensor,
    sums: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pieces: Sequence[int],
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
) -> None:
    """See `attention_pieces.add_attention`; `pieces`: the five numbers of each; the last four arguments: the rule."""
    rule = Rule(causal, window, softcap, scale)
    add = flash_pieces.attend if flash_pieces.usable(query, key, value, rule) else add_attention
    add(output, sums, query, key, value, _read(pieces), rule)


@torch.library.custom_op("shardtune::attend_backward", mutates_args=("grad_query", "grad_key", "grad_value"))
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
    pieces: Sequence[int],
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
) -> None:
    """See `attention_pieces.add_gradients`; `result`: the output of all keys, [heads, queries, value_dim]."""
    rule = Rule(causal, window, softcap, scale)
    grads, inputs = (grad_query, grad_key, grad_value), (query, key, value)
    if flash_pieces.usable(*inputs, rule):
        flash_pieces.attend_backward(*grads, grad_output, result, sums, *inputs, _read(pieces), rule)
    else:
        products = (grad_output.to(sums.dtype) * result).sum(-1)
        add_gradients(*grads, grad_output, sums, products, *inputs, _read(pieces), rule)


def _read(numbers: Sequence[int]) -> list[Piece]:
    """The pieces whose numbers these are."""
    return list(starmap(Piece, zip(*[iter(numbers)] * len(Piece._fields), strict=True)))
