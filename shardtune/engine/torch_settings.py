"""torch's settings of the caller, for ranks in other processes: there a method computes as it would in the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.backends import cuda, cudnn

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Autocast:
    """A `torch.autocast` around a call.

    Attributes:
        device: its type.
        dtype: of the computation.
        caches: whether casts of weights are kept.
    """

    device: str
    dtype: torch.dtype
    caches: bool


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """The settings of a process.

    Attributes:
        values: those that hold until they are changed, by name.
        autocasts: those that a call is in.
        grad: whether operations are recorded for gradients.
    """

    values: Mapping[str, object]
    autocasts: tuple[Autocast, ...]
    grad: bool

    @classmethod
    def here(cls) -> TorchSettings:
        caches = torch.is_autocast_cache_enabled()
        autocasts = [
            Autocast(device, torch.get_autocast_dtype(device), caches)
            for device in DEVICES
            if torch.is_autocast_enabled(device)
        ]
        return cls({name: read() for name, (read, _) in _SETTINGS.items()}, tuple(autocasts), torch.is_grad_enabled())


class FollowedSettings:
    """The caller's settings on a rank: what the caller has changed since the last request is changed here, too.

    What a method has set on the rank stays, as long as the caller does not change the same setting.
    """

    def __init__(self) -> None:
        self._last = TorchSettings.here().values

    @contextmanager
    def during(self, given: TorchSettings | None) -> Iterator[None]:
        """Have the caller's settings inside; None: leave them as they are."""
        if given is None:
            yield
            return
        for name, value in given.values.items():
            if value != self._last[name]:
                _SETTINGS[name][1](value)
        self._last = given.values
        with ExitStack() as stack:
            for each in given.autocasts:
                stack.enter_context(torch.autocast(each.device, each.dtype, cache_enabled=each.caches))
            if not given.grad:
                stack.enter_context(torch.no_grad())
            yield


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
    for place, value in zip(_FP32_PLACES, given, strict=True):
        place.fp32_precision = value


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
# Each is read by the first function and set by the second.
_SETTINGS: Mapping[str, tuple[Callable[[], object], Callable[..., object]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "precision of fp32": (_fp32_precision, _set_fp32_precision),
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
