"""The bytes that an image processor makes of images one by one, and the numbers that it makes of these bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BaseImageProcessor

from shardtune.data.images.derived import derived
from shardtune.data.images.pixel_table import Numbers

PIXELS, TABLE = "pixel_values", "pixel_table"
"""The fields of a micro-batch with the bytes of pixels, and with the value of each byte in each channel."""
_SMALL = 64


@dataclass(frozen=True, slots=True)
class ImageBytes:
    """One image before it is rescaled and normalised.

    Attributes:
        pixels: uint8, as the model family has them: [images or tiles, 3, height, width], [1, tiles, 3, height, width],
            or of patches [patches, 3, values], each once where the family repeats it in time.
        further: the other tensors that the processor makes; larger ones are the same number everywhere.
    """

    pixels: np.ndarray
    further: Mapping[str, np.ndarray]


class PixelBytes:
    """Applies an image processor to single images, up to their resized bytes; see `proved`.

    Args:
        image_processor: of a Pillow backend, which rescales and normalises.
        keys: of the tensors that the model takes.
        of_patches: the model takes patches [patches, values].
    """

    def __init__(self, image_processor: PilBackend, keys: Sequence[str], of_patches: bool) -> None:
        self._prepare = image_processor
        self._keys = tuple(keys)
        self._of_patches = of_patches
        settings = image_processor.to_dict()
        self._repeats = int(settings.get("temporal_patch_size") or 1)
        self._axis = 0
        channels = len(settings["image_mean"])
        every = np.broadcast_to(np.arange(256, dtype=np.uint8), (channels, 1, 256))
        scaled = image_processor.rescale(every, settings["rescale_factor"])
        normal = image_processor.normalize(scaled, settings["image_mean"], settings["image_std"])
        self.table = torch.from_numpy(np.ascontiguousarray(normal[:, 0]))

    @classmethod
    def proved(
        cls, image_processor: BaseImageProcessor, images: Sequence[Image.Image], whole: Mapping[str, torch.Tensor]
    ) -> PixelBytes | None:
        """An instance if its output for these images equals the processor's for all of them bit by bit, otherwise None.

        Args:
            images: two at least, of different sizes.
            whole: the processor's tensors.
        """
        if not isinstance(image_processor, PilBackend) or PIXELS not in whole:
            return None
        settings = image_processor.to_dict()
        if not (settings.get("do_rescale") and settings.get("do_normalize")):
            return None
        try:
            made = cls(image_processor, tuple(whole), whole[PIXELS].ndim == 2)
            parts = [part for part in map(made.of, images) if part is not None]
            return made if len(parts) == len(images) and made._fits(parts, whole) else None
        except Exception:  # a processor is third-party code and may not work without these steps
            return None

    def _fits(self, parts: Sequence[ImageBytes], whole: Mapping[str, torch.Tensor]) -> bool:
        """Finds the axis along which tensors grow with images; whether there is one."""
        for self._axis in (0, 1):
            joined = self.joined(parts)
            if joined is None:
                continue
            found = self.numbers(joined)
            if all(
                key in found and found[key].dtype == whole[key].dtype and torch.equal(found[key], whole[key])
                for key in self._keys
            ):
                return True
        return False

    def of(self, image: Image.Image) -> ImageBytes | None:
        """One image, RGB; None if bytes cannot represent it (if it is padded)."""
        passing = derived(self._prepare, _Passing)
        made = passing(images=[[image]], return_tensors="pt")  # pyright: ignore[reportArgumentType] (a list per row)
        found = made[PIXELS].numpy()
        if passing.num_passed * (self._repeats if self._of_patches else 1) != found.size:
            return None
        further = {key: made[key].numpy() for key in self._keys if key != PIXELS}
        pixels = found.astype(np.uint8)  # Qwen's patches are integers in fp32
        if pixels.dtype != found.dtype and not np.array_equal(pixels, found):
            return None
        for key, array in further.items():
            if array.size > _SMALL:
                further[key] = np.broadcast_to(array.flat[0], array.shape)
                if not np.array_equal(array, further[key]):
                    return None
        if self._of_patches:
            pixels = pixels.reshape(len(pixels), len(self.table), self._repeats, -1)
            if not (pixels == pixels[:, :, :1]).all():
                return None
            pixels = np.ascontiguousarray(pixels[:, :, 0])
        return ImageBytes(pixels, further)

    def joined(self, parts: Sequence[ImageBytes]) -> dict[str, torch.Tensor] | None:
        """A micro-batch's tensors, with bytes in place of numbers and the table beside them.

        None where images would have to be padded to one size.
        """
        found = {TABLE: self.table}
        for key in self._keys:
            arrays = [part.pixels if key == PIXELS else part.further[key] for part in parts]
            axis = self._axis
            if len({(*array.shape[:axis], *array.shape[axis + 1 :]) for array in arrays}) > 1:
                return None
            found[key] = _concatenated(arrays, axis)
        return found

    def numbers(self, fields: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's inputs from `joined` fields, on their device and in the table's dtype; others are unchanged."""
        found = {key: value for key, value in fields.items() if key != TABLE}
        pixels = found.get(PIXELS)
        if pixels is None or pixels.dtype != torch.uint8:
            return found
        table = fields[TABLE]
        flat = pixels.reshape(-1, len(table), pixels[..., 0, :].shape[-1] if self._of_patches else _area(pixels))
        numbers = table.new_empty(flat.shape)
        for channel, values in enumerate(table):
            chosen = flat[:, channel]
            numbers[:, channel] = values.index_select(0, chosen.reshape(-1).int()).view(chosen.shape)
        if self._of_patches:
            repeated = numbers[:, :, None].expand(-1, -1, self._repeats, -1)
            return {**found, PIXELS: repeated.reshape(len(numbers), -1)}
        return {**found, PIXELS: numbers.view(pixels.shape)}


class _Passing(PilBackend):
    """A backend that leaves bytes as they are and counts them, so that padding is noticed."""

    num_passed = 0

    def rescale(self, image: np.ndarray, scale: float, **kwargs: object) -> np.ndarray:
        return image

    def normalize(self, image: np.ndarray, mean: Numbers, std: Numbers, **kwargs: object) -> np.ndarray:
        self.num_passed += image.size
        return image


def _area(pixels: torch.Tensor) -> int:
    return pixels.shape[-1] * pixels.shape[-2]


def _concatenated(arrays: Sequence[np.ndarray], axis: int) -> torch.Tensor:
    """The arrays joined; arrays that are one constant are kept as that constant."""
    first = arrays[0].flat[0]
    if all(array.size and not any(array.strides) and array.flat[0] == first for array in arrays):
        shape = list(arrays[0].shape)
        shape[axis] = sum(array.shape[axis] for array in arrays)
        return torch.tensor(first).expand(shape)
    return torch.from_numpy(np.concatenate(arrays, axis))
