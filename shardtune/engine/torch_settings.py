"""torch's settings of the caller, for ranks in other processes: there a method computes as it would in the caller's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from shardtune.parallel.torch_settings import SETTINGS

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
        return cls({name: read() for name, (read, _) in SETTINGS.items()}, tuple(autocasts), torch.is_grad_enabled())


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
                SETTINGS[name][1](value)
        self._last = given.values
        with ExitStack() as stack:
            for each in given.autocasts:
                stack.enter_context(torch.autocast(each.device, each.dtype, cache_enabled=each.caches))
            if not given.grad:
                stack.enter_context(torch.no_grad())
            yield
