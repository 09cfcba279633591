"""The tokens of a forward that this rank computes, where ranks share its sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardtune.parallel.collectives import sum_over
from shardtune.parallel.sequence_parallel import TokenShare


@dataclass(frozen=True, slots=True)
class SequencePart:
    """This rank's part of a forward under sequence parallelism, and of the tokens requested from it.

    Worked example: 10 tokens on 2 ranks; the logits at positions [3, 5, 8] are requested. Rank 0 computes tokens 0 to
    4, rank 1 tokens 5 to 9. On rank 1 `positions` is [0, 3] (5 and 8, counted from its first token), `select` takes the
    last two of three targets, and `gather` makes [x3, x5, x8] of rank 0's [x3] and rank 1's [x5, x8].

    Attributes:
        share: this rank's tokens.
        mine: bool [requested], which of the requested tokens are in it.
        positions: int64, the requested tokens of this rank, counted from its first one.
    """

    share: TokenShare
    mine: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, share: TokenShare, positions: torch.Tensor) -> SequencePart:
        """The part of a forward in which `positions`, int64 [requested], are requested."""
        mine = share.mine(positions)
        return cls(share, mine, share.local(positions[mine]))

    def cut(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor [tokens]."""
        return self.share.cut(tokens)

    def select(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor [requested]."""
        return values[self.mine]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """From [this rank's requested tokens, ...] to [requested, ...], on all ranks."""
        return self.share.gather(values, self.mine)

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """From [this rank's tokens, ...] to [tokens, ...], on all ranks."""
        return self.share.whole(values)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that share the sequences, on all of them."""
        return sum_over(value, self.share.ranks)
