"""Sequence parallelism: each rank has a part of the tokens. For attention it gets all tokens of a part of the heads
(Ulysses, Jacobs et al., 2023, arXiv:2309.14509), or the keys and values of other ranks (`ring_attention`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from shardtune.parallel.collectives import exchange, sum_over
from shardtune.parallel.ring_plan import RingPlan


@dataclass(frozen=True, slots=True)
class TokenShare:
    """This rank's share of the tokens of a forward: one run of them, or two under ring attention that is balanced.

    Attributes:
        ranks: the mesh along the axis `sequence`.
        num_tokens: of the whole.
        starts: the first token of each of this rank's runs, in order.
        run: tokens of a run, padding included; the same on every rank.
        ring: what ring attention computes and sends; None: heads are exchanged for tokens.
    """

    ranks: DeviceMesh
    num_tokens: int
    starts: tuple[int, ...]
    run: int
    ring: RingPlan | None = None

    @classmethod
    def of(cls, num_tokens: int, ranks: DeviceMesh) -> TokenShare:
        """Equal parts in the order of ranks."""
        length = -(-num_tokens // ranks.size())
        return cls(ranks, num_tokens, (ranks.get_local_rank() * length,), length)

    @classmethod
    def in_ring(cls, documents: Sequence[int], ranks: DeviceMesh, *, in_order: bool = False) -> TokenShare:
        """The parts of ring attention, for documents given as `PackedBatch.cu_seqlens`; `in_order`: those of `of`."""
        plan = RingPlan.of(documents, ranks.size(), ranks.get_local_rank(), in_order=in_order)
        return cls(ranks, documents[-1], plan.starts, plan.chunk, plan)

    @property
    def start(self) -> int:
        """This rank's first token."""
        return self.starts[0]

    @property
    def length(self) -> int:
        """This rank's tokens, padding included."""
        return self.run * len(self.starts)

    @property
    def padding(self) -> int:
        """Padding tokens that make the total divisible by the ranks."""
        return self.length * self.ranks.size() - self.num_tokens

    def cut(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor [tokens]."""
        padded = F.pad(tokens, (0, self.padding))
        runs = [padded[start : start + self.run] for start in self.starts]
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def mine(self, positions: torch.Tensor) -> torch.Tensor:
        """Bool mask of the tokens that are this rank's."""
        found = torch.zeros_like(positions, dtype=torch.bool)
        for start in self.starts:
            found |= (positions >= start) & (positions < start + self.run)
        return found

    def local(self, positions: torch.Tensor) -> torch.Tensor:
        """Tokens of this rank counted from its first one."""
        first, last = self.starts[0], self.starts[-1]
        if first == last:
            return positions - first
        return torch.where(positions < first + self.run, positions - first, positions - last + self.run)

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """Of this rank's tokens [length, ...] to those of all: [num_tokens, ...], the gradient that of this rank's."""
        padded = values.new_zeros((self.length * self.ranks.size(), *values.shape[1:]))
        runs = [torch.arange(start, start + self.run, device=values.device) for start in self.starts]
        return sum_over(padded.index_copy(0, torch.cat(runs), values), self.ranks)[: self.num_tokens]

    def gather(self, values: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        """Rows that ranks have between them, on all of them: [rows of this rank, ...] -> [len(mine), ...]."""
        whole = values.new_zeros((len(mine), *values.shape[1:]))
        return sum_over(whole.index_copy(0, mine.nonzero().flatten(), values), self.ranks)


def to_heads(tensor: torch.Tensor, share: TokenShare) -> torch.Tensor:
    """[1, heads, tokens of this rank, size] to [1, heads of this rank, all tokens, size].

    Fewer heads (of keys and values) than ranks are repeated, each for the ranks whose queries use it.
    """
    fewer = share.ranks.size() // tensor.shape[1]
    if fewer > 1:
        tensor = tensor.repeat_interleave(fewer, dim=1)
    return exchange(tensor, share.ranks, split=1, join=2)[:, :, : share.num_tokens]


def to_tokens(tensor: torch.Tensor, share: TokenShare) -> torch.Tensor:
    """The way back: [1, all tokens, heads of this rank, size] to [1, tokens of this rank, heads, size]."""
    return exchange(F.pad(tensor, (0, 0, 0, 0, 0, share.padding)), share.ranks, split=1, join=2)
