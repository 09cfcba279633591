"""Sharding with FSDP2, and the full-precision weights that are optimised and saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from shardtune.parallel.mesh import Ranks

MASTER_DTYPE = {"bf16": torch.float32, "fp16": torch.float32, "fp32": torch.float32, "fp64": torch.float64}
COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def shard(
    root: nn.Module,
    units: Sequence[nn.Module],
    ranks: Ranks,
    precision: str,
    *,
    reshard_after_forward: bool = True,
    entry_points: Sequence[str] = (),
) -> None:
    """Shard `root` in place over all ranks with FSDP2; a single process keeps the plain module.

    Gradients are summed over ranks, not averaged: losses are divided by the step's weight beforehand. FSDP2 averages
    unless told otherwise on every one of its modules (on the root alone it is silently wrong), and gloo can only sum.

    Args:
        root: the module that is called, on the meta device.
        units: modules that are gathered and freed as one; one inside another is gathered by itself.
        ranks: all of them share the shards.
        precision: bf16 | fp16 | fp32 | fp64.
        reshard_after_forward: False keeps a unit's weights between forward and backward.
        entry_points: names of further methods of `root` that use its weights.
    """
    if ranks.mesh is None:
        return
    compute = COMPUTE_DTYPE[precision]
    policy = MixedPrecisionPolicy(
        param_dtype=compute if compute != MASTER_DTYPE[precision] else None, reduce_dtype=MASTER_DTYPE[precision]
    )
    innermost_first = [module for module in reversed(list(root.modules())) if module in set(units)]
    for unit in innermost_first:
        fully_shard(unit, mesh=ranks.mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(root, mesh=ranks.mesh, mp_policy=policy, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for name in entry_points:
        register_fsdp_forward_method(root, name)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Weights:
    """A model's weights in full precision: what the optimizer moves, what checkpoints and exports hold.

    With FSDP2, or when the model computes in full precision, they are the model's own parameters. A single process
    that computes in half precision keeps them beside the model, with FSDP2's arithmetic: half-precision weights and
    gradients, gradients summed over micro-batches and applied in fp32.

    Args:
        root: the module that is called.
        model: the model inside it, whose names are used.
        precision: bf16 | fp16 | fp32 | fp64.
        ranks: of the run.
        reduce_each: reduce gradients over ranks after each micro-batch (less memory) and not only after the last.
    """

    def __init__(
        self, root: nn.Module, model: nn.Module, precision: str, ranks: Ranks, *, reduce_each: bool = False
    ) -> None:
        self._root = root
        self._ranks = ranks
        self._reduce_each = reduce_each
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name in _persistent_names(model)}
        compute, master = COMPUTE_DTYPE[precision], MASTER_DTYPE[precision]
        self._computed = dict(model.named_parameters())
        self.parameters: dict[str, nn.Parameter] = self._computed
        self._apart = ranks.mesh is None and compute != master
        self._hooks: list[RemovableHandle] = []
        if self._apart:
            kept = {name: _keep_master(parameter, compute) for name, parameter in self._computed.items()}
            self.parameters = {name: master for name, (master, _) in kept.items()}
            self._hooks = [hook for _, hook in kept.values() if hook is not None]

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by name: what a checkpoint of the model holds."""
        return {**self.parameters, **self._buffers}

    def begin_micro_batch(self, last: bool) -> None:
        """Say, before its forward, whether a micro-batch is the step's last, after which gradients are reduced."""
        if isinstance(self._root, FSDPModule):
            self._root.set_requires_gradient_sync(last or self._reduce_each)

    @torch.no_grad()
    def publish(self) -> None:
        """Hand changed weights to the model; to be called after each change of `parameters`.

        After a forward without a backward (the probe, an evaluation) FSDP2 keeps the root's weights gathered, and the
        next forward would take those instead of the changed ones.
        """
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        if self._apart:
            for name, parameter in self.parameters.items():
                self._computed[name].copy_(parameter)

    def give_back(self) -> None:
        """Leave the model with its weights in full precision, and nothing of this object attached to it."""
        for hook in self._hooks:
            hook.remove()
        if self._apart:
            for name, parameter in self.parameters.items():
                self._computed[name].data = parameter.data
        self.zero_gradients()

    def gradients(self) -> Iterator[torch.Tensor]:
        """This rank's part of each gradient."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                yield local(parameter.grad)

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """The Euclidean norm of the whole gradient over all ranks, summed in fp64."""
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in self.gradients() if grad.numel()]
        square = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        if norms:
            square = torch.stack(norms).square().sum()
        if self._ranks.mesh is not None:
            dist.all_reduce(square)
        return float(square.sqrt())

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        grads = list(self.gradients())
        if factor != 1.0 and grads:
            torch._foreach_mul_(grads, factor)

    def zero_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


def _persistent_names(model: nn.Module) -> set[str]:
    """The names of the buffers that belong to the state dict."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }


def _keep_master(parameter: nn.Parameter, compute: torch.dtype) -> tuple[nn.Parameter, RemovableHandle | None]:
    """Turn a parameter to half precision in place; returns its full-precision master and the hook that feeds it."""
    master = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    parameter.data = parameter.data.to(compute)

    def take_gradient(computed: torch.Tensor) -> None:
        assert computed.grad is not None
        grad = computed.grad.to(master.dtype)
        master.grad = grad if master.grad is None else master.grad.add_(grad)
        computed.grad = None

    hook = parameter.register_post_accumulate_grad_hook(take_gradient) if parameter.requires_grad else None
    return master, hook
