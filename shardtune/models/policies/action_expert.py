"""An action expert beside a language model: layers of transformers whose attention reaches into the other's.

No token of the prefix (images, instruction) attends to the actions, so the prefix is computed first and the expert
attends to its keys and values: the same numbers as one attention over both, and the prefix is computed once to act.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [rows, tokens, head dimensions] of the positions."""


class Seen(NamedTuple):
    """What a policy acts on.

    Attributes:
        images: floating [rows, cameras, 3, H, W], from -1 to 1.
        present: bool [rows, cameras]; False for a camera that a row lacks.
        tokens: int64 [rows, tokens] of the instruction, padded at the end.
        words: bool [rows, tokens]; False for padding.
        state: floating [rows, S], normalised.
    """

    images: torch.Tensor
    present: torch.Tensor
    tokens: torch.Tensor
    words: torch.Tensor
    state: torch.Tensor


class Prefix(NamedTuple):
    """The attention's view of the tokens before the actions.

    Attributes:
        keys, values: by layer, [rows, heads, tokens, head dimensions].
        real: bool [rows, tokens]; False for padding and cameras that a row lacks.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    real: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        """int64 [rows, 1]: the number of real tokens, which is the position of the first one after them."""
        return self.real.sum(1, keepdim=True)


class PrefixLayer(nn.Module):
    """Forward of a decoder layer that also returns its keys and values; to be mixed into Llama's or Gemma's.

    Attributes:
        is_last: nothing reads its hidden states, so only keys and values are computed.
    """

    is_last = False

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary, allowed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Args:
            hidden: [rows, tokens, width].
            rotary: of the tokens.
            allowed: bool [rows, 1, tokens, tokens]: whether a token (third) attends to another (fourth).

        Returns:
            hidden states, keys, values.
        """
        layer = cast(Any, self)
        query, keys, values = _projected(layer, hidden)
        query, keys = apply_rotary_pos_emb(query, keys, *rotary)
        return hidden if self.is_last else _completed(layer, hidden, query, keys, values, allowed), keys, values


class ExpertLayer(nn.Module):
    """Forward of a decoder layer that also attends to the keys and values of a prefix; to be mixed in likewise.

    Attributes:
        crosses: it attends to the prefix alone, by projections of the prefix's keys and values.
    """

    crosses = False

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary, allowed: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Args:
        hidden: [rows, tokens, width].
        rotary: of the tokens.
        allowed: bool [rows, 1, tokens, tokens of the prefix, followed by the layer's own unless it crosses].
        keys, values: of the prefix.
        """
        layer = cast(Any, self)
        if self.crosses:
            query, keys, values = _crossing(layer, hidden, keys, values)
            query = apply_rotary_pos_emb(query, query, *rotary)[0]
        else:
            query, own, own_values = _projected(layer, hidden)
            query, own = apply_rotary_pos_emb(query, own, *rotary)
            keys, values = torch.cat([keys, own], 2), torch.cat([values, own_values], 2)
        return _completed(layer, hidden, query, keys, values, allowed)


def _heads(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return tensor.unflatten(-1, (-1, size)).transpose(1, 2)


def _projected(layer: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, keys and values of hidden states by head."""
    attention, normed = layer.self_attn, layer.input_layernorm(hidden)
    query, keys, values = attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed)
    return _heads(query, attention.head_dim), _heads(keys, attention.head_dim), _heads(values, attention.head_dim)


def _crossing(
    layer: Any, hidden: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query of hidden states; keys and values from those of the prefix, its heads side by side."""
    attention = layer.self_attn
    query = attention.q_proj(layer.input_layernorm(hidden))
    keys, values = (tensor.transpose(1, 2).flatten(2) for tensor in (keys, values))
    keys, values = attention.k_proj(keys), attention.v_proj(values)
    return _heads(query, attention.head_dim), _heads(keys, attention.head_dim), _heads(values, attention.head_dim)


def _completed(
    layer: Any,
    hidden: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor,
) -> torch.Tensor:
    """The hidden states after attention and feed-forward."""
    attention = layer.self_attn
    repeats = attention.num_key_value_groups
    attended = functional.scaled_dot_product_attention(
        query, repeat_kv(keys, repeats), repeat_kv(values, repeats), attn_mask=allowed, scale=attention.scaling
    )
    hidden = hidden + attention.o_proj(attended.transpose(1, 2).flatten(2))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def unread(layers: Any, last: int) -> list[nn.Module]:
    """The parts of a language model's layers that nothing reads: of the layer `last` all but keys and values, and the
    layers after it."""
    layer = layers[last]
    attention = layer.self_attn
    return [attention.q_proj, attention.o_proj, layer.post_attention_layernorm, layer.mlp, *layers[last + 1 :]]


def block_mask(real: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """bool [rows, 1, tokens, tokens]: a token attends to the real ones of its own block and those before it.

    Args:
        real: bool [rows, tokens].
        blocks: int64 [tokens], not falling.
    """
    return (real[:, None, :] & (blocks[None, :] <= blocks[:, None]))[:, None]


def time_features(time: torch.Tensor, width: int, shortest: float, longest: float) -> torch.Tensor:
    """[rows, width]: sines, then cosines of times [rows], with periods from `shortest` to `longest` in equal ratios."""
    places = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    angles = time.double()[:, None] * (2 * torch.pi / (shortest * (longest / shortest) ** places))
    return torch.cat([angles.sin(), angles.cos()], 1).to(time.dtype)


def resized(pixels: torch.Tensor, height: int, width: int, *, centred: bool) -> torch.Tensor:
    """Images [rows, 3, H, W] scaled to fit into a frame, the rest of which is black.

    Args:
        pixels: floating, 0 is black.
        height, width: of the frame.
        centred: whether the image lies in its middle; otherwise in its lower right corner.
    """
    old_height, old_width = pixels.shape[-2:]
    if (old_height, old_width) == (height, width):
        return pixels
    ratio = max(old_width / width, old_height / height)
    new_height, new_width = int(old_height / ratio), int(old_width / ratio)
    scaled = functional.interpolate(pixels, (new_height, new_width), mode="bilinear", align_corners=False)
    left, top = width - new_width, height - new_height
    if centred:
        left, top = left // 2, top // 2
    return functional.pad(scaled, (left, width - new_width - left, top, height - new_height - top))


def take_layers(model: nn.Module, kind: type[nn.Module]) -> Any:
    """Give the layers of a model of transformers the forward of `kind`, a class that adds no tensors to theirs."""
    layers = cast(Any, model).layers
    for layer in layers:
        layer.__class__ = kind  # as fully_shard does it: the modules and their weights stay those of transformers
    return layers
