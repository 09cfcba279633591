"""How large the largest tensor of a computation is."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that any operation gives; with a dtype, of a tensor of it."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.elements = 0
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor) and self._dtype in (None, value.dtype):
                self.elements = max(self.elements, value.numel())
        return result
