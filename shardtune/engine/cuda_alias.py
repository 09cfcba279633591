"""On an engine without a GPU "cuda" in a user's code means the engine's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.Tensor.cuda and isinstance(args[0], torch.Tensor):
            return args[0].to(self._device)
        for value in args:  # each operation comes here, and a generator costs more than what it goes over
            if _names_cuda(value):
                args = tuple(self._device if _names_cuda(value) else value for value in args)
                break
        if kwargs and _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": self._device}
        return func(*args, **(kwargs or {}))


def _names_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
