"""Random numbers that belong to a row, whatever micro-batch and rank it lies in."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardtune.errors import ModelError

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
"""The constants of SplitMix64 as signed integers; products of int64 tensors wrap around."""
_MIDDLES = 52
"""Bits of the numbers between 0 and 1, both excluded, that become normal ones: with one more, half of them rounds."""


@dataclass(frozen=True, slots=True)
class RowDraws:
    """Random numbers of some rows, as functions of a key, the row, a name, and the place in the row's own tensor.

    Nothing else enters, so the numbers of a row are the same in any micro-batch, on any rank, and however far the row
    is padded. Each number is a hash: the finalizer of SplitMix64 (Steele et al., 2014), once per coordinate.

    Attributes:
        key: of a step: (seed, step), or of evaluation: (seed).
        rows: the number of each row.
    """

    key: int
    rows: Sequence[int]

    def randn_like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Standard normal numbers, in the shape, dtype (a floating one, else fp32) and device of `tensor` [rows, …].

        Args:
            name: of this draw; draws of other names are independent, those of the same name are the same numbers.
            tensor: with one entry per row in its first dimension.

        Raises:
            ModelError: the tensor has another number of rows.
        """
        middles = _top_bits(self._hashes(f"normal {name}", tensor), _MIDDLES).double().add_(0.5).mul_(2.0**-_MIDDLES)
        return torch.special.ndtri(middles).to(_dtype(tensor))

    def rand_like(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Uniform numbers in [0, 1), otherwise as `randn_like`."""
        return _uniform(self._hashes(f"uniform {name}", tensor), _dtype(tensor))

    def rand_tokens(self, name: str, tokens: torch.Tensor, row: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """For each of some tokens what `rand_like` gives for its row at its place: numbers in [0, 1).

        Args:
            name: of this draw.
            tokens: [tokens, width]; gives dtype (at least fp32) and device.
            row: int64 [tokens], the index of each token's row.
            places: int64 [tokens], of each in its row.
        """
        numbers = torch.tensor(self.rows, dtype=torch.int64, device=tokens.device)
        hashes = _mixed(places, _mixed(numbers, _seed(self.key, f"uniform {name}"))[row])
        hashes = _mixed(torch.arange(tokens.shape[-1], device=tokens.device), hashes[:, None])
        return _uniform(hashes, torch.promote_types(tokens.dtype, torch.float32))

    def _hashes(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """int64 in the shape of `tensor`: 64 random bits each."""
        if tensor.ndim == 0 or len(tensor) != len(self.rows):
            raise ModelError(
                f"a tensor of shape {list(tensor.shape)} for the random numbers of {len(self.rows)} rows",
                where="randn_like, rand_like",
                remedy="give a tensor with one entry per row in its first dimension",
            )
        rows = torch.tensor(self.rows, dtype=torch.int64, device=tensor.device)
        hashes = _mixed(rows, _seed(self.key, name))
        for size in tensor.shape[1:]:
            hashes = _mixed(torch.arange(size, device=tensor.device), hashes[..., None])
        return hashes


def _seed(key: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{key} {name}".encode(), digest_size=8).digest(), "little", signed=True)


def _mixed(places: torch.Tensor, start: torch.Tensor | int) -> torch.Tensor:
    """The numbers at some places of the SplitMix64 sequence that begins at `start`."""
    values = (places + 1) * _GOLDEN + start
    values = (values ^ _top_bits(values, 34)) * _MIX[0]
    values = (values ^ _top_bits(values, 37)) * _MIX[1]
    return values ^ _top_bits(values, 33)


def _uniform(hashes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers in [0, 1) of hashes."""
    digits = 1 - round(torch.tensor(torch.finfo(dtype).eps).log2().item())  # 24 of fp32, so that none rounds to 1
    return _top_bits(hashes, digits).double().mul_(2.0**-digits).to(dtype)


def _top_bits(values: torch.Tensor, number: int) -> torch.Tensor:
    """The highest bits of int64 values, as numbers that are not negative (`>>` keeps the sign)."""
    return (values >> (64 - number)) & ((1 << number) - 1)


def _dtype(tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype if tensor.is_floating_point() else torch.float32
