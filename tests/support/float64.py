"""Computation in float64 throughout, also where a model's own code chooses float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Float64Throughout(TorchDispatchMode):
    """Every tensor that an operation would make in float32 is made in float64.

    Most models of transformers compute norms, softmax, routers and rotary positions in float32, whatever their
    weights' dtype. Two orders of the same sums then differ by 1e-8 of a value, and by much more where a model
    magnifies it, so that a small fault cannot be told from rounding. Without float32 what is the same differs by
    1e-12.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call: Callable[..., Any] = func
        given = dict(kwargs or {})
        if given.get("dtype") is torch.float32:
            given["dtype"] = torch.float64
        return call(*args, **given)
