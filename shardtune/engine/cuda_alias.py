"""Code that says "cuda" runs on an engine without a GPU: there it means the engine's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class PrintedDevice(TorchFunctionMode):
    """Inside, "cuda" in a call of torch's, and `.cuda()`, mean another device.

    Args:
        device: which one.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        if any(_names_cuda(value) for value in args):
            args = tuple(self._device if _names_cuda(value) else value for value in args)
        if kwargs and _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": self._device}
        return func(*args, **(kwargs or {}))


def _names_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
