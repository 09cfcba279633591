"""Residual networks for images, with the parameter names of torchvision's.

He et al., 2015, arXiv:1512.03385; in networks of bottlenecks the stride is that of the 3x3 convolution, as in
torchvision's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import nn

from shardtune.errors import ConfigError, ModelError

Backbone = Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
Norm = Callable[[int], nn.Module]
WIDTHS = (64, 128, 256, 512)


class FrozenBatchNorm(nn.Module):
    """Batch normalisation whose statistics, scale and shift are buffers: loaded, and never trained or updated."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.get_buffer("weight") * (self.get_buffer("running_var") + 1e-5).rsqrt()
        shift = self.get_buffer("bias") - self.get_buffer("running_mean") * scale
        return x * scale[:, None, None].to(x.dtype) + shift[:, None, None].to(x.dtype)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside the identity."""

    expansion = 1

    def __init__(self, inner: int, width: int, norm: Norm, stride: int, dilation: int) -> None:
        super().__init__()
        if dilation > 1:
            raise ConfigError(
                "replace_final_stride_with_dilation: true needs a network of bottlenecks",
                where="actor.model.options.replace_final_stride_with_dilation",
                remedy="leave it out, or set vision_backbone to resnet50, resnet101 or resnet152",
            )
        self.conv1 = nn.Conv2d(inner, width, 3, stride, 1, bias=False)
        self.bn1 = norm(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = norm(width)
        self.downsample = _shortcut(inner, width, norm, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside the identity."""

    expansion = 4

    def __init__(self, inner: int, width: int, norm: Norm, stride: int, dilation: int) -> None:
        super().__init__()
        outer = width * self.expansion
        self.conv1 = nn.Conv2d(inner, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, dilation, dilation, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, outer, 1, bias=False)
        self.bn3 = norm(outer)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(inner, outer, norm, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


def _shortcut(inner: int, outer: int, norm: Norm, stride: int) -> nn.Module | None:
    if stride == 1 and inner == outer:
        return None
    return nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), norm(outer))


DEPTHS: dict[Backbone, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}
"""The networks by their names in torchvision: the kind of their blocks, and how many in each of the four stages."""


class ResNet(nn.Module):
    """Images [rows, 3, H, W] to features [rows, channels, H / 32, W / 32], rounded up: a network up to its last stage.

    Args:
        name: one of `DEPTHS`.
        norm: makes the normalisation of a number of channels.
        dilate_last: the last stage has a dilation instead of its stride, so that its features are H / 16 high.

    Attributes:
        channels: of the features.
    """

    def __init__(self, name: Backbone, norm: Norm, *, dilate_last: bool = False) -> None:
        super().__init__()
        block, depths = DEPTHS[name]
        self.channels = WIDTHS[-1] * block.expansion
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 7, 2, 3, bias=False)
        self.bn1 = norm(WIDTHS[0])
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inner = WIDTHS[0]
        for stage, (width, depth) in enumerate(zip(WIDTHS, depths, strict=True), 1):
            dilated = dilate_last and stage == len(WIDTHS)
            stride = 1 if stage == 1 or dilated else 2
            blocks = [block(inner, width, norm, stride, 1)]
            inner = width * block.expansion
            blocks += [block(inner, width, norm, 1, 2 if dilated else 1) for _ in range(depth - 1)]
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            x = part(x)
        return x


def feature_size(height: int, width: int) -> tuple[int, int]:
    """Height and width of the features of an image, with the stride in all stages: each of five halvings rounds up."""
    for _ in range(5):
        height, width = (height + 1) // 2, (width + 1) // 2
    return height, width


def read_backbone(source: str | None, names: Callable[[str], str]) -> dict[str, torch.Tensor]:
    """Weights of a network from a file as torchvision has them, by their names in a policy.

    Args:
        source: the file; None: none.
        names: from the network's own name of a tensor to the policy's.

    Raises:
        ConfigError: there is no such file.
        ModelError: it cannot be read.
    """
    if source is None:
        return {}
    path = Path(source).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"there is no file {source} with the weights of the vision backbone; none are downloaded",
            where="actor.model.options.pretrained_backbone_weights",
            remedy="give a file as torchvision has it (resnet18-….pth), or leave it out: random weights",
        )
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        return {names(name): tensor for name, tensor in tensors.items() if _is_kept(name)}
    except Exception as error:  # of the file's format: pickle and safetensors raise their own
        raise ModelError(
            f"{source} holds no weights of a vision backbone: {error}",
            where="actor.model.options.pretrained_backbone_weights",
            remedy="give a state dict with torchvision's names, as .pth or .safetensors",
        ) from error


def _is_kept(name: str) -> bool:
    """Not the classifier, nor the number of steps that a norm was trained for."""
    return not name.startswith("fc.") and not name.endswith("num_batches_tracked")
