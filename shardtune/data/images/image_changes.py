"""Changes of images, uint8 [images, 3, height, width], all alike: by torchvision, or by torch with the same numbers.

Where torchvision is not installed, or does not load, each change is computed here in the order of operations that
torchvision has, so that the bytes are the same.
"""

from __future__ import annotations

import math
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import torch
from torch.nn.functional import grid_sample, interpolate

_LUMA = (0.2989, 0.587, 0.114)
_NATIVE = ("AVX2", "AVX512")
"""Processors on which torch resizes bytes without numbers in between; others round the numbers."""


class ImageChanges(Protocol):
    """The changes that augmentation needs; `name` is for the first lines of a run."""

    name: str

    def crop(self, images: torch.Tensor, top: int, left: int, height: int, width: int) -> torch.Tensor:
        """A part, resized to the size of the whole (bilinear, antialiased)."""
        ...

    def affine(
        self, images: torch.Tensor, degrees: float, shift: tuple[float, float], scale: float, shear: float
    ) -> torch.Tensor:
        """Rotated about the middle, shifted by pixels (right, down), scaled and sheared; bilinear, black outside."""
        ...

    def brightness(self, images: torch.Tensor, factor: float) -> torch.Tensor: ...
    def contrast(self, images: torch.Tensor, factor: float) -> torch.Tensor: ...
    def saturation(self, images: torch.Tensor, factor: float) -> torch.Tensor: ...
    def hue(self, images: torch.Tensor, shift: float) -> torch.Tensor:
        """Turned on the circle of colours; 1 is the whole circle."""
        ...


class OwnChanges:
    """The changes in torch alone."""

    name = "torch"

    def crop(self, images: torch.Tensor, top: int, left: int, height: int, width: int) -> torch.Tensor:
        size, part = images.shape[-2:], images[..., top : top + height, left : left + width]
        if part.shape[-2:] == size:
            return part
        native = torch.backends.cpu.get_cpu_capability() in _NATIVE
        found = interpolate(
            part if native else part.float(), list(size), mode="bilinear", align_corners=False, antialias=True
        )
        return found if native else found.round_().to(torch.uint8)

    def affine(
        self, images: torch.Tensor, degrees: float, shift: tuple[float, float], scale: float, shear: float
    ) -> torch.Tensor:
        height, width = images.shape[-2:]
        theta = torch.tensor(_inverse(degrees, shift, scale, shear)).reshape(1, 2, 3)
        base = torch.ones(1, height, width, 3)
        base[..., 0] = torch.linspace((1.0 - width) * 0.5, (width - 1.0) * 0.5, steps=width)
        base[..., 1] = torch.linspace((1.0 - height) * 0.5, (height - 1.0) * 0.5, steps=height)[:, None]
        scaled = theta.transpose(1, 2) / torch.tensor([0.5 * width, 0.5 * height])
        grid = base.view(1, height * width, 3).bmm(scaled).view(1, height, width, 2).expand(len(images), -1, -1, -1)
        found = grid_sample(images.float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        return found.round_().to(torch.uint8)

    def brightness(self, images: torch.Tensor, factor: float) -> torch.Tensor:
        return images.mul(factor).clamp_(0, 255).to(torch.uint8)

    def contrast(self, images: torch.Tensor, factor: float) -> torch.Tensor:
        return _contrast(images, factor)

    def saturation(self, images: torch.Tensor, factor: float) -> torch.Tensor:
        return _blended(images, _grey(images), factor)

    def hue(self, images: torch.Tensor, shift: float) -> torch.Tensor:
        hue, saturation, value = _to_hsv(images.float().mul(1.0 / 255))
        turned = (hue + shift).remainder(1.0)
        return (_to_rgb(turned, saturation, value) * (256.0 - 1e-3)).to(torch.uint8)


def _inverse(degrees: float, shift: tuple[float, float], scale: float, shear: float) -> list[float]:
    """The matrix from places in the result to places in the image, both from the middle, row by row.

    The forward map is: shear along the width, rotate, scale, shift.
    """
    turn, slant = math.radians(degrees), math.tan(math.radians(shear))
    cos, sin = math.cos(turn), math.sin(turn)
    b, d = -(cos * slant + sin), cos - sin * slant
    a11, a12, a21, a22 = d / scale, -b / scale, -sin / scale, cos / scale
    right, down = shift
    return [a11, a12, -a11 * right - a12 * down, a21, a22, -a21 * right - a22 * down]


def _contrast(images: torch.Tensor, factor: float) -> torch.Tensor:
    """Away from the mean grey, which is summed exactly: torchvision sums in fp32, and large images to other last digits
    on another number of threads."""
    mean = _grey(images).mean((-3, -2, -1), keepdim=True, dtype=torch.float64).float()
    return _blended(images, mean, factor)


def _grey(images: torch.Tensor) -> torch.Tensor:
    """[images, 1, height, width], whole numbers as floats."""
    red, green, blue = images.unbind(-3)
    grey = red.mul(_LUMA[0]).add_(green, alpha=_LUMA[1]).add_(blue, alpha=_LUMA[2])
    return grey.unsqueeze(-3).floor_()


def _blended(images: torch.Tensor, others: torch.Tensor, factor: float) -> torch.Tensor:
    return images.mul(factor).add_(others, alpha=1.0 - factor).clamp_(0, 255).to(torch.uint8)


def _to_hsv(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hue from 0 to 1, saturation and value of [images, 3, height, width] from 0 to 1."""
    red, green, _ = images.unbind(-3)
    least, most = torch.aminmax(images, dim=-3)
    span, grey = most - least, most == least
    ones = torch.ones_like(most)
    off = (most.unsqueeze(-3) - images) / torch.where(grey, ones, span).unsqueeze(-3)
    off_red, off_green, off_blue = off.unbind(-3)
    is_red, is_green = most == red, most == green
    of_green = (off_red + 2.0 - off_blue) * (is_green & ~is_red)
    of_red = (off_blue - off_green) * is_red
    of_blue = (off_green + 4.0 - off_red) * (~is_red & ~is_green)
    hue = (of_red + of_green + of_blue).mul(1.0 / 6.0).add(1.0).fmod(1.0)
    return hue, span / torch.where(grey, ones, most), most


def _to_rgb(hue: torch.Tensor, saturation: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    sixths = hue * 6
    whole = torch.floor(sixths)
    part = sixths - whole
    faded, rest = saturation * part, 1.0 - saturation
    falling = ((1.0 - faded) * value).clamp(0.0, 1.0)
    rising = ((faded + rest) * value).clamp(0.0, 1.0)
    low = (rest * value).clamp(0.0, 1.0)
    choices = torch.stack((value, low, falling, rising), dim=-3)
    # In each sixth of the circle, from red on, which of the choices red, green and blue are.
    order = torch.tensor([[0, 2, 1, 1, 3, 0], [3, 0, 0, 2, 1, 1], [1, 1, 3, 0, 0, 2]])
    return choices.gather(-3, order[:, whole.to(torch.int32).remainder(6).long()].moveaxis(0, -3))


class TorchvisionChanges:
    """The changes by torchvision's functions."""

    def __init__(self) -> None:
        package: Any = import_module("torchvision")
        transforms: Any = import_module("torchvision.transforms.v2")
        self.name = f"torchvision {package.__version__}"
        self._of, self._bilinear = transforms.functional, transforms.InterpolationMode.BILINEAR

    def crop(self, images: torch.Tensor, top: int, left: int, height: int, width: int) -> torch.Tensor:
        return self._of.resized_crop(images, top, left, height, width, list(images.shape[-2:]), self._bilinear)

    def affine(
        self, images: torch.Tensor, degrees: float, shift: tuple[float, float], scale: float, shear: float
    ) -> torch.Tensor:
        return self._of.affine(images, degrees, list(shift), scale, [shear, 0.0], self._bilinear)

    def brightness(self, images: torch.Tensor, factor: float) -> torch.Tensor:
        return self._of.adjust_brightness(images, factor)

    def contrast(self, images: torch.Tensor, factor: float) -> torch.Tensor:
        return _contrast(images, factor)

    def saturation(self, images: torch.Tensor, factor: float) -> torch.Tensor:
        return self._of.adjust_saturation(images, factor)

    def hue(self, images: torch.Tensor, shift: float) -> torch.Tensor:
        return self._of.adjust_hue(images, shift)


@cache
def image_changes() -> ImageChanges:
    """Torchvision's where it is installed and loads, otherwise those of this module."""
    try:
        return TorchvisionChanges()
    except Exception:  # none there, or one for another torch, which may raise anything
        return OwnChanges()
