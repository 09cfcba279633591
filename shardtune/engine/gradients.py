"""Gradients of a user's own backward calls and optimizers: counted by each rank's share, and the same on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from shardtune.engine.whole_steps import WholeSteps
from shardtune.errors import ModelError
from shardtune.parallel.buffers import fingerprint_of
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.torch_private.graph import own_leaves, went_through_units
from shardtune.parallel.torch_private.operations import tree_iter
from shardtune.parallel.user_scaler import unscaling_on_all_ranks
from shardtune.parallel.weights import Weights

Roots = torch.Tensor | GradientEdge | Sequence[torch.Tensor] | Sequence[GradientEdge]
Grads = torch.Tensor | Sequence[torch.Tensor | None] | None
Inputs = torch.Tensor | Sequence[torch.Tensor]


class Gradients:
    """What a module's gradients need beside FSDP.

    Args:
        weights: of the module, whose gradients are summed over ranks.
        ranks: of the engine.
        partial: names of parameters of whose gradient each tensor rank computes a part.
        reach: is called before each backward pass and each step of an optimizer, at which ranks may leave a call.

    Attributes:
        passed: whether there was a backward pass since `counted` was entered.
    """

    def __init__(self, weights: Weights, ranks: Ranks, partial: Sequence[str], reach: Callable[[], None]) -> None:
        self._weights = weights
        self._ranks = ranks
        self._partial = partial
        self._reach = reach
        self.passed = False
        self._shared: Sequence[torch.Tensor] = ()
        self._after_pass: dict[int, torch.Tensor] = {}
        self._counted: list[torch.Tensor] = []

    @contextmanager
    def counted(self, share: float, shared: Sequence[object] | None) -> Iterator[None]:
        """Inside, every backward pass of this thread counts by `share`, and its gradients are whole when it is done.

        Args:
            share: of this rank in the call's loss.
            shared: the arguments that all ranks have whole, where others are divided; else None.
        """
        plain, thread = torch.autograd.backward, threading.get_ident()
        inside, self.passed = False, False
        self._after_pass.clear()
        self._shared = [leaf for leaf in tree_iter(shared or ()) if isinstance(leaf, torch.Tensor)]

        def backward(
            tensors: Roots,
            grad_tensors: Grads = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            grad_variables: Grads = None,
            inputs: Inputs | None = None,
        ) -> None:
            nonlocal inside
            if inside or threading.get_ident() != thread:  # activation checkpointing calls it in a backward pass
                plain(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
                return
            if create_graph:
                self._check_first_order(tensors, "backward(create_graph=True)")
            self._reach()
            inside = self.passed = True
            try:
                scaled = grad_tensors if share == 1.0 else self._scaled(tensors, grad_tensors, share)
                alone = 1.0 if shared is not None else share
                counted = own_leaves(_listed(tensors)) if share != alone else []
                with self._for_inputs(inputs) as others, self._settled(), self._own_gradients(tensors, alone):
                    plain(tensors, scaled, retain_graph, create_graph, grad_variables, others)
                self._counted += counted
            finally:
                inside = False

        torch.autograd.backward = backward
        try:
            with (
                unscaling_on_all_ranks(self._ranks),
                _GradCalls(self._gradients_of) if self._ranks.mesh is not None else nullcontext(),
            ):
                yield
        finally:
            torch.autograd.backward = plain
            self._counted.clear()

    def _scaled(self, tensors: Roots, grads: Grads, share: float) -> Grads:
        """The gradients to begin with, times the share, which those have that an earlier pass has left at a leaf.

        Worked example: `hidden.backward(leaf.grad)`, after `leaf = hidden.detach().requires_grad_()` and a pass to it.
        """
        several = isinstance(tensors, Sequence)
        roots = list(tensors) if several else [tensors]
        given = [None] * len(roots) if grads is None else list(grads) if isinstance(grads, Sequence) else [grads]
        counted = {_place(leaf.grad) for leaf in self._counted} - {None}
        made: list[torch.Tensor | None] = []
        for root, grad in zip(roots, given, strict=True):
            if grad is None and isinstance(root, torch.Tensor) and root.numel() == 1:
                grad = torch.ones_like(root)
            elif grad is not None and _place(grad) in counted:
                made.append(grad)
                continue
            made.append(grad * share if grad is not None else None)
        return made if several else made[0]

    @contextmanager
    def _own_gradients(self, roots: Roots, share: float) -> Iterator[None]:
        """Let a pass give those leaves that are no parameters the gradient of this rank's loss, not times a share.

        Where a call divides nothing, the loss of each rank is that of one process, and nothing sums these gradients.
        """
        leaves = own_leaves(_listed(roots)) if share != 1.0 else []
        held = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        yield
        for leaf, before in zip(leaves, held, strict=True):
            if leaf.grad is not None:
                leaf.grad = leaf.grad / share
            if before is not None:
                leaf.grad = before if leaf.grad is None else before + leaf.grad
        self._after_pass |= {id(leaf): fingerprint_of(grad) for leaf, grad in self._gradients_of_shared()}

    def _gradients_of_shared(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(leaf, leaf.grad) for leaf in self._shared if leaf.is_leaf and leaf.grad is not None]

    def unsummed(self) -> list[torch.Tensor]:
        """The shared arguments with a gradient that is as backward passes of the call have left it."""
        found = [(leaf, grad, self._after_pass.get(id(leaf))) for leaf, grad in self._gradients_of_shared()]
        return [leaf for leaf, grad, after in found if after is not None and torch.equal(after, fingerprint_of(grad))]

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Sum what ranks hold of gradients outside of FSDP, those of this pass alone: earlier ones are summed.

        A parameter that was frozen after its forward keeps the gradient that it had: FSDP computes it all the same.
        """
        frozen = [(p, _copied(p.grad)) for p in self._weights.parameters.values() if not p.requires_grad]
        for parameter, _ in frozen:
            parameter.grad = None
        apart = [
            parameter
            for name, parameter in self._weights.parameters.items()
            if self._ranks.mesh is not None and (name in self._partial or not isinstance(parameter, DTensor))
        ]
        held = [parameter.grad for parameter in apart]
        for parameter in apart:
            parameter.grad = None
        self._weights.begin_backward()
        if self._ranks.mesh is not None:
            self._weights.unit_calls.begin_pass()
        try:
            yield
        except RuntimeError as error:
            if self._ranks.mesh is not None and any(sign in str(error) for sign in _FREED):
                raise _freed(self._ranks.layout.flat) from error
            raise
        if self._ranks.mesh is not None:
            self._weights.unit_calls.end_pass()
        self._weights.sync_replicated_gradients()
        self._weights.watch_buffers()
        for parameter, before in zip(apart, held, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)
        for parameter, before in frozen:
            parameter.grad = before

    @contextmanager
    def _for_inputs(self, inputs: Inputs | None) -> Iterator[Inputs | None]:
        """Inside, a backward pass for some tensors; gives autograd's argument for it.

        Autograd does not know this rank's part of a parameter, of which the graph holds the whole. So where parameters
        are among the tensors, the pass runs for all of them, and the others get their gradients back.
        """
        own = {id(parameter): parameter for parameter in self._weights.parameters.values()}
        wanted = {id(tensor) for tensor in _listed(inputs)}
        if self._ranks.mesh is None or not own.keys() & wanted:
            yield inputs
            return
        others = [parameter for key, parameter in own.items() if key not in wanted]
        held = [(parameter, parameter.grad) for parameter in others]
        for parameter in others:
            parameter.grad = None
        yield None
        for parameter, grad in held:
            parameter.grad = grad

    def _gradients_of(
        self,
        outputs: Roots,
        inputs: Inputs,
        grad_outputs: Grads = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        """torch's `grad`, by a backward pass where parameters are among the inputs: gathered, counted and summed."""
        wanted = _listed(inputs)
        own = {id(parameter) for parameter in self._weights.parameters.values()}
        if gathered := self._weights.gathered(wanted):
            raise ModelError(
                f"{gathered[0]} is gathered between a forward and its backward pass, and self.parameters() gives the "
                "gathered ones there, which no optimizer has",
                where="torch.autograd.grad(…)",
                remedy="take the list before the forward: parameters = list(self.parameters())",
            )
        if not any(id(tensor) in own for tensor in wanted):
            if create_graph:
                self._check_first_order(outputs, "torch.autograd.grad(…, create_graph=True)")
            with self._weights.unit_calls.for_inputs():
                return torch.autograd.grad(
                    outputs, inputs, grad_outputs, retain_graph, create_graph, only_inputs, allow_unused,
                    is_grads_batched, materialize_grads,
                )  # fmt: skip
        if create_graph or is_grads_batched or not all(id(tensor) in own for tensor in wanted):
            raise ModelError(
                "gradients of the module's parameters are summed over ranks, outside of the graph: there are no "
                "gradients of them, none of a batch of outputs, and none together with those of other tensors",
                where="torch.autograd.grad(…)",
                remedy="leave out create_graph and is_grads_batched, and take gradients of parameters in a call of "
                "their own, with retain_graph=True in the first",
            )
        held = [(tensor, tensor.grad) for tensor in wanted]
        for tensor in wanted:
            tensor.grad = None
        try:
            torch.autograd.backward(outputs, grad_outputs, retain_graph=retain_graph, inputs=wanted)
            found = tuple(tensor.grad for tensor in wanted)
        finally:
            for tensor, grad in held:
                tensor.grad = grad
        if not (allow_unused or materialize_grads) and any(grad is None for grad in found):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
                "if this is the desired behavior."
            )
        if materialize_grads:
            return tuple(torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True))
        return found

    def _check_first_order(self, outputs: Roots, where: str) -> None:
        """Refuse a graph of gradients that would need the weights of units a second time, when FSDP1 has freed them."""
        if self._ranks.layout.flat and went_through_units(_listed(outputs)):
            raise ModelError(
                "gradients of gradients need the module's weights in a second backward pass, and fsdp1 frees them "
                "in the first",
                where=where,
                remedy='compute such a penalty with executor="fsdp2" or "ddp", or from differences of two forwards',
            )

    def discard(self) -> None:
        """Forget all gradients, if there was a backward pass: what they hold is neither old nor new."""
        self._weights.unit_calls.clear()
        for parameter in self._weights.parameters.values() if self.passed else ():
            parameter.grad = None

    def _refuse_whole_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step with a gradient that a method has put there as a whole, where ranks have parts of the weight.

        Raises:
            ModelError: one is.
        """
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self._weights.parameters.items():
            if id(parameter) not in stepped or not isinstance(parameter, DTensor):
                continue
            if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
                raise ModelError(
                    f"{name}.grad is a whole tensor that the method has set, and ranks have parts of the weight",
                    where="optimizer.step()",
                    remedy="compute gradients parameter by parameter from those that there are, without joining them "
                    "(torch.cat, parameters_to_vector): parameter.grad = one + two; the dot product of all is "
                    'sum((a * b).sum() for a, b in zip(ones, twos)); or use executor="ddp"',
                )

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, the steps of optimizers over the module's parameters reach its next forward."""
        own = {id(parameter) for parameter in self._weights.parameters.values()}
        whole = WholeSteps()

        def concerns(optimizer: torch.optim.Optimizer) -> bool:
            return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

        def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if concerns(optimizer):
                self._reach()
                self._refuse_whole_gradients(optimizer)
                self._weights.begin_update()
                self._weights.whole.stepping = True
                for group in optimizer.param_groups:
                    one_by_one_if_mixed(group)
                whole.before(optimizer)
                if isinstance(optimizer, torch.optim.LBFGS) and self._ranks.mesh is not None:
                    agreed = [_agreed_loss(self._ranks, value) for value in (*args[1:], *kwargs.values())]
                    return (args[0], *agreed), {}
            return None

        def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if concerns(optimizer):
                whole.after()
                self._weights.whole.stepping = False
                self._weights.copy_masters_to_model()
                self._weights.note_states([optimizer])

        handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        try:
            yield
        finally:
            whole.after()
            self._weights.whole.stepping = False  # an optimizer that raises runs no hook
            for handle in handles:
                handle.remove()


class _GradCalls(TorchFunctionMode):
    """Inside, another function computes what `torch.autograd.grad` does, by whichever name a user has imported it."""

    def __init__(self, instead: Callable[..., tuple[torch.Tensor | None, ...]]) -> None:
        super().__init__()
        self._instead = instead

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        return (self._instead if func is torch.autograd.grad else func)(*args, **(kwargs or {}))


def _agreed_loss(ranks: Ranks, closure: Callable[[], torch.Tensor | float]) -> Callable[[], torch.Tensor | float]:
    """The closure of an optimizer that steps by its loss, which has to be the same on all ranks."""

    def agreed() -> torch.Tensor | float:
        loss = closure()
        found = ranks.gather(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))
        if len({repr(each) for each in found}) > 1:
            raise ModelError(
                f"the closure gives LBFGS another loss on each rank ({min(found):g} to {max(found):g}), by which each "
                "would take other steps",
                where="optimizer.step(closure)",
                remedy="return the loss of all ranks' samples: loss = self.mean_over_ranks(total, weight)",
            )
        return loss

    return agreed


_FREED = ("storage of size 0", "its data is not allocated yet")
"""Of torch's errors in a backward pass through a forward whose weights are not gathered."""


def _freed(flat: bool) -> ModelError:
    return ModelError(
        "a backward pass needs weights that have been freed: it is the second through one forward, or comes to what "
        "was kept inside of one and not returned",
        where="backward()",
        remedy="add up the losses and call backward() once; of what was kept in a forward (by a hook, in "
        "past_key_values) let the loss also use what that forward returns: loss + 0 * output.sum()"
        + ('; or use executor="fsdp2", which keeps them for a pass with retain_graph=True' if flat else ""),
    )


def _copied(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()  # FSDP1 adds to the memory of them all


def _listed(tensors: Any) -> list[Any]:
    if tensors is None:
        return []
    return [tensors] if isinstance(tensors, torch.Tensor | GradientEdge) else list(tensors)


def one_by_one_if_mixed(group: dict[str, Any]) -> None:
    """torch's operations on many tensors at once do not take tensors that are sharded in several ways."""
    kinds = {_mesh(parameter) for parameter in group["params"]}
    if len(kinds) > 1 and group.get("foreach", False) is None and not group.get("fused"):
        group["foreach"] = False


def _place(tensor: torch.Tensor | None) -> int | None:
    """The place of a plain tensor's values in memory; None: it has none of its own."""
    if tensor is None or isinstance(tensor, DTensor) or tensor.layout != torch.strided or tensor.is_meta:
        return None
    return tensor.untyped_storage().data_ptr() or None


def _mesh(parameter: nn.Parameter) -> DeviceMesh | None:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None
