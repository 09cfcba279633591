"""Sequence parallelism (Ulysses, Jacobs et al., 2023, arXiv:2309.14509): each rank has a part of the tokens, and in
attention, by an exchange, all tokens of a part of the heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from shardtune.parallel.collectives import exchange, sum_over


@dataclass(frozen=True, slots=True)
class TokenShare:
    """This rank's share of the tokens of a forward.

    Attributes:
        ranks: the mesh along the axis `sequence`.
        num_tokens: of the whole.
        start: this rank's first.
        length: this rank's, padding included; the same on every rank.
    """

    ranks: DeviceMesh
    num_tokens: int
    start: int
    length: int

    @classmethod
    def of(cls, num_tokens: int, ranks: DeviceMesh) -> TokenShare:
        length = -(-num_tokens // ranks.size())
        return cls(ranks, num_tokens, ranks.get_local_rank() * length, length)

    @property
    def padding(self) -> int:
        """Padding tokens that make the total divisible by the ranks."""
        return self.length * self.ranks.size() - self.num_tokens

    def cut(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor [tokens]."""
        return F.pad(tokens, (0, self.padding))[self.start : self.start + self.length]

    def mine(self, positions: torch.Tensor) -> torch.Tensor:
        """Bool mask of the tokens that are this rank's."""
        return (positions >= self.start) & (positions < self.start + self.length)

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """Of this rank's tokens [length, ...] to those of all: [num_tokens, ...], the gradient that of this rank's."""
        padded = values.new_zeros((self.length * self.ranks.size(), *values.shape[1:]))
        place = torch.arange(self.start, self.start + self.length, device=values.device)
        return sum_over(padded.index_copy(0, place, values), self.ranks)[: self.num_tokens]

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
