"""Tensor parallelism: ranks that share each matrix multiplication, by the plan that a model declares.

The styles of a plan and the layers that carry them out are transformers' own (`transformers.distributed`). Its way of
summing the gradients of replicated parameters is not used: it sums at each backward pass, what earlier micro-batches
have summed included (`Weights.sync_replicated_gradients` does it, once per step).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

from shardtune.config.rank_layout import divides
from shardtune.errors import ParallelError
from shardtune.parallel.adapted_layers import WHOLE, base_modules, share_adapter, trains_rows
from shardtune.parallel.adapted_names import without_adapter
from shardtune.parallel.collectives import replicated_input
from shardtune.parallel.meta_init import local_offsets
from shardtune.parallel.plan_gaps import PARTIAL, without_gaps
from shardtune.parallel.torch_private.modules import set_parameter
from shardtune.parallel.torch_private.tensors import quieten_redistribution

Plan = Mapping[str, str]
"""Names of modules and parameters, with `*` for layer numbers, to styles of transformers."""
EXPERTS = "moe_tp_experts"
PACKED = ("packed_colwise", "packed_rowwise")
KEY_VALUE = ("k_proj", "v_proj")
LATENT = "mla_kv_a_proj"
"""The style of a projection to compressed keys and values; it reads a size in the config of the module."""
WHERE = "actor.parallel.tensor"


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes of a model's attention that have to be divisible.

    Attributes:
        query: heads of the queries.
        key_value: heads of keys and values.
        size: of one head.
    """

    query: int
    key_value: int
    size: int


def check_heads(heads: Heads, tensor: int, sequence: int, other: str = "") -> None:
    """Refuse sizes of the axes tensor and sequence that do not divide the heads.

    Args:
        heads: of the model.
        tensor: size of that axis.
        sequence: size of that axis, if its ranks exchange tokens for heads; otherwise 1.
        other: another remedy.

    Raises:
        ParallelError: names the nearest size that does.
    """

    def fits(tensor: int, sequence: int) -> bool:
        return divides(tensor * sequence, heads.query, heads.key_value)

    if fits(tensor, sequence):
        return
    sizes = [(t, s) for t in range(1, tensor + 1) for s in range(1, sequence + 1) if fits(t, s)]
    nearest = max(sizes, key=lambda pair: (pair[0] * pair[1], pair[0]))
    requested = f"tensor {tensor} x sequence {sequence}" if sequence > 1 and tensor > 1 else str(tensor * sequence)
    raise ParallelError(
        f"actor.parallel: {requested} ranks cannot share {heads.query} heads of queries and {heads.key_value} of keys "
        "and values",
        where=WHERE if tensor > 1 else "actor.parallel.sequence",
        remedy=f"the nearest that fits is tensor {nearest[0]}, sequence {nearest[1]}{other}",
    )


def parallelise(model: nn.Module, plan: Plan, ranks: DeviceMesh, heads: Heads | None) -> list[str]:
    """Spread a model over tensor ranks in place, before it is sharded.

    Args:
        model: on the meta device.
        plan: the style of each module.
        ranks: the mesh along the axis `tensor`.
        heads: of its attention; None for a model without.

    Returns:
        The names of parameters that every rank holds, and of whose gradient each computes a part.

    Raises:
        ParallelError: the plan is empty or names nothing, or has a style that is not known here.
    """
    _check_plan(model, plan)
    plan = without_gaps(model, plan)
    quieten_redistribution()
    shared = _shared_parameters(model)
    repeated = heads is not None and heads.key_value < ranks.size()
    partial: list[str] = []
    for name, style in expanded(model, plan):
        owner, _, key = name.rpartition(".")
        layer = without_adapter(name)
        if style == PARTIAL:
            partial += [name] if name in dict(model.named_parameters()) else []
        elif repeated and any(part in KEY_VALUE for part in layer.split(".")[-2:]):
            assert heads is not None
            if layer.rpartition(".")[2] in KEY_VALUE:
                _repeat_heads(model.get_submodule(layer), ranks, heads)
                partial += [f"{layer}.{parameter}" for parameter, _ in model.get_submodule(layer).named_parameters()]
        elif key in dict(model.get_submodule(owner).named_parameters(recurse=False)):
            if not (style in WHOLE and trains_rows(model, owner)):
                ALL_PARALLEL_STYLES[style].shard_param(model.get_submodule(owner), key, ranks)
        elif not (style in WHOLE and trains_rows(model, name)):
            if style == LATENT:
                vars(model.get_submodule(name))["config"] = _text_config(model)
            ALL_PARALLEL_STYLES[style].install_forward(model.get_submodule(name), ranks)
            share_adapter(model, name, style, ranks)
    _share_again(model, shared)
    if repeated:
        assert heads is not None
        for module in model.modules():
            if "num_key_value_groups" in vars(module):
                vars(module)["num_key_value_groups"] = heads.query // ranks.size()
    return partial


@dataclass(frozen=True, slots=True)
class Slice:
    """This rank's rows of a matrix whose rows are dealt to tensor ranks.

    Attributes:
        rows: this rank's, [rows, width].
        start: the first of them in the whole.
        total: rows of the whole.
        ranks: that have the others.
    """

    rows: torch.Tensor
    start: int
    total: int
    ranks: DeviceMesh


def row_slice(weight: DTensor) -> Slice:
    """This rank's rows of a weight that tensor ranks share; to be called where the weight is gathered otherwise."""
    (placement,) = weight.placements
    assert isinstance(placement, Shard)
    assert placement.dim == 0
    start = local_offsets(weight)[0]
    rows = weight.to_local()
    return Slice(rows, start if len(rows) else weight.shape[0], weight.shape[0], weight.device_mesh)


def without_experts(plan: Plan) -> Plan:
    """A plan without stacked experts: each tensor rank computes those that it has, whole.

    They hold several matrices in one, of which a rank's part is no block of a checkpoint; `expert` spreads them.
    """
    experts = [name for name, style in plan.items() if style == EXPERTS]
    return {
        name: style
        for name, style in plan.items()
        if not any(name == expert or name.startswith(f"{expert}.") for expert in experts)
    }


def check_names(model: nn.Module, plan: Plan, where: str) -> None:
    """Refuse a user's plan with a name that is no module or parameter of the model: its partners would not fit.

    The plans of transformers name parts that only some models of a class have.

    Raises:
        ParallelError: names the pattern and the nearest one.
    """
    names = _wildcards(model)
    for pattern in plan:
        if pattern not in names:
            near = difflib.get_close_matches(replace_layer_number_by_wildcard(pattern), names, n=1, cutoff=0.0)
            raise ParallelError(
                f"tensor_plan names {pattern}, which is no module or parameter of {type(model).__name__}",
                where=where,
                remedy=f"did you mean {near[0]}? Numbers of layers are written as *" if near else "leave it out",
            )


def _wildcards(model: nn.Module) -> set[str]:
    """The names of modules and parameters, with `*` for numbers, also as they are without an adapter."""
    found = (*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False)))
    names = {replace_layer_number_by_wildcard(name) for name in found if name}
    return names | {without_adapter(name) for name in names}


def check_planned(model: nn.Module, plan: Plan) -> None:
    """Refuse a model without a plan.

    Raises:
        ParallelError: the plan is empty.
    """
    if not plan:
        raise ParallelError(
            f"{type(model).__name__} declares no plan for tensor parallelism",
            where=WHERE,
            remedy=f"set {WHERE}: 1; FSDP shares the weights among all ranks without a plan. (An adapter of your own "
            "may have a tensor_plan.)",
        )


def _check_plan(model: nn.Module, plan: Plan) -> None:
    check_planned(model, plan)
    unknown = sorted(set(plan.values()) - set(ALL_PARALLEL_STYLES.keys()))
    packed = sorted(name for name, style in plan.items() if style in PACKED)
    if unknown or packed:
        raise ParallelError(
            f"the tensor plan of {type(model).__name__} has the style {', '.join(unknown)}, which is not known"
            if unknown
            else f"{type(model).__name__} holds several matrices in one ({packed[0]}), which tensor ranks cannot share",
            where=WHERE,
            remedy=f"set {WHERE}: 1",
        )
    names = _wildcards(model)
    if not names.intersection(plan):
        raise ParallelError(
            f"the tensor plan of {type(model).__name__} names nothing in it: {', '.join(list(plan)[:3])}",
            where=WHERE,
            remedy=f"use names such as {', '.join(sorted(names)[:3])}",
        )


def expanded(model: nn.Module, plan: Plan) -> list[tuple[str, str]]:
    """Each parameter and module that the plan names, a module's parameters before the module itself.

    The plan has the names that the model has without adapters; those returned are its names with them.
    """
    found: list[tuple[str, str]] = []
    for name, module in base_modules(model):
        style = plan.get(replace_layer_number_by_wildcard(without_adapter(name)))
        for key, _ in module.named_parameters(recurse=False):
            path = f"{name}.{key}" if name else key
            chosen = plan.get(replace_layer_number_by_wildcard(without_adapter(path)), style)
            found += [(path, chosen)] if chosen is not None else []
        found += [(name, style)] if style is not None and name else []
    return found


def _text_config(model: nn.Module) -> PreTrainedConfig:
    """The config of the language model in a model that a plan of transformers is for."""
    (held, *_) = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    return held.get_text_config()


def _repeat_heads(projection: nn.Module, ranks: DeviceMesh, heads: Heads) -> None:
    """Fewer heads of keys and values than ranks: every rank computes all of them and takes the one that it needs."""
    number = ranks.get_local_rank() * heads.key_value // ranks.size()
    part = slice(number * heads.size, (number + 1) * heads.size)

    def enter(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (replicated_input(inputs[0], ranks), *inputs[1:])

    def take(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output[..., part]

    projection.register_forward_pre_hook(enter)
    projection.register_forward_hook(take)


def _shared_parameters(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _share_again(model: nn.Module, shared: list[list[str]]) -> None:
    """One parameter under several names stays one, though cutting it made a new one of one of them."""
    for group in shared:
        found = [model.get_parameter(name) for name in group]
        cut = next((parameter for parameter in found if isinstance(parameter, DTensor)), found[0])
        placements = {str(p.placements) if isinstance(p, DTensor) else "" for p in found} - {""}
        if len(placements) > 1:
            raise ParallelError(
                f"{' and '.join(group)} are one parameter, which the tensor plan cuts in several ways",
                where=WHERE,
                remedy=f"set {WHERE}: 1",
            )
        for name in group:
            owner, _, key = name.rpartition(".")
            set_parameter(model.get_submodule(owner), key, cut)
