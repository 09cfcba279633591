"""Rescaling and normalising bytes by a table: the same bits as by arithmetic, for less time."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
from transformers.image_processing_backends import PilBackend


def by_table(image_processor: Any) -> Any:
    """A copy of an image processor that looks up what rescaling and normalising make of each byte of a channel.

    Both work on each number by itself, so that 256 results of each channel are all there are. One that does not do
    both, or is of no Pillow backend, is returned as it is.
    """
    is_by_pillow = isinstance(image_processor, PilBackend)
    settings: dict[str, Any] = image_processor.to_dict() if is_by_pillow else {}
    if not (settings.get("do_rescale") and settings.get("do_normalize")):
        return image_processor
    quick: Any = copy.copy(image_processor)
    quick.__class__ = _with_table(type(image_processor))
    return quick


class _Tabled(PilBackend):
    """Stands behind a processor's own class and before the backend, whose methods that class calls."""

    _tables: dict[Any, np.ndarray] | None = None

    def rescale(self, image: np.ndarray, scale: float, **kwargs: Any) -> np.ndarray:
        if image.dtype != np.uint8 or image.ndim != 3 or kwargs:
            return super().rescale(image, scale, **kwargs)
        scaled = image.view(_Bytes)
        scaled.scale = scale
        return scaled

    def normalize(self, image: np.ndarray, mean: Any, std: Any, **kwargs: Any) -> np.ndarray:
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
    """An image that is to be rescaled; what is computed of it in another way finds bytes, and differs."""

    scale: float | None = None


@cache
def _with_table(kind: Any) -> Any:
    def reduce(self: Any) -> tuple[Any, ...]:
        return _again, (kind, dict(vars(self)))

    return type(kind.__name__, (kind, _Tabled), {"__module__": kind.__module__, "__reduce__": reduce})


def _again(kind: Any, state: dict[str, Any]) -> Any:
    """An image processor with its table in another process."""
    made = object.__new__(_with_table(kind))
    vars(made).update(state)
    return made
