"""Rescaling and normalising bytes by a table: the same bits as by arithmetic, for less time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BaseImageProcessor

from shardtune.data.images.derived import derived

Numbers = float | Iterable[float]
"""One number for all channels, or one for each."""


def by_table(image_processor: BaseImageProcessor) -> BaseImageProcessor:
    """A copy of an image processor that looks up the rescaled and normalised value of each byte of a channel.

    Both work on each number by itself, so that 256 results of each channel are all there are. One that does not do
    both, or that is of no Pillow backend, is returned as it is.
    """
    if not isinstance(image_processor, PilBackend):
        return image_processor
    settings = image_processor.to_dict()
    does_both = settings.get("do_rescale") and settings.get("do_normalize")
    return derived(image_processor, _Tabled) if does_both else image_processor


class _Tabled(PilBackend):
    """The backend, which looks up bytes in a table."""

    _tables: dict[tuple[object, ...], np.ndarray] | None = None

    def rescale(self, image: np.ndarray, scale: float, **kwargs: object) -> np.ndarray:
        if image.dtype != np.uint8 or image.ndim != 3 or kwargs:
            return super().rescale(image, scale, **kwargs)
        scaled = image.view(_Bytes)
        scaled.scale = scale
        return scaled

    def normalize(self, image: np.ndarray, mean: Numbers, std: Numbers, **kwargs: object) -> np.ndarray:
        if not isinstance(image, _Bytes) or image.scale is None:
            return super().normalize(image, mean, std, **kwargs)
        key = (image.shape[0], image.scale, str(mean), str(std))
        if self._tables is None:
            self._tables = {}
        if key not in self._tables:
            every = np.broadcast_to(np.arange(256, dtype=np.uint8), (image.shape[0], 1, 256))
            self._tables[key] = super().normalize(super().rescale(every, image.scale), mean, std, **kwargs)[:, 0].copy()
        table, numbers = self._tables[key], image.view(np.ndarray)
        found = np.empty(image.shape, table.dtype)
        for channel, values in enumerate(table):
            np.take(values, numbers[channel], out=found[channel], mode="clip")
        return found


class _Bytes(np.ndarray):
    """An image whose rescaling is deferred until it is normalised; any other computation gets bytes, and so differs."""

    scale: float | None = None
