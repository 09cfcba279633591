"""Vision transformers with the parameter names of timm, which directories of OpenVLA hold; without timm itself.

`SHAPES` holds their names in timm and their sizes. Of their outputs the patches of the last block but one are
used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from shardtune.errors import ModelError


@dataclass(frozen=True, slots=True)
class VitShape:
    """The sizes of one.

    Attributes:
        patch: pixels of a patch's side.
        width: of the hidden states.
        depth: blocks.
        heads: of each block.
        mlp: width inside a block's MLP.
        class_token: a token for the whole image stands before the patches (DINOv2).
        registers: further tokens before the patches.
        positions_of_patches: only patches have positions, and what stands before them has none.
        layer_scale: each half of a block is scaled per channel.
        pool: there is a head that pools all patches (SigLIP); its weights are stored and not used.
    """

    patch: int
    width: int
    depth: int
    heads: int
    mlp: int
    class_token: bool = False
    registers: int = 0
    positions_of_patches: bool = False
    layer_scale: bool = False
    pool: bool = False

    def patches(self, image_size: int) -> int:
        """Of a square image."""
        return (image_size // self.patch) ** 2


_DINO_L = VitShape(14, 1024, 24, 16, 4096, class_token=True, layer_scale=True)
_SIGLIP_SO = VitShape(14, 1152, 27, 16, 4304, pool=True)
_SIGLIP_B = VitShape(16, 768, 12, 12, 3072, pool=True)
SHAPES: Mapping[str, VitShape] = {
    "vit_large_patch14_dinov2": _DINO_L,
    "vit_large_patch14_reg4_dinov2": replace(_DINO_L, registers=4, positions_of_patches=True),
    "vit_so400m_patch14_siglip_224": _SIGLIP_SO,
    "vit_so400m_patch14_siglip_384": _SIGLIP_SO,
    "vit_base_patch16_siglip_224": _SIGLIP_B,
    "vit_base_patch16_siglip_256": _SIGLIP_B,
    "vit_base_patch16_siglip_384": _SIGLIP_B,
}
"""By timm's names, without the tag of their weights."""


def shape_of(timm_id: str, given: Mapping[str, Any] | None = None) -> VitShape:
    """The sizes of a model of timm.

    Args:
        timm_id: its name, with or without the tag of its weights.
        given: all sizes, where they are not those of that name.

    Raises:
        ModelError: it is none of those that are known, or sizes are missing.
    """
    if given is not None:
        try:
            return VitShape(**given)
        except TypeError as error:
            raise ModelError(
                f"the sizes of {timm_id} cannot be used: {error}", where="config.json: timm_model_args"
            ) from error
    name = timm_id.partition(".")[0]
    if name not in SHAPES:
        raise ModelError(
            f"the vision backbone {timm_id!r} is not known",
            where="config.json: timm_model_ids",
            remedy=f"known are {', '.join(SHAPES)}; of another DINOv2 or SigLIP give all sizes as timm_model_args",
        )
    return SHAPES[name]


class TimmVit(nn.Module):
    """A vision transformer that gives patches.

    Args:
        shape: its sizes.
        image_size: pixels of a side of the (square) images.
    """

    def __init__(self, shape: VitShape, image_size: int) -> None:
        super().__init__()
        patches, self.prefix = shape.patches(image_size), int(shape.class_token) + shape.registers
        positions = patches if shape.positions_of_patches else patches + int(shape.class_token)
        self._before = shape.positions_of_patches
        self.patch_embed = _PatchEmbed(shape)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.width)) if shape.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, shape.registers, shape.width)) if shape.registers else None
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, shape.width))
        self.blocks = nn.ModuleList(VitBlock(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width, eps=1e-6)
        self.attn_pool = _Pool(shape) if shape.pool else None

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Images [images, 3, side, side] to patches [images, patches, width], as the last block but one gives them."""
        hidden = self.patch_embed(pixels)
        prefix = [token.expand(len(hidden), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        if self._before:
            hidden = torch.cat([*prefix, hidden + self.pos_embed], dim=1)
        else:
            hidden = torch.cat([*prefix, hidden], dim=1) + self.pos_embed
        for block in list(self.blocks)[:-1]:
            hidden = block(hidden)
        return hidden[:, self.prefix :]


class _PatchEmbed(nn.Module):
    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, shape.width, kernel_size=shape.patch, stride=shape.patch)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.proj(pixels).flatten(2).transpose(1, 2)


class VitBlock(GradientCheckpointingLayer):
    """Attention and an MLP, each behind a norm and with a residual."""

    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=1e-6)
        self.attn = _Attention(shape)
        self.ls1 = LayerScale(shape.width) if shape.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(shape.width, eps=1e-6)
        self.mlp = _Mlp(shape)
        self.ls2 = LayerScale(shape.width) if shape.layer_scale else nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.ls1(self.attn(self.norm1(hidden)))
        return hidden + self.ls2(self.mlp(self.norm2(hidden)))


class LayerScale(nn.Module):
    """A factor per channel, under the name that OpenVLA gives it (timm: gamma)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.scale_factor


class _Attention(nn.Module):
    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        images, tokens, width = hidden.shape
        qkv = self.qkv(hidden).view(images, tokens, 3, self._heads, width // self._heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(images, tokens, width))


class _Mlp(nn.Module):
    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.width, shape.mlp)
        self.fc2 = nn.Linear(shape.mlp, shape.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(hidden)))


class _Pool(nn.Module):
    """Holds the weights of SigLIP's pooling head, so that a directory is saved as complete as it was loaded."""

    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.q = nn.Linear(shape.width, shape.width)
        self.kv = nn.Linear(shape.width, 2 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)
        self.norm = nn.LayerNorm(shape.width, eps=1e-6)
        self.mlp = _Mlp(shape)
