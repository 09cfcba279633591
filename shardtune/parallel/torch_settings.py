"""torch's settings of a process that hold until they are changed: how each is read and set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.backends import cuda, cudnn

DTYPE, FP32 = "default dtype", "precision of fp32"


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _anomalies() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_fill(fills: bool) -> None:
    _DETERMINISTIC.fill_uninitialized_memory = fills


def _set_benchmark(on: bool) -> None:
    cudnn.benchmark = on


def _set_cudnn_deterministic(on: bool) -> None:
    cudnn.deterministic = on


def _fp32_precision() -> tuple[str, bool] | tuple[str, ...]:
    """How exactly fp32 is multiplied: torch has two ways to set it, and refuses the first once the second was used."""
    try:
        return torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:
        return tuple(place.fp32_precision for place in _FP32_PLACES)


def _set_fp32_precision(given: tuple[str, bool] | tuple[str, ...]) -> None:
    first, second, *_ = given
    if isinstance(second, bool):
        torch.set_float32_matmul_precision(first)
        cudnn.allow_tf32 = second
        return
    values = dict(zip(_FP32_PLACES, given, strict=True))
    for place, value in values.items():
        if place in _WIDER and value == values[_WIDER[place]]:
            place.fp32_precision = "none"  # as that of the wider one, also when that is changed
        if place.fp32_precision != value:
            place.fp32_precision = value


def exact_fp32(given: Any) -> object:
    """A precision of fp32 products, as read here, with none below fp32's own; convolutions of cudnn as they are."""
    if isinstance(given[1], bool):
        return "highest", given[1]
    kept = (_BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn)  # TF32 by default
    pairs = zip(_FP32_PLACES, given, strict=True)
    return tuple(value if place in kept or value == "none" else "ieee" for place, value in pairs)


def _set_anomalies(given: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(*given)


_BACKENDS: Any = torch.backends  # its modules have attributes that no type declares, as the next has
_DETERMINISTIC: Any = torch.utils.deterministic
_FP32_PLACES: tuple[Any, ...] = (  # the wider ones first
    _BACKENDS,
    _BACKENDS.cuda.matmul,
    _BACKENDS.cudnn,
    _BACKENDS.cudnn.conv,
    _BACKENDS.cudnn.rnn,
    _BACKENDS.mkldnn,
    _BACKENDS.mkldnn.matmul,
    _BACKENDS.mkldnn.conv,
    _BACKENDS.mkldnn.rnn,
)
_WIDER: Mapping[Any, Any] = {
    _BACKENDS.cuda.matmul: _BACKENDS,
    _BACKENDS.cudnn: _BACKENDS,
    _BACKENDS.cudnn.conv: _BACKENDS.cudnn,
    _BACKENDS.cudnn.rnn: _BACKENDS.cudnn,
    _BACKENDS.mkldnn: _BACKENDS,
    _BACKENDS.mkldnn.matmul: _BACKENDS.mkldnn,
    _BACKENDS.mkldnn.conv: _BACKENDS.mkldnn,
    _BACKENDS.mkldnn.rnn: _BACKENDS.mkldnn,
}
"""The place whose precision each has where it has none of its own."""
SETTINGS: Mapping[str, tuple[Callable[[], object], Callable[..., object]]] = {
    DTYPE: (torch.get_default_dtype, torch.set_default_dtype),
    FP32: (_fp32_precision, _set_fp32_precision),
    "deterministic algorithms": (
        _deterministic,
        lambda given: torch.use_deterministic_algorithms(given[0], warn_only=given[1]),
    ),
    "filled memory": (lambda: _DETERMINISTIC.fill_uninitialized_memory, _set_fill),
    "anomalies": (_anomalies, _set_anomalies),
    "cudnn.benchmark": (lambda: cudnn.benchmark, _set_benchmark),
    "cudnn.deterministic": (lambda: cudnn.deterministic, _set_cudnn_deterministic),
    "flash attention": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "attention in less memory": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "attention in plain products": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "attention of cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
}
"""Each is read by the first function and set by the second."""


@contextmanager
def restored() -> Iterator[None]:
    """Set back, at the end, what has been changed inside."""
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    try:
        yield
    finally:
        for name, (read, change) in SETTINGS.items():
            if read() != before[name]:
                change(before[name])
