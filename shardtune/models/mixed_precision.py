"""Half precision for any module: floating inputs are cast to it, outputs are returned in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from transformers import PreTrainedModel

from shardtune.parallel.buffers import statistical_norms
from shardtune.parallel.fp32_compute import may_be_the_models
from shardtune.parallel.full_precision import full_precision_parameters, kept_in_fp32, outermost_pretrained
from shardtune.parallel.half_products import HALF
from shardtune.parallel.meta_init import init_empty_weights
from shardtune.parallel.torch_private.modules import contents
from shardtune.parallel.torch_private.operations import tree_map_only
from shardtune.parallel.torch_private.tensors import changes_in_place


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Make `model` compute in `dtype`, whatever the floating dtype of its inputs.

    Inputs are cast to `dtype`; half-precision outputs become fp32, in which losses are summed. Targets do not go
    through the model and keep their precision. Buffers keep theirs too: a bf16 activation plus an fp32 position
    encoding is fp32 again, which the next bf16 layer would refuse. So the inputs of torch's own layers are cast as
    well, except inside models of transformers, which cast where they need it: those compute with the buffers that
    `from_pretrained` would give them. Of those an encoder counts as a model of its own, because `generate` calls it by
    itself.
    """

    def outputs_in_fp32(_module: nn.Module, _args: object, outputs: object) -> object:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.float() if tensor.dtype in HALF else tensor, outputs)

    for module in dict.fromkeys((model, *_layers(model), *_encoders(model))):
        _cast_for(module, dtype)
    if dtype in HALF:
        model.register_forward_hook(outputs_in_fp32)
        for each in outermost_pretrained(model):
            _narrow_own_buffers(each, dtype)


def _narrow_own_buffers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """As `narrow_buffers`, of a model that its class makes from the config alone; of another nothing."""
    kind = type(model)
    try:
        narrow_buffers(model, dtype, lambda other: kind._from_config(deepcopy(model.config), dtype=other))
    except Exception as error:  # a user's class may take other arguments, and raise anything
        if not may_be_the_models(error):
            raise


def cast_for_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Let torch's own layers in a user's model take floating inputs of any dtype, where it computes in half precision.

    They would refuse fp32 beside half-precision weights. What the model itself is called with keeps its dtype, targets
    among it; so do the inputs of layers whose weights are kept in fp32.
    """
    if dtype not in HALF:
        return
    kept = full_precision_parameters(model, dtype)
    for module in model.modules():
        if _is_torchs(module) and not kept.intersection(_weights(module)):
            _cast_for(module, dtype)


def _cast_for(layer: nn.Module, dtype: torch.dtype) -> None:
    """Cast a layer's inputs to `dtype`.

    Its weight is computed in fp32 where that takes a buffer, which is fp32 (`spectral_norm`, `orthogonal`), and then
    rounded to half precision.
    """
    layer.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
    for parametrization in _of_weights(layer) if dtype in HALF else ():
        if type(parametrization).__module__.startswith("torch.nn") and any(
            map(torch.is_floating_point, parametrization.buffers())
        ):
            parametrization.register_forward_pre_hook(partial(_cast_inputs, torch.float32), with_kwargs=True)
            parametrization.register_forward_hook(lambda _module, _args, weight: weight.to(dtype))


def _cast_inputs(
    dtype: torch.dtype, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    def into(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, into, args), tree_map_only(torch.Tensor, into, kwargs)


def _is_torchs(module: nn.Module) -> bool:
    """Whether it is a layer of torch that has parameters, or of which weights are computed."""
    is_own = type_before_parametrizations(module).__module__.startswith("torch.nn.modules")
    return is_own and (is_parametrized(module) or bool(contents(module)[0]))


def _of_weights(layer: nn.Module) -> Iterator[nn.Module]:
    """What computes a layer's weights from its parameters, by `torch.nn.utils.parametrize`."""
    if is_parametrized(layer):
        for parametrizations in layer.get_submodule("parametrizations").children():
            yield from parametrizations.children()


def _weights(layer: nn.Module) -> Iterator[nn.Parameter]:
    """A layer's parameters, and those that its weights are computed from."""
    yield from layer.parameters(recurse=False)
    if is_parametrized(layer):
        yield from layer.get_submodule("parametrizations").parameters()


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of torch that have parameters, outside models of transformers."""
    for child in model.children():
        if not isinstance(child, PreTrainedModel) and not isinstance(model, PreTrainedModel):
            if _is_torchs(child):
                yield child
            yield from _layers(child)


def _encoders(model: nn.Module) -> Iterator[nn.Module]:
    """The encoders of models of transformers that write, such as those of speech."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config.is_encoder_decoder and module.can_generate():
            yield module.get_encoder()


class NarrowedBuffer:
    """A buffer that a module has in another dtype during its forwards, and only then.

    A forward that changes it in place changes the buffer itself likewise.

    Args:
        module: has the buffer under `key`.
        dtype: of the buffer during forwards.
    """

    def __init__(self, module: nn.Module, key: str, dtype: torch.dtype) -> None:
        self._module, self._key, self._dtype = module, key, dtype
        self._own = module.get_buffer(key)
        self._hooks = (
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, always_call=True),
        )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, *_: object) -> None:
        self._own = self._module.get_buffer(self._key)
        setattr(self._module, self._key, self._own.to(self._dtype))

    def _leave(self, *_: object) -> None:
        narrowed = self._module.get_buffer(self._key)
        if not narrowed.is_inference() and changes_in_place(narrowed) and narrowed.shape == self._own.shape:
            self._own.copy_(narrowed)
        setattr(self._module, self._key, self._own)


def narrow_buffers(
    model: PreTrainedModel, dtype: torch.dtype, build: Callable[[torch.dtype], PreTrainedModel]
) -> dict[str, NarrowedBuffer]:
    """Let a model have those buffers in a dtype, while it computes, that `from_pretrained` has in it.

    That is for code that adds a table of positions to activations (XGLM) or multiplies them by decays (MiniMax), and
    then takes one dtype alone. Frequencies of rotary positions, running statistics, and what a class keeps in fp32 stay
    as they are.

    Args:
        model: computes in `dtype`.
        dtype: bf16 or fp16.
        build: makes such a model by its class, in a dtype.

    Returns:
        The buffers, by name.
    """
    with init_empty_weights():
        declared = {name: buffer.dtype for name, buffer in build(dtype).named_buffers()}
    is_kept, norms = kept_in_fp32(model, dtype), set(statistical_norms(model).values())
    found: dict[str, NarrowedBuffer] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if declared.get(name) == dtype != buffer.dtype and not is_kept(name) and module not in norms:
                found[name] = NarrowedBuffer(module, name.rpartition(".")[2], dtype)
    return found
