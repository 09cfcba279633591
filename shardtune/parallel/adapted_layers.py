"""Adapters of PEFT on layers that ranks share: their factors are cut like the weights beside which they work.

PEFT puts its layer in the place of one of the model and keeps that inside, as `base_layer`. A plan goes by the names
that the model has without adapters. Of a LoRA beside a weight that is cut by output features (colwise) the second
factor is cut so too, and beside one that is cut by input features (rowwise) the first; the other factor is whole on
every tensor rank, and so is its gradient. Where a layer's input and output are whole, both factors are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from shardtune.errors import ParallelError
from shardtune.parallel.meta_init import local_offsets

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


def without_adapter(name: str) -> str:
    """The name that a module or parameter of a model has without adapters."""
    return name.replace(".base_layer", "").replace(".token_adapter", "")


def base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a model has without adapters, by their names in it."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            for key, child in module.named_children():
                inside.update(() if key in ("base_layer", "token_adapter") else child.modules())
        else:
            yield name, module


def trains_rows(model: nn.Module, name: str) -> bool:
    """Whether a layer is an embedding or a head of which rows are trained, which has to be whole."""
    outer = without_adapter(name)
    return outer != name and isinstance(model.get_submodule(outer), AuxiliaryTrainingWrapper)


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
    if not isinstance(layer, LoraLayer | AuxiliaryTrainingWrapper):
        raise _not_shared(outer, f"has an adapter of the class {type(layer).__name__}")
    if style in WHOLE:
        return
    if style not in FACTORS or isinstance(layer, AuxiliaryTrainingWrapper):
        raise _not_shared(outer, f"is shared by the style {style}")
    base = layer.get_base_layer()
    assert isinstance(layer, nn.Module)
    if type(layer).__name__ != "Linear" or not isinstance(base, nn.Linear):
        raise _not_shared(outer, f"is a {type(base).__name__}")
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
