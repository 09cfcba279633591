"""Attention and dropout whose random draws belong to rows, so that they are the same on any layout."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional


class Draws(Protocol):
    """Uniform numbers in [0, 1) for each row, such as `Batch.rand_like`."""

    def __call__(self, name: str, tensor: torch.Tensor, /) -> torch.Tensor: ...


class RowDropout(nn.Module):
    """Dropout by draws that belong to the row; without draws, and in evaluation, the identity.

    Args:
        share: the probability that a value becomes 0.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.name = ""

    def forward(self, x: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        if not self.drops(draws):
            return x
        assert draws is not None
        kept = draws(self.name, torch.empty(x.shape, device=x.device)) >= self.share
        return x * kept / (1 - self.share)

    def drops(self, draws: Draws | None) -> bool:
        """Whether it changes anything."""
        return self.training and self.share > 0 and draws is not None


def name_dropouts(model: nn.Module) -> None:
    """Give each dropout in a model its place as the name of its draws, so that they are independent."""
    for name, module in model.named_modules():
        if isinstance(module, RowDropout):
            module.name = f"dropout {name}"


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al., 2017, arXiv:1706.03762), the parameters named as `nn.MultiheadAttention`'s.

    Args:
        width: of queries, keys, values and output.
        heads: their number.
        dropout: of the attention weights.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        self.dropout = RowDropout(dropout)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        real: torch.Tensor | None = None,
        draws: Draws | None = None,
    ) -> torch.Tensor:
        """[rows, queries, width].

        Args:
            query: [rows, queries, width]. key, value: [rows, keys, width].
            real: bool [rows, keys], false for keys that are padding; None: none is.
            draws: for dropout.
        """
        dtype = self.in_proj_weight.dtype
        q, k, v = (
            functional.linear(x.to(dtype), weight, bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x, weight, bias in zip(
                (query, key, value), self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3), strict=True
            )
        )
        mask = None if real is None else real[:, None, None, :]
        if not self.dropout.drops(draws):
            attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            if mask is not None:
                scores = scores.masked_fill(~mask, -torch.inf)
            attended = self.dropout(scores.softmax(-1), draws).to(dtype) @ v
        return self.out_proj(attended.transpose(1, 2).flatten(-2))
