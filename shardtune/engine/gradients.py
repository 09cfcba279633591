"""Gradients of a user's own backward calls and optimizers: counted by each rank's share, and the same on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardtune.parallel.fsdp2 import Weights
from shardtune.parallel.ranks import Ranks

Roots = torch.Tensor | GradientEdge | Sequence[torch.Tensor] | Sequence[GradientEdge]
Grads = torch.Tensor | Sequence[torch.Tensor | None] | None


class Gradients:
    """What a module's gradients need beside FSDP.

    Args:
        weights: of the module, whose gradients are summed over ranks.
        ranks: of the engine.
        partial: names of parameters of whose gradient each tensor rank computes a part.

    Attributes:
        passed: whether there was a backward pass since `counted` was entered.
    """

    def __init__(self, weights: Weights, ranks: Ranks, partial: Sequence[str]) -> None:
        self._weights = weights
        self.passed = False
        self._apart = [
            parameter
            for name, parameter in weights.parameters.items()
            if ranks.mesh is not None and (name in partial or not isinstance(parameter, DTensor))
        ]

    @contextmanager
    def counted(self, share: float) -> Iterator[None]:
        """Inside, every backward pass of this thread counts by `share`, and its gradients are whole when it is done."""
        plain, thread = torch.autograd.backward, threading.get_ident()
        inside, self.passed = False, False

        def backward(tensors: Roots, grad_tensors: Grads = None, *args: Any, **kwargs: Any) -> None:
            nonlocal inside
            if inside or threading.get_ident() != thread:  # activation checkpointing calls it in a backward pass
                plain(tensors, grad_tensors, *args, **kwargs)
                return
            inside = self.passed = True
            try:
                scaled = grad_tensors if share == 1.0 else _scaled(tensors, grad_tensors, share)
                with self._settled():
                    plain(tensors, scaled, *args, **kwargs)
            finally:
                inside = False

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = plain

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Sum what ranks hold of gradients outside of FSDP, those of this pass alone: earlier ones are summed."""
        held = [parameter.grad for parameter in self._apart]
        for parameter in self._apart:
            parameter.grad = None
        yield
        self._weights.sync_replicated_gradients()
        for parameter, before in zip(self._apart, held, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, the steps of optimizers over the module's parameters reach its next forward."""
        own = {id(parameter) for parameter in self._weights.parameters.values()}

        def concerns(optimizer: torch.optim.Optimizer) -> bool:
            return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

        def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if concerns(optimizer):
                self._weights.stepping = True
                for group in optimizer.param_groups:
                    one_by_one_if_mixed(group)

        def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if concerns(optimizer):
                self._weights.stepping = False
                self._weights.copy_masters_to_model()

        handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        try:
            yield
        finally:
            self._weights.stepping = False  # an optimizer that raises runs no hook
            for handle in handles:
                handle.remove()


def one_by_one_if_mixed(group: dict[str, Any]) -> None:
    """torch's operations on many tensors at once do not take tensors that are sharded in several ways."""
    kinds = {_mesh(parameter) for parameter in group["params"]}
    if len(kinds) > 1 and group.get("foreach", False) is None and not group.get("fused"):
        group["foreach"] = False


def _mesh(parameter: nn.Parameter) -> DeviceMesh | None:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def _scaled(tensors: Roots, grads: Grads, share: float) -> Grads:
    """The gradients to begin with, times the share."""
    several = isinstance(tensors, Sequence)
    roots = list(tensors) if several else [tensors]
    given = [None] * len(roots) if grads is None else list(grads) if isinstance(grads, Sequence) else [grads]
    made = []
    for root, grad in zip(roots, given, strict=True):
        if grad is None and isinstance(root, torch.Tensor) and root.numel() == 1:
            grad = torch.ones_like(root)
        made.append(grad * share if grad is not None else None)
    return made if several else made[0]
