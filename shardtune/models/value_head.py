"""A value head on a language model's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from shardtune.errors import ModelError

HiddenStates = torch.Tensor | Sequence[Sequence[torch.Tensor]]
"""[batch, tokens, width], or what `generate(output_hidden_states=True)` returns: for each new token a tuple with the
hidden states [batch, positions, width] of each layer."""


class ValueHead(nn.Module):
    """An MLP from hidden states to one value per token. It computes in the dtype of its own weights.

    Args:
        hidden_size: the width of the hidden states.
        sizes: widths of the layers between.
    """

    def __init__(self, hidden_size: int, sizes: Sequence[int] = (512, 128)) -> None:
        super().__init__()
        widths = [hidden_size, *sizes]
        self.hidden_size = hidden_size
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.activation = nn.GELU()
        self.value = nn.Linear(widths[-1], 1)

    def forward(self, hidden_states: HiddenStates) -> torch.Tensor:
        """Values [batch, tokens, 1]; from the hidden states of a generation, one for each new token.

        Raises:
            ModelError: hidden states of another form or width.
        """
        hidden = hidden_states if isinstance(hidden_states, torch.Tensor) else of_new_tokens(hidden_states)
        if hidden.ndim != 3 or hidden.shape[-1] != self.hidden_size:
            raise ModelError(
                f"hidden states of shape {list(hidden.shape)} are not [batch, tokens, {self.hidden_size}]",
                where="ValueHead",
                remedy=f"make it with ValueHead({hidden.shape[-1]})" if hidden.ndim == 3 else None,
            )
        hidden = hidden.to(self.value.weight.dtype)
        for layer in self.layers:
            hidden = self.activation(layer(hidden))
        return self.value(hidden)


def of_new_tokens(hidden_states: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The hidden states from which each new token was predicted: [batch, new tokens, width].

    `hidden_states[step][layer]` is [batch, positions, width]. The first step holds the whole prompt, the others one
    position each (or, without a cache, all so far); in every step the new token was predicted from the last layer's
    last position. With a prompt of 5 tokens and 3 new ones: positions 5, 1, 1 -> 4, 0, 0, stacked to 3 tokens.
    """
    try:
        return torch.stack([layers[-1][:, -1] for layers in hidden_states], dim=1)
    except (TypeError, IndexError, RuntimeError) as error:
        raise ModelError(
            f"these are no hidden states of a generation: {error}",
            where="ValueHead",
            remedy="give a tensor [batch, tokens, width], or the hidden_states of generate(output_hidden_states=True)",
        ) from error
