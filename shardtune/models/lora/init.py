"""The initial weights of an adapter, and the merge of an adapter into its base weights, one layer at a time.

Both are PEFT's own arithmetic, on a copy of the layer with unsharded parameters. So the numbers depend on the seed,
the layer's name and the base weights, not on ranks or precision, and only one layer is unsharded at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardtune.batch.seeds import derive_seed
from shardtune.errors import ConfigError
from shardtune.models.lora.attach import (
    ADAPTER,
    adapter_config,
    is_adapted_layer,
    is_lora_layer,
    lora_layers,
    token_rows,
)
from shardtune.models.lora.config import DECOMPOSING, SUBTRACTING
from shardtune.models.lora.nf4 import NF4Linear, decode
from shardtune.parallel import peft_names as peft
from shardtune.parallel.meta_init import fill
from shardtune.parallel.torch_private.modules import contents, set_contents

if TYPE_CHECKING:
    from shardtune.models.lora.attach import AdaptedByLora

INITIAL = "initial"
"""The buffer beside a factor's `weight` with its initial value, which was subtracted from the base weight."""

Make = Callable[[nn.Module, str, torch.Tensor], torch.Tensor]


@torch.no_grad()
def initialise_adapter(model: nn.Module, seed: int) -> None:
    """Draw the weights of a fresh LoRA by the initialiser of `lora.init`; every rank calls it.

    An adapter of another method has its values since it was attached.

    Factors are drawn in fp32 and cast. DoRA's magnitudes are the norms of the base weights, so these have to be loaded;
    PiSSA and OLoRA also change them.

    Args:
        model: adapted, sharded or not, its parameters in memory.
        seed: of the run.

    Raises:
        ConfigError: PEFT cannot initialise a layer in this way.
    """
    config = adapter_config(model)
    if isinstance(config, peft.LoraConfig):
        for name, layer in (pair for each in lora_layers(model) for pair in _nested(*each)):
            made = _initialised_copy(name, layer, config, seed)
            _copy_back(layer, made, subtracted=_init_is_one_of(config, SUBTRACTING))
    for _, wrapper in token_rows(model):
        rows = wrapper.token_adapter
        if rows.tied_adapter is None:
            weight = _whole(rows.base_layer.get_parameter("weight").detach())
            fill(rows.trainable_tokens_delta[ADAPTER], weight[rows.token_indices[ADAPTER]])


@torch.no_grad()
def merged(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module below a layer of PEFT, unsharded, on the CPU, with the adapter merged into its weights.

    Args:
        layer: one of `lora_layers`; all ranks call it.
        dtype: of the arithmetic and the result, fp32 or fp64.
    """

    def cast(module: nn.Module, key: str, tensor: torch.Tensor) -> torch.Tensor:
        return _values(module, key, tensor).to("cpu", dtype, copy=True)

    module = _copied(layer, cast)
    while is_adapted_layer(module):
        module.merge()
        module = module.get_submodule("base_layer")
    return module


@torch.no_grad()
def with_rows(wrapper: peft.TrainableTokensWrapper) -> torch.Tensor:
    """The unsharded weight of an embedding or head with its trained rows; all ranks call it."""
    rows = wrapper.token_adapter
    weight = _whole(rows.base_layer.get_parameter("weight").detach()).clone()
    weight[rows.token_indices[ADAPTER]] = _whole(rows.trainable_tokens_delta[ADAPTER].detach()).to(weight)
    return weight


def changes_base(model: nn.Module) -> bool:
    """Whether the adapter's initial value is subtracted from the base weights."""
    return _init_is_one_of(adapter_config(model), SUBTRACTING)


def _initialised_copy(name: str, layer: AdaptedByLora, config: peft.LoraConfig, seed: int) -> AdaptedByLora:
    """A copy of a layer, initialised by PEFT: factors in fp32, magnitudes in fp64 if the weights are."""
    decomposes = _init_is_one_of(config, DECOMPOSING)

    def in_fp32(module: nn.Module, key: str, tensor: torch.Tensor) -> torch.Tensor:
        if not decomposes and not config.use_dora:
            return torch.zeros(()).expand(_shape(module, key, tensor))  # PEFT reads only its shape and dtype
        device = tensor.device if decomposes else "cpu"  # a GPU is much faster at large decompositions
        return _values(module, key, tensor).to(device, torch.float32, copy=True)

    made = _copied_layer(layer, in_fp32)
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
    if config.use_dora and any(parameter.dtype == torch.float64 for parameter in layer.parameters()):
        _init_magnitudes_in_fp64(layer, made, config)
    return made


def _init_magnitudes_in_fp64(layer: nn.Module, made: AdaptedByLora, config: peft.LoraConfig) -> None:
    """Initialise DoRA's magnitudes of a copy once more, from the weights in fp64; what PiSSA or OLoRA has left of them
    stays as it is."""
    made.double()
    kept = () if _init_is_one_of(config, SUBTRACTING) else _copied(layer, _values).named_parameters()
    for name, tensor in kept:
        if name.startswith("base_layer."):
            made.get_parameter(name).copy_(tensor)
    begin: Callable[..., None] = made.lora_variant[ADAPTER].init
    begin(made, adapter_name=ADAPTER, config=config)


def _copy_back(layer: AdaptedByLora, made: nn.Module, *, subtracted: bool) -> None:
    """Copy this rank's part of a copy's adapter into the layer, and of its base weight if that has changed."""
    for name, parameter in layer.named_parameters():
        if not name.startswith("base_layer.") or (subtracted and name == "base_layer.weight"):
            fill(parameter, made.get_parameter(name).detach())
    if subtracted:
        for factor in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            factor.register_buffer(INITIAL, factor.get_parameter("weight").detach().clone(), persistent=False)


def _init_is_one_of(config: peft.PeftConfig, names: tuple[str, ...]) -> bool:
    return isinstance(config, peft.LoraConfig) and str(config.init_lora_weights).startswith(names)


def _nested(name: str, layer: nn.Module) -> Iterator[tuple[str, AdaptedByLora]]:
    """A layer and those nested in it: several adapted parameters of one module are nested layers."""
    while is_lora_layer(layer):
        yield name, layer
        name, layer = f"{name}.base_layer", layer.base_layer


def _copied_layer(layer: AdaptedByLora, make: Make) -> AdaptedByLora:
    copy = _copied(layer, make)
    assert is_lora_layer(copy)
    return copy


def _copied(module: nn.Module, make: Make) -> nn.Module:
    """A copy of a module and all its submodules with new, unsharded parameters, without hooks and not shared by ranks.

    Args:
        make: the new values of a parameter, from its module, its name there and itself (of a layer in NF4: its codes).
    """
    kind = type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)
    packed = kind is NF4Linear
    copy = nn.Module.__new__(nn.Linear if packed else kind)
    # PEFT keeps the settings of its layers in dicts and lists, which the copy may change.
    vars(copy).update({key: _shallow(value) for key, value in vars(module).items()})
    vars(copy).update({key: OrderedDict() for key in vars(module) if key.endswith("_hooks")})
    vars(copy).pop("forward", None)  # of a layer that ranks share
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


def _shallow(value: object) -> object:
    return value.copy() if type(value) is dict or type(value) is list else value


def _values(module: nn.Module, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter, unsharded; of a layer in NF4 the matrix instead of its codes."""
    if isinstance(module, NF4Linear) and key == "packed":
        return decode(_whole(tensor), module.in_features, torch.float32)
    return _whole(tensor)


def _shape(module: nn.Module, key: str, tensor: torch.Tensor) -> torch.Size:
    if isinstance(module, NF4Linear) and key == "packed":
        return torch.Size((module.out_features, module.in_features))
    return tensor.shape


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
