"""Applies tensor and expert parallelism to a model before it is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers.distributed.expert_parallel import apply_expert_parallelism

from shardtune.errors import ParallelError
from shardtune.parallel.adapted_layers import spread_adapters
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.tensor_parallel import Heads, Plan, expanded, parallelise, without_experts

DISPATCHED = "ep_dispatch_experts"
WHERE = "actor.parallel.expert"


@dataclass(frozen=True, slots=True)
class ModelParallel:
    """Consequences of tensor and expert parallelism for sharding.

    Attributes:
        partial: names of parameters that every tensor rank holds, and of whose gradient each computes a part.
        experts: modules whose parameters are spread over experts' ranks.
    """

    partial: tuple[str, ...] = ()
    experts: tuple[nn.Module, ...] = ()


def apply_model_parallel(
    model: nn.Module, tensor_plan: Plan, expert_plan: Plan, ranks: Ranks, heads: Heads | None
) -> ModelParallel:
    """Apply tensor and expert parallelism to a model in place, as far as the layout has these axes.

    Args:
        model: on the meta device.
        tensor_plan: how tensor ranks share it.
        expert_plan: which of its modules hold experts.
        ranks: of the run.
        heads: of its attention; None for a model without.

    Raises:
        ParallelError: the model has no plan for an axis of the layout.
    """
    layout = ranks.layout
    partial: list[str] = []
    if layout.tensor > 1:
        partial = parallelise(model, without_experts(tensor_plan), ranks.tensor_mesh, heads)
        _own_outputs_of_shared_experts(model)
    if layout.expert == 1:
        return ModelParallel(tuple(partial))
    experts, adapters = _spread_experts(model, expert_plan, ranks)
    return ModelParallel((*partial, *adapters), tuple(experts))


def check_experts(model: nn.Module, plan: Plan, number: int) -> list[str]:
    """The names of the modules with experts that so many ranks can share.

    Raises:
        ParallelError: there are none, or the ranks do not divide their experts.
    """
    names = [name for name, style in expanded(model, plan) if style == DISPATCHED]
    if not names:
        raise ParallelError(
            f"{type(model).__name__} declares no experts that could be spread over ranks",
            where=WHERE,
            remedy=f"set {WHERE}: 1",
        )
    experts = next(model.get_submodule(names[0]).parameters()).shape[0]
    if experts % number:
        nearest = max(size for size in range(1, number) if experts % size == 0)
        raise ParallelError(
            f"{WHERE}: {number} ranks cannot share {experts} experts evenly", where=WHERE, remedy=f"set it to {nearest}"
        )
    return names


def _spread_experts(model: nn.Module, plan: Mapping[str, str], ranks: Ranks) -> tuple[list[nn.Module], list[str]]:
    """Distribute whole experts over ranks; transformers' layers route tokens to them and back.

    Returns:
        The modules that have experts, and the names of the parameters of their adapters.
    """
    assert ranks.expert_mesh is not None
    named = expanded(model, plan)
    names = check_experts(model, plan, ranks.layout.expert)
    experts = [model.get_submodule(name) for name in names]
    mesh = ranks.expert_mesh["expert"]
    adapters = [parameter for name in names for parameter in spread_adapters(model, name, mesh)]
    apply_expert_parallelism(model, mesh, ranks.tensor_mesh, dict(named))
    for module in experts if ranks.layout.tensor > 1 else ():
        _own_output(module)
    return experts, adapters


def _own_outputs_of_shared_experts(model: nn.Module) -> None:
    """Those to which a layer adds what its other experts return, in place (Llama 4); with a gate, none does."""
    for module in model.modules():
        parts = dict(module.named_children())
        if "experts" in parts and "shared_expert" in parts and "shared_expert_gate" not in parts:
            _own_output(parts["shared_expert"])


def _own_output(module: nn.Module) -> None:
    """Return a copy instead of a view: in-place changes of a view would lose FSDP's hooks."""
    forward = module.forward

    def owning(*args: torch.Tensor) -> torch.Tensor:
        return forward(*args).clone()

    module.forward = owning
