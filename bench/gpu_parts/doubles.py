"""Models in fp64 that compute nothing in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

F = torch.nn.functional
CONVERT = {torch.Tensor.to, torch.Tensor.type, torch.softmax, F.softmax, torch.log_softmax, F.log_softmax}
"""What takes a dtype that it converts to; others see the bytes of a file as fp32, say."""


class Doubles(TorchFunctionMode):
    """Inside, what would be converted to fp32 is fp64.

    transformers computes norms, rotary angles and the softmax of routers in fp32, whatever a model's dtype. Their last
    bits differ between devices, so that runs in fp64 on two devices agree to 1e-7 alone; inside, to 1e-12. Forwards
    that the backward pass repeats are outside.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if func in CONVERT:
            args, kwargs = [_wider(value) for value in args], {key: _wider(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
