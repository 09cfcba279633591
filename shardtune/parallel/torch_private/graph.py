"""Autograd's graph: what a tensor was computed from, and passes through it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction


def went_through_units(roots: Iterable[torch.Tensor | GradientEdge]) -> bool:
    """Whether tensors have been computed by sharded units, whose weights are freed after a backward pass.

    FSDP2 puts a node of its own before each unit that a gradient comes back through. FSDP1 has none; what it has joined
    is found where its gradient is accumulated, so not if all of a unit is frozen.
    """
    waiting = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    seen: set[object] = set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, RegisterPostBackwardFunction._backward_cls):
            return True
        if node.name() == ACCUMULATES and isinstance(node.variable, FlatParameter):
            return True
        waiting += [before for before, _ in node.next_functions]
    return False


def own_leaves(roots: Iterable[torch.Tensor | GradientEdge]) -> list[torch.Tensor]:
    """The leaves from which tensors were computed, and that are no parameters."""
    waiting = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    seen: set[object] = set()
    found = []
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == ACCUMULATES and not isinstance(node.variable, nn.Parameter):
            found.append(node.variable)
        waiting += [before for before, _ in node.next_functions]
    return found


def unreached(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Those of some leaves that no output was computed from, since the inputs."""
    seen: set[object] = {tensor.grad_fn for tensor in inputs}
    waiting = [tensor.grad_fn for tensor in outputs]
    left = {id(leaf): leaf for leaf in leaves}
    while waiting and left:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == ACCUMULATES:
            left.pop(id(node.variable), None)
        waiting += [before for before, _ in node.next_functions]
    return [*left.values()]


ACCUMULATES = "torch::autograd::AccumulateGrad"
"""The name of the node at a leaf of autograd's graph."""


def backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[torch.Tensor] | None = None,
) -> None:
    """`Tensor.backward`, but the function modes that are active here are active in it.

    What modes handle runs without them, and `Tensor.backward` is handled: so checkpointed layers would run the first
    time with modes, and the second time without.
    """
    gradient = torch.ones_like(tensor) if gradient is None else gradient
    keep = create_graph if retain_graph is None else retain_graph
    _engine_run_backward(
        (tensor,), (gradient,), keep, create_graph, tuple(inputs or ()), allow_unreachable=True, accumulate_grad=True
    )


def current_node() -> object:
    """The node of its graph that autograd computes now; None outside of a backward pass, and in what ends one."""
    return torch._C._current_autograd_node()


def number_of_pass() -> int:
    """Of the backward pass that runs, counted by autograd; -1 outside of one."""
    return torch._C._current_graph_task_id()


def graph_is_retained() -> bool:
    """Whether the backward pass that runs keeps its graph for another one."""
    private: Any = torch._C
    return private._autograd._get_current_graph_task_keep_graph()


def accumulates() -> bool:
    """Whether the backward pass that runs gives leaves gradients, which that of `torch.autograd.grad` does not."""
    node: Any = current_node()
    while node.name() != ACCUMULATES:
        node = next(before for before, _ in node.next_functions if before is not None)
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient is returned
        return False


def in_transform() -> bool:
    """Whether a transform of `torch.func` runs, in which tensors do not show whether they have gradients."""
    return torch._C._are_functorch_transforms_active()


def in_differentiation() -> bool:
    """Whether a transform of `torch.func` that differentiates runs (`grad`, `jvp`), as `vmap` alone does not."""
    kinds = (TransformType.Grad, TransformType.Jvp)
    return in_transform() and any(each.key() in kinds for each in get_interpreter_stack() or ())


def outside_transforms() -> AbstractContextManager[object]:
    """Inside, operations on plain tensors give plain ones, whatever transforms of `torch.func` run."""
    return temporarily_clear_interpreter_stack() if in_transform() else nullcontext()
