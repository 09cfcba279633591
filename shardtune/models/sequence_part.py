"""The tokens of a forward that this rank computes, where ranks share its sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtune.parallel.collectives import sum_over
from shardtune.parallel.sequence_parallel import TokenShare


@dataclass(frozen=True, slots=True)
class _Shared:
    """A rank's share of the tokens, and bool [requested]: which of the requested tokens are in it."""

    tokens: TokenShare
    mine: torch.Tensor


@dataclass(frozen=True, slots=True)
class SequencePart:
    """This rank's part of a forward and of the tokens requested from it; without sequence parallelism, all of them.

    Worked example: 10 tokens on 2 ranks; the logits at positions [3, 5, 8] are requested. Rank 0 computes tokens 0 to
    4, rank 1 tokens 5 to 9. On rank 1 `positions` is [0, 3] (5 and 8, counted from its first token), `select` takes the
    last two of three targets, and `gather` makes [x3, x5, x8] of rank 0's [x3] and rank 1's [x5, x8].

    Attributes:
        positions: int64, the requested tokens of this rank, counted from its first one.
    """

    positions: torch.Tensor
    _shared: _Shared | None = None

    @classmethod
    def of(cls, num_tokens: int, positions: torch.Tensor, ranks: DeviceMesh | None) -> SequencePart:
        """The part of a forward of `num_tokens` in which `positions`, int64 [requested], are requested.

        Args:
            ranks: the mesh along the axis `sequence`; None: this rank computes all tokens.
        """
        if ranks is None:
            return cls(positions)
        tokens = TokenShare.of(num_tokens, ranks)
        mine = tokens.mine(positions)
        return cls(positions[mine] - tokens.start, _Shared(tokens, mine))

    @property
    def share(self) -> TokenShare | None:
        return None if self._shared is None else self._shared.tokens

    def cut(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor [tokens]."""
        return tokens if self._shared is None else self._shared.tokens.cut(tokens)

    def select(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor [requested]."""
        return values if self._shared is None else values[self._shared.mine]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """From [this rank's requested tokens, ...] to [requested, ...], on all ranks."""
        return values if self._shared is None else self._shared.tokens.gather(values, self._shared.mine)

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """From [this rank's tokens, ...] to [tokens, ...], on all ranks."""
        return values if self._shared is None else self._shared.tokens.whole(values)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that share the sequences, on all of them."""
        return value if self._shared is None else sum_over(value, self._shared.tokens.ranks)
