"""Half precision for any module: floating inputs are cast to it, outputs are returned in fp32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from shardtune.parallel.half_products import HALF
from shardtune.parallel.torch_private import contents, tree_map_only


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Make `model` compute in `dtype`, whatever the floating dtype of its inputs.

    Inputs are cast to `dtype`; half-precision outputs become fp32, in which losses are summed. Targets do not go
    through the model and keep their precision. Buffers keep theirs too: a bf16 activation plus an fp32 position
    encoding is fp32 again, which the next bf16 layer would refuse. So the inputs of torch's own layers are cast as
    well, except inside models of transformers, which cast where they need it.
    """

    def cast_inputs(
        _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        return tree_map_only(torch.Tensor, into, args), tree_map_only(torch.Tensor, into, kwargs)

    def into(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def outputs_in_fp32(_module: nn.Module, _args: object, outputs: object) -> object:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.float() if tensor.dtype in HALF else tensor, outputs)

    for module in (model, *_layers(model)):
        module.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    if dtype in HALF:
        model.register_forward_hook(outputs_in_fp32)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of torch that have parameters, outside models of transformers."""
    for child in model.children():
        if not isinstance(child, PreTrainedModel) and not isinstance(model, PreTrainedModel):
            if type(child).__module__.startswith("torch.nn.modules") and contents(child)[0]:
                yield child
            yield from _layers(child)
