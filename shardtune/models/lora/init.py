"""An adapter's first weights, and what an adapter makes of the weights below it, one layer at a time.

Both are PEFT's own arithmetic, on a copy of the layer that has its parameters whole. So the numbers depend on the
seed, the layer's name and the base weights, not on ranks or precision, and only one layer is ever whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils.other import TrainableTokensWrapper
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardtune.data.loader.order import derive_seed
from shardtune.errors import ConfigError
from shardtune.models.lora.attach import ADAPTER, adapter_config, lora_layers, token_rows
from shardtune.models.lora.config import SUBTRACTING
from shardtune.models.lora.nf4 import NF4Linear, decode
from shardtune.parallel.meta_init import fill
from shardtune.parallel.torch_private import contents, set_contents

DECOMPOSING = ("pissa", "olora", "mica")
"""Initialisers that begin with a decomposition of the base weight."""
INITIAL = "initial"
"""The buffer of a factor, beside its `weight`, that keeps what it was when it was taken out of the base weight."""

Make = Callable[[nn.Module, str, torch.Tensor], torch.Tensor]


@torch.no_grad()
def initialise_adapter(model: nn.Module, seed: int) -> None:
    """Draw the weights of a fresh adapter, as `lora.init` names it; every rank calls it.

    Factors are drawn in fp32 and cast. DoRA's magnitudes are the norms of the base weights, so these have to be there;
    PiSSA and OLoRA also change them, so they have to be as loaded.

    Args:
        model: adapted, sharded or not, its parameters in memory.
        seed: of the run.

    Raises:
        ConfigError: PEFT cannot initialise a layer so.
    """
    config = adapter_config(model)
    for path, outermost in lora_layers(model):
        for name, layer in _nested(path, outermost):
            made = _begun(name, layer, config, seed)
            _keep(layer, made, subtracted=_begins(config, SUBTRACTING))
    for _, wrapper in token_rows(model):
        rows = wrapper.token_adapter
        if rows.tied_adapter is None:
            weight = _whole(rows.base_layer.get_parameter("weight").detach())
            fill(rows.trainable_tokens_delta[ADAPTER], weight[rows.token_indices[ADAPTER]])


@torch.no_grad()
def merged(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module below a layer of PEFT, whole, on the CPU, with the adapter's effect in its weights.

    Args:
        layer: one of `lora_layers`; all ranks call it.
        dtype: of the arithmetic and the result, fp32 or fp64.
    """

    def cast(module: nn.Module, key: str, tensor: torch.Tensor) -> torch.Tensor:
        return _values(module, key, tensor).to("cpu", dtype, copy=True)

    module = _copied(layer, cast)
    while isinstance(module, LoraLayer):
        module.merge()
        module = module.base_layer
    return module


@torch.no_grad()
def with_rows(wrapper: TrainableTokensWrapper) -> torch.Tensor:
    """The whole weight of an embedding or head with the rows that were trained; all ranks call it."""
    rows = wrapper.token_adapter
    weight = _whole(rows.base_layer.get_parameter("weight").detach()).clone()
    weight[rows.token_indices[ADAPTER]] = _whole(rows.trainable_tokens_delta[ADAPTER].detach()).to(weight)
    return weight


def changes_base(model: nn.Module) -> bool:
    """Whether an adapter begins as a part of the base weights, which is taken out of them."""
    return _begins(adapter_config(model), SUBTRACTING)


def _begun(name: str, layer: LoraLayer, config: LoraConfig, seed: int) -> nn.Module:
    """A copy of one layer as PEFT begins it: factors in fp32, magnitudes in fp64 where the weights are."""
    decomposes = _begins(config, DECOMPOSING)

    def in_fp32(module: nn.Module, key: str, tensor: torch.Tensor) -> torch.Tensor:
        if not decomposes and not config.use_dora:
            return torch.zeros(()).expand(_shape(module, key, tensor))  # PEFT asks for its shape and dtype alone
        device = tensor.device if decomposes else "cpu"  # a GPU is much faster at large decompositions
        return _values(module, key, tensor).to(device, torch.float32, copy=True)

    made = _copied(_module(layer), in_fp32)
    assert isinstance(made, LoraLayer)
    devices = {parameter.device for parameter in made.parameters() if parameter.is_cuda}
    try:
        with torch.random.fork_rng(devices=list(devices)):
            torch.manual_seed(derive_seed(seed, "lora", name))
            made.update_layer(ADAPTER, layer.r[ADAPTER], lora_alpha=layer.lora_alpha[ADAPTER], config=config)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"PEFT cannot initialise the adapter of {name}: {str(error).splitlines()[0]}",
            where=f"actor.model.lora.init: {config.init_lora_weights}",
            remedy="use actor.model.lora.init: true, or other modules or another rank",
        ) from error
    if config.use_dora and any(parameter.dtype == torch.float64 for parameter in _module(layer).parameters()):
        _measure_in_fp64(_module(layer), made, config)
    return made


def _measure_in_fp64(layer: nn.Module, made: nn.Module, config: LoraConfig) -> None:
    """Take DoRA's magnitudes of a copy once more, from the weights as they are."""
    made.double()
    assert isinstance(made, LoraLayer)
    for name, tensor in _copied(layer, _values).named_parameters():
        if name.startswith("base_layer."):
            made.get_parameter(name).copy_(tensor)
    begin: Callable[..., None] = made.lora_variant[ADAPTER].init
    begin(made, adapter_name=ADAPTER, config=config)


def _keep(layer: LoraLayer, made: nn.Module, *, subtracted: bool) -> None:
    """Copy this rank's part of a copy's adapter into the layer, and of its base weight where that has changed."""
    module = _module(layer)
    for name, parameter in module.named_parameters():
        if not name.startswith("base_layer.") or (subtracted and name == "base_layer.weight"):
            fill(parameter, made.get_parameter(name).detach())
    if subtracted:
        for factor in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            factor.register_buffer(INITIAL, factor.get_parameter("weight").detach().clone(), persistent=False)


def _begins(config: LoraConfig, names: tuple[str, ...]) -> bool:
    return str(config.init_lora_weights).startswith(names)


def _nested(name: str, layer: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """A layer and those directly below it: several parameters of one module are adapted by nested layers."""
    while isinstance(layer, LoraLayer):
        yield name, layer
        name, layer = f"{name}.base_layer", layer.base_layer


def _module(layer: LoraLayer) -> nn.Module:
    """PEFT's layers are modules; their common base class does not say so."""
    assert isinstance(layer, nn.Module)
    return layer


def _copied(module: nn.Module, make: Make) -> nn.Module:
    """A module like another, with all below it, but with parameters of its own, unsharded, and without hooks.

    Args:
        make: the values of a parameter, from its module, its name there and itself (of a layer in NF4: its codes).
    """
    kind = type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)
    packed = kind is NF4Linear
    copy = nn.Module.__new__(nn.Linear if packed else kind)
    # PEFT keeps the settings of its layers in dicts and lists, which the copy may change.
    vars(copy).update({key: _shallow(value) for key, value in vars(module).items()})
    vars(copy).update({key: OrderedDict() for key in vars(module) if key.endswith("_hooks")})
    parameters, buffers, children = contents(module)
    set_contents(
        copy,
        {
            "weight" if packed and key == "packed" else key: None
            if tensor is None
            else nn.Parameter(make(module, key, tensor.detach()), requires_grad=False)
            for key, tensor in parameters.items()
        },
        {key: None if tensor is None else _whole(tensor) for key, tensor in buffers.items()},
        {key: None if child is None else _copied(child, make) for key, child in children.items()},
    )
    return copy


def _shallow(value: Any) -> Any:
    return value.copy() if type(value) in (dict, list) else value


def _values(module: nn.Module, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter whole; of a layer in NF4 the matrix instead of its codes."""
    if isinstance(module, NF4Linear) and key == "packed":
        return decode(_whole(tensor), module.in_features, torch.float32)
    return _whole(tensor)


def _shape(module: nn.Module, key: str, tensor: torch.Tensor) -> torch.Size:
    if isinstance(module, NF4Linear) and key == "packed":
        return torch.Size((module.out_features, module.in_features))
    return tensor.shape


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
