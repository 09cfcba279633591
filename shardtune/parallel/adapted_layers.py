"""Adapters of PEFT on layers that tensor ranks share, and on experts that lie on several ranks.

PEFT puts its layer in the place of one of the model and keeps that inside, as `base_layer`. A plan goes by the names
that the model has without adapters. Of a LoRA beside a weight that is cut by output features (colwise) the second
factor is cut so too, and beside one that is cut by input features (rowwise) the first; the other factor is whole on
every tensor rank, and so is its gradient. Where a layer's input and output are whole, both factors are.

The factors for stacked experts are sharded like any parameter, and gathered with the layer around them. A rank computes
with those of its own experts, so that its gradient is a part, which the reduction over shards completes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from shardtune.errors import ParallelError
from shardtune.parallel import peft_names as peft
from shardtune.parallel.adapted_names import without_adapter
from shardtune.parallel.meta_init import local_offsets
from shardtune.parallel.torch_private.modules import contents

WHERE = "actor.model.lora.target_modules"
FACTORS = {"colwise": "lora_B", "rowwise": "lora_A"}
"""Which factor of a LoRA is cut, by the style of its layer."""
WHOLE = (
    "colwise_gather_output",
    "colwise_rep",
    "embedding_colwise",
    "embedding_rowwise",
    "replicate",
    "rowwise_rep",
    "rowwise_split_input",
)
"""Styles of layers that take and return whole tensors."""


def base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a model has without adapters, by their names in it."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        children = module.named_children()
        if peft.is_imported() and isinstance(module, (peft.BaseTunerLayer, peft.AuxiliaryTrainingWrapper)):
            for key, child in children:
                inside.update(() if key in ("base_layer", "token_adapter") else child.modules())
        else:
            yield name, module


def trains_rows(model: nn.Module, name: str) -> bool:
    """Whether a layer is an embedding or a head of which rows are trained, which has to be whole."""
    outer = without_adapter(name)
    return outer != name and isinstance(model.get_submodule(outer), peft.AuxiliaryTrainingWrapper)


def share_adapter(model: nn.Module, name: str, style: str, ranks: DeviceMesh) -> None:
    """Spread the adapter of a layer that tensor ranks share, if it has one, like the layer.

    Args:
        model: on the meta device.
        name: of the layer in it.
        style: of the layer, which is cut already.
        ranks: the mesh along the axis `tensor`.

    Raises:
        ParallelError: the adapter cannot be spread so.
    """
    outer = without_adapter(name)
    layer = model.get_submodule(outer)
    if outer == name:
        return
    if style in WHOLE and isinstance(layer, peft.LoraLayer):
        return
    if style not in FACTORS:
        raise _not_shared(outer, f"is shared by the style {style}")
    if not isinstance(layer, peft.Linear) or not isinstance(layer.get_base_layer(), nn.Linear):
        raise _not_shared(outer, f"has an adapter of the class {type(layer).__module__}.{type(layer).__name__}")
    for adapter in layer.lora_A:
        if layer.use_dora[adapter]:
            raise _not_shared(outer, "has the norms of whole rows (DoRA)")
        factor = layer.get_submodule(f"{FACTORS[style]}.{adapter}")
        for key, _ in list(factor.named_parameters(recurse=False)):
            ALL_PARALLEL_STYLES[style].shard_param(factor, key, ranks)
        ALL_PARALLEL_STYLES[style].install_forward(factor, ranks)
        drop = layer.lora_dropout[adapter]
        if style == "rowwise" and isinstance(drop, nn.Dropout):
            layer.lora_dropout[adapter] = PartialDropout(drop.p, factor.get_parameter("weight"))


def spread_adapters(model: nn.Module, name: str, ranks: DeviceMesh) -> list[str]:
    """Let the adapters of stacked experts be computed with the experts that a rank has; before these are spread.

    Args:
        model: on the meta device.
        name: of the module that has the experts.
        ranks: the mesh over which whole experts are spread, in blocks.

    Returns:
        The names of the adapters' parameters, of whose gradient each rank computes a part.

    Raises:
        ParallelError: they have an adapter that is no LoRA for parameters.
    """
    outer, experts = without_adapter(name), model.get_submodule(name)
    wrappers: list[peft.ParamWrapper] = []
    layer = model.get_submodule(outer)
    while layer is not experts:
        if not isinstance(layer, peft.ParamWrapper):
            raise ParallelError(
                f"{outer} has an adapter of the class {type(layer).__name__}, which cannot be spread with its experts",
                where="actor.parallel.expert",
                remedy="leave it out by exclude_modules, or set actor.parallel.expert: 1",
            )
        wrappers.append(layer)
        vars(layer)["forward"] = layer.base_layer  # the adapter works inside of it
        layer = layer.base_layer
    if wrappers:
        vars(experts)["forward"] = _with_factors(experts, wrappers, ranks)
    own = {parameter for wrapper in wrappers for parameter in wrapper.parameters()} - {*experts.parameters()}
    return [key for key, parameter in model.named_parameters() if parameter in own]


def _with_factors(
    experts: nn.Module, wrappers: list[peft.ParamWrapper], ranks: DeviceMesh
) -> Callable[..., torch.Tensor]:
    """A forward of this rank's experts, whose weights are plain tensors then, with their LoRA added to them."""
    compute, rank = experts.forward, ranks.get_local_rank()
    number = wrappers[0].num_experts // ranks.size()
    own = slice(rank * number, (rank + 1) * number)

    def forward(*args: torch.Tensor) -> torch.Tensor:
        parameters: dict[str, torch.Tensor | None] = {**contents(experts)[0]}
        try:
            for wrapper in wrappers if not wrappers[0].disable_adapters else ():
                for adapter in wrapper.active_adapters:
                    left, right, scale = wrapper.get_delta_factors(adapter)
                    weight = torch.baddbmm(wrapper.get_param(), left[own], right[own], alpha=scale)
                    put(wrapper.parameter_name, weight)
            return compute(*args)
        finally:
            for key, parameter in parameters.items():
                put(key, parameter)

    def put(key: str, value: torch.Tensor | None) -> None:
        held: dict = contents(experts)[0]
        held[key] = value

    return forward


class PartialDropout(nn.Module):
    """Dropout of this rank's features of an input, drawn for all of them: as on one rank.

    Args:
        p: the share that is dropped.
        weight: of the linear layer after it, [out, features], cut among tensor ranks by features.
    """

    def __init__(self, p: float, weight: torch.Tensor) -> None:
        super().__init__()
        assert isinstance(weight, DTensor)
        self.p = p
        self._features = weight.shape[1]
        self._start = local_offsets(weight)[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., this rank's features]."""
        if not self.training or not self.p:
            return x
        kept = F.dropout(x.new_ones(*x.shape[:-1], self._features), self.p)
        return x * kept[..., self._start : self._start + x.shape[-1]]


def _not_shared(name: str, why: str) -> ParallelError:
    return ParallelError(
        f"{name} {why}, so its adapter cannot be spread over tensor ranks",
        where=WHERE,
        remedy="leave it out by exclude_modules, or set actor.parallel.tensor: 1",
    )
