"""Ring attention (Liu et al., 2023, arXiv:2310.01889): queries stay where they are, and keys and values of other ranks
come to them, a block at a time, while the block before is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
import torch.distributed as dist

from shardtune.parallel.attention_operations import attend, attend_backward
from shardtune.parallel.attention_pieces import accumulation_dtype
from shardtune.parallel.ring_plan import Exchanges, Piece, Sight, Step
from shardtune.parallel.second_derivatives import refuse_second_derivatives
from shardtune.parallel.sequence_parallel import TokenShare


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer computes its scores.

    Attributes:
        sight: what queries see.
        scale: factor on the scores.
        softcap: they become `softcap * tanh(scores / softcap)`; None: they do not.
    """

    sight: Sight
    scale: float
    softcap: float | None = None

    @property
    def arguments(self) -> tuple[bool, int, float, float]:
        """The last arguments of `attend` and `attend_backward`."""
        return self.sight.causal, self.sight.window or 0, self.softcap or 0.0, self.scale


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    share: TokenShare,
    scoring: Scoring,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of this rank's tokens to all of their documents; every rank of the share calls it.

    A rank holds its own keys and values and those of two other ranks at most: the ones that it computes with, and the
    ones that are arriving.

    Args:
        query: [1, heads, tokens of this rank, head_dim].
        key: [1, key_value_heads, tokens of this rank, head_dim].
        value: [1, key_value_heads, tokens of this rank, value_dim].
        share: this rank's tokens, `in_ring`.
        scoring: of the layer.
        sinks: [heads], one more score per head in the softmax, without a value.

    Returns:
        [1, tokens of this rank, heads, value_dim].
    """
    return _Ring.apply(query, key, value, sinks, share, scoring)


class _Context(Protocol):
    """What the forward pass keeps for the backward pass."""

    share: TokenShare
    scoring: Scoring
    saved_tensors: tuple[torch.Tensor, ...]
    save_for_backward: Callable[..., None]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        share: TokenShare,
        scoring: Scoring,
    ) -> torch.Tensor:
        exchanges, group = _exchanges(share, scoring), share.ranks.get_group()
        dtype, width = accumulation_dtype(query.dtype), key.shape[-1]
        q, block = query[0], _block(key, value)
        output = torch.zeros((*q.shape[:2], value.shape[-1]), dtype=dtype, device=q.device)
        sums = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
        arriving = _Arriving(block, exchanges.steps, group)
        _attend(output, sums, q, block, width, exchanges.own, scoring)
        for step in exchanges.steps:
            _attend(output, sums, q, arriving.take(), width, step.pieces, scoring)
        if sinks is not None:
            whole = torch.logaddexp(sums, sinks[:, None].to(dtype))
            output *= (sums - whole).exp_()[..., None]
            sums = whole
        result = output.to(query.dtype).transpose(0, 1).contiguous()[None]
        ctx.share, ctx.scoring = share, scoring
        ctx.save_for_backward(query, key, value, *([] if sinks is None else [sinks]), result, sums)
        return result

    @staticmethod
    def backward(
        ctx: _Context, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, None, None]:
        if torch.is_grad_enabled():
            refuse_second_derivatives("attention by a ring of ranks", "parallel.sequence: 1")
        query, key, value, *sinks, result, sums = ctx.saved_tensors
        exchanges, group = _exchanges(ctx.share, ctx.scoring), ctx.share.ranks.get_group()
        dtype, width = sums.dtype, key.shape[-1]
        q, block = query[0], _block(key, value)
        grad, output = grads[0][0].transpose(0, 1), result[0].transpose(0, 1)
        grad_query = torch.zeros(q.shape, dtype=dtype, device=q.device)

        def attended(keys: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
            """The gradient of a block; that of the queries is added up."""
            found = torch.zeros(keys.shape, dtype=dtype, device=keys.device)
            attend_backward(
                grad_query, found[..., :width], found[..., width:], grad, output, sums, q,
                keys[..., :width], keys[..., width:], [*chain(*pieces)], *ctx.scoring.arguments,
            )  # fmt: skip
            return found

        arriving = _Arriving(block, exchanges.steps, group)
        grad_block = attended(block, exchanges.own)
        returning: _Returning | None = None
        for step in exchanges.steps:
            found = attended(arriving.take(), step.pieces).to(block.dtype)
            if returning is not None:
                returning.add_to(grad_block)
            returning = _Returning(found, step, group)
        if returning is not None:
            returning.add_to(grad_block)
        grad_key, grad_value = grad_block.to(key.dtype).transpose(0, 1)[None].split([width, value.shape[-1]], dim=-1)
        of_sinks = None
        if sinks:
            products = (grad.to(dtype) * output).sum(-1)
            of_sinks = -((sinks[0][:, None].to(dtype) - sums).exp_() * products).sum(1).to(sinks[0].dtype)
        return grad_query.to(query.dtype)[None], grad_key, grad_value, of_sinks, None, None


def _exchanges(share: TokenShare, scoring: Scoring) -> Exchanges:
    assert share.ring is not None
    return share.ring.exchanges(scoring.sight)


def _block(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Keys and values side by side, token by token: [tokens, key_value_heads, head_dim + value_dim]."""
    return torch.cat([key[0], value[0]], dim=-1).transpose(0, 1).contiguous()


def _attend(
    output: torch.Tensor,
    sums: torch.Tensor,
    query: torch.Tensor,
    block: torch.Tensor,
    width: int,
    pieces: Sequence[Piece],
    scoring: Scoring,
) -> None:
    numbers = [*chain(*pieces)]
    attend(output, sums, query, block[..., :width], block[..., width:], numbers, *scoring.arguments)


class _Arriving:
    """The blocks of other ranks, each on its way while the one before is computed."""

    def __init__(self, block: torch.Tensor, steps: Sequence[Step], group: dist.ProcessGroup) -> None:
        self._block, self._group, self._coming = block, group, iter(steps)
        self._next = self._begin()

    def take(self) -> torch.Tensor:
        """The next one, once it is there."""
        received, work = self._next
        if work is not None:
            work.wait()
        self._next = self._begin()
        return received

    def _begin(self) -> tuple[torch.Tensor, dist.Work | None]:
        step = next(self._coming, None)
        if step is None:
            return self._block, None
        first, end = step.sent
        return _exchange(self._block[first:end], step.target, step.source, step.received, self._group)


class _Returning:
    """The gradient of a block that has arrived, on its way back, and that of what was sent in exchange."""

    def __init__(self, found: torch.Tensor, step: Step, group: dist.ProcessGroup) -> None:
        self._first, self._end = step.sent
        self._received, self._work = _exchange(found, step.source, step.target, self._end - self._first, group)

    def add_to(self, grad_block: torch.Tensor) -> None:
        """Add what has come to the gradient of this rank's block."""
        if self._work is not None:
            self._work.wait()
        grad_block[self._first : self._end] += self._received


def _exchange(
    sent: torch.Tensor, target: int, source: int, number: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, dist.Work | None]:
    """Begin to send a block to one rank and to receive one of `number` tokens from another."""
    received = sent.new_empty((number, *sent.shape[1:]))
    ranks = range(dist.get_world_size(group))
    given = [len(sent) if rank == target else 0 for rank in ranks]
    taken = [number if rank == source else 0 for rank in ranks]
    return received, dist.all_to_all_single(received, sent, taken, given, group, async_op=True)
