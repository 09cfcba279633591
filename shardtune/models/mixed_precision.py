"""Half precision for a module that knows nothing of it: what goes in is cast, what comes out is given back in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardtune.parallel.torch_private import contents, tree_map_only

HALF = (torch.bfloat16, torch.float16)


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let calls of `model` take and give floating tensors of any dtype, while it computes in `dtype`.

    Inputs are cast to `dtype`; half-precision outputs become fp32, in which losses are summed. Targets, which do not go
    through the model, keep their precision. So do buffers (positions, masks), which make fp32 of what they are added
    to; torch's own layers therefore take that too, except inside models of transformers, which see to it themselves.
    """

    def cast(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tree_map_only(torch.Tensor, into, args), tree_map_only(torch.Tensor, into, kwargs)

    def into(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def restore_model(_module: nn.Module, _args: Any, outputs: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.float() if tensor.dtype in HALF else tensor, outputs)

    for module in (model, *_layers(model)):
        module.register_forward_pre_hook(cast, with_kwargs=True)
    if dtype in HALF:
        model.register_forward_hook(restore_model)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Torch's own layers that hold parameters, outside models of transformers."""
    for child in model.children():
        if not isinstance(child, PreTrainedModel) and not isinstance(model, PreTrainedModel):
            if type(child).__module__.startswith("torch.nn.modules") and contents(child)[0]:
                yield child
            yield from _layers(child)
