"""Weights of a sharded model in operations outside of its modules: `hidden @ self.head.weight.T` in a method.

Such an operation gets a part of the weight on each rank. While one of the modes here is active, it gets the whole one,
and its gradient is summed over ranks. All ranks have to run the same operations. What changes weights in place (an
average of them, an optimizer) works on parts as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import GenerationMixin

from shardtune.errors import ModelError
from shardtune.parallel.meta_init import shard_of
from shardtune.parallel.operation import GET_GRAD, Operation, operands
from shardtune.parallel.torch_private.fsdp2 import (
    count_parameters,
    gather_before_backward,
    gathered_now,
    gathered_parameters,
    is_at_rest,
)
from shardtune.parallel.torch_private.operations import tree_map, tree_map_only
from shardtune.parallel.torch_private.tensors import base_of, local_part, storage_identity, without_transforms

FOREIGN = ("torch", "transformers", "peft", "shardtune")
"""Packages whose classes have methods of their own beside a user's."""


class _Widened(torch.autograd.Function):
    """A weight in half precision as one in fp32, so that its gradient is summed over ranks and kept in fp32."""

    @staticmethod
    def forward(weight: torch.Tensor) -> torch.Tensor:
        return weight.float()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        """Nothing is needed backwards."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


class ShardedOperands(TorchFunctionMode):
    """With FSDP2: operations outside of the forward get whole weights beside plain tensors and where gradients count.

    The root's weights stay gathered between its forward and its backward pass, and its modules have the gathered ones
    meanwhile. Operations compute with these, and what changes a weight changes this rank's part of it.

    Args:
        root: the sharded module.
        compute: the dtype of the computation.
        compare: is called before weights are gathered.
        used: gets the `id` of each weight that has a gradient from an operation here, in the backward pass.
        units: sharded modules in the root whose weights are DTensors also while they are gathered, for tensor ranks.
    """

    def __init__(
        self,
        root: FSDPModule,
        compute: torch.dtype,
        compare: Callable[[str], None],
        used: Callable[[int], object],
        units: Sequence[FSDPModule] = (),
    ) -> None:
        super().__init__()
        self._root = root
        self._compute = compute
        self._compare = compare
        self._used = used
        self._is_open = gathered_now([root, *units])
        self._views: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._weights: dict[int, tuple[torch.Tensor, DTensor]] = {}
        self._memory: set[int] = set()
        self._complete = False

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if self._is_open():
            return func(*args, **given)
        operation = Operation.of(func)
        sharded, plain = _kinds(operands(args, given))
        # Gradients are of what has been computed, whose weights these were.
        if plain and not operation.is_derivative and self._are_gathered(plain) and is_at_rest(self._root):
            return self._on_gathered(operation, args, given)
        if not sharded and not (self._views and operation.changes):
            return func(*args, **given)
        return self._on_parts(operation, args, given, sharded, plain)

    def _on_parts(
        self,
        operation: Operation,
        args: tuple[Any, ...],
        given: Mapping[str, Any],
        sharded: Sequence[DTensor],
        plain: Sequence[torch.Tensor],
    ) -> Any:
        """An operation whose weights are parts: on these where it can be, otherwise on the whole ones."""
        if operation.changes and any(map(self._is_lost, operands(args[:1], {}))):
            raise lost_view(operation.name)
        if not sharded:
            return operation.call(*args, **given)
        if operation.sets_data and isinstance(args[0], DTensor):
            if not same_memory(args[0], args[1]):
                raise other_data()
            return None  # parameter.data -= …, which has changed it in place
        if operation.draws and isinstance(filled := _filled(args, given), DTensor):
            return self._drawn(operation, filled, args, given)
        if operation.keeps_parts or operation.call == GET_GRAD:
            try:
                return operation.call(*args, **given)
            except RuntimeError as error:
                if operation.changes and "mixed torch.Tensor and DTensor" in str(error):
                    raise beside_whole(operation.name) from error
                if operation.changes and "placement" in str(error):
                    raise not_in_parts(operation.name) from error
                raise
        if all(not tensor.ndim and not tensor.requires_grad for tensor in plain):  # numbers
            with suppress(RuntimeError):  # an operation that DTensors do not have
                result = operation.call(*args, **given)
                # The gradient of a DTensor may be laid out otherwise than the weight, to which FSDP2 adds its own.
                if not any(isinstance(tensor, DTensor) and tensor.requires_grad for tensor in operands((result,), {})):
                    return result
        self._compare(operation.name)
        parts = {_memory(tensor) for tensor in sharded}
        args, given = tree_map_only(DTensor, self._whole, (args, dict(given)))
        copies = {_memory(tensor) for tensor in operands(args, given)} - parts
        result = operation.call(*args, **given)
        for each in operands((result,), {}):
            if _memory(each) in copies and base_of(each) is not None:
                self._views[each] = True
        return result

    def _drawn(self, operation: Operation, weight: DTensor, args: tuple[Any, ...], given: Mapping[str, Any]) -> object:
        """A weight filled with random numbers: on CPUs this rank's part of what the first rank draws for all of it.

        There torch draws each part from the beginning of the same stream, so that parts repeat one another.
        """
        if weight.device.type != "cpu" or (weight.requires_grad and torch.is_grad_enabled() and not operation.is_init):
            return operation.call(*args, **given)
        self._compare(operation.name)
        whole = torch.empty(weight.shape, dtype=weight.dtype)
        placed, named = tree_map(lambda value: whole if value is weight else value, (args, dict(given)))
        operation.call(*placed, **named)
        dist.broadcast(whole, 0)
        shard = shard_of(weight)
        shard.local.copy_(shard.of(whole))
        return weight

    def _is_lost(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of a copy of a weight, which a change of the weight itself would need to reach."""
        base = base_of(tensor)
        if base is None or tensor in self._views or base in self._views:
            return base is not None
        return isinstance(tensor, DTensor) and isinstance(base, DTensor) and _memory(tensor) != _memory(base)

    def _are_gathered(self, plain: Sequence[torch.Tensor]) -> bool:
        """Whether the root's gathered weights, or views of them, are among the operands."""
        if not self._complete:  # weights that have been gathered once keep their tensors, and these their memory
            self._weights = gathered_parameters(self._root)
            self._memory = {_memory(whole) for whole, _ in self._weights.values()}
            self._complete = len(self._weights) == count_parameters(self._root)
        return not self._memory.isdisjoint(_memories(plain))

    def _on_gathered(self, operation: Operation, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        weights = self._weights
        used = [weights[id(tensor)][0] for tensor in operands(args, given) if id(tensor) in weights]
        changes = operation.keeps_parts or operation.is_read
        if used and (changes or any(not whole.untyped_storage().nbytes() for whole in used)):
            if changes and operation.name not in ("__get__", "__set__", "detach", "requires_grad_"):
                self._root.reshard()  # the next forward or backward pass gathers what the weights are then
            parts = {id(whole): weights[id(whole)][1] for whole in used}
            args, given = tree_map(lambda value: parts.get(id(value), value), (args, dict(given)))
            return self.__torch_function__(operation.call, (), args, given)
        if operation.changes and any(
            id(tensor) not in weights and _memory(tensor) in self._memory for tensor in operands(args[:1], {})
        ):
            raise lost_view(operation.name)
        if any(isinstance(tensor, DTensor) for tensor in operands(args, given)):
            self._compare(operation.name)
            args, given = tree_map_only(DTensor, self._whole, (args, dict(given)))
        result = operation.call(*args, **given)
        computed = [
            tensor for tensor in operands((result,), {}) if tensor.requires_grad and _memory(tensor) not in self._memory
        ]
        if computed:  # a part's backward pass may free them before this one
            gather_before_backward(self._root, computed)
        return result

    def _whole(self, tensor: DTensor) -> torch.Tensor:
        # Ranks that share matrix multiplications compute the same gradient, all others a part of the sum.
        names = tensor.device_mesh.mesh_dim_names or ()
        gradient: list[Placement] = [Replicate() if name == "tensor" else Partial() for name in names]
        is_half = tensor.is_floating_point() and tensor.dtype.itemsize < 4
        part: Any = _Widened.apply(tensor) if is_half and tensor.requires_grad else tensor
        whole = part.full_tensor(grad_placements=gradient)
        if whole.requires_grad:  # FSDP2, which sums gradients of gathered weights, has none of this one
            whole.register_hook(partial(self._note_gradient, id(tensor)))
        return whole.to(self._compute) if whole.is_floating_point() else whole

    def _note_gradient(self, weight: int, _: torch.Tensor) -> None:
        self._used(weight)


def _filled(args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    return args[0] if args else kwargs.get("tensor")


def _part(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor) if isinstance(tensor, DTensor) else tensor


def _memory(tensor: torch.Tensor) -> int:
    (memory,) = _memories([_part(tensor)])
    return memory


def _memories(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The memory of tensors, of which sparse ones and others without strides have none of a weight's."""
    try:
        return [storage_identity(tensor.untyped_storage()) for tensor in tensors]
    except RuntimeError:  # a sparse one, or one in a transform of torch.func
        plain = [without_transforms(tensor) for tensor in tensors]
        return [storage_identity(tensor.untyped_storage()) for tensor in plain if tensor.layout is torch.strided]


def same_memory(weight: object, other: object) -> bool:
    """Whether a tensor is all of what a rank has of a weight: the same numbers at the same place."""
    if not isinstance(weight, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    first, second = ((_memory(t), (part := _part(t)).storage_offset(), part.shape, part.dtype) for t in (weight, other))
    return first == second


def _kinds(tensors: Sequence[torch.Tensor]) -> tuple[list[DTensor], list[torch.Tensor]]:
    """The sharded ones among tensors, and the others."""
    sharded: list[DTensor] = []
    plain: list[torch.Tensor] = []
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            sharded.append(tensor)
        else:
            plain.append(tensor)
    return sharded, plain


def other_data() -> ModelError:
    """Another tensor in the place of what a rank has of a weight: sharding goes on with the one that it was."""
    return ModelError(
        "`parameter.data = …` has no effect on a weight that is sharded: what computes, trains and is saved is the "
        "tensor that was there",
        where="parameter.data",
        remedy="change it in place: parameter.data.copy_(…), mul_, add_, lerp_; and keep copies of weights "
        "(parameter.detach().clone()), as they change, too",
    )


_OPTIMIZER = "use an optimizer that computes entry by entry (Adam, SGD), or torch.optim.Adafactor or Rprop"


def beside_whole(name: str) -> ModelError:
    """A change of a weight in place by a tensor that is no weight: ranks change their parts, and it is whole."""
    return ModelError(
        f"{name} changes this rank's part of a weight, and a tensor beside it is no part of one",
        where=name,
        remedy="give weights their values in materialization_source() or by engine.load(); in place, use numbers, "
        "other weights, and their gradients and states (copy_(other), mul_(0.9), lerp_(other, 0.1)); in an optimizer's "
        f"step, {_OPTIMIZER}",
    )


def not_in_parts(name: str) -> ModelError:
    """A change in place that needs more than what each rank has of a weight or of what was computed from it."""
    return ModelError(
        f"{name} changes in place what ranks have parts of, and needs more than its own part on each",
        where=name,
        remedy="compute entry by entry, without a change by index or mask (weight.copy_(torch.where(mask, new, "
        f"weight)) for weight[mask] = …); in an optimizer's step, {_OPTIMIZER}",
    )


def lost_view(name: str) -> ModelError:
    """A change of a row, slice or other view of a weight, for which a copy has been gathered."""
    return ModelError(
        f"{name} of a row, slice or other view of a weight changes a copy, not the weight: ranks have parts of it, and "
        "the view is of what they have gathered",
        where=name,
        remedy="change the weight itself, as a whole and in place (weight.mul_(…), copy_, add_), for example by a mask "
        "that is computed from it",
    )


def own_methods(model: nn.Module) -> list[str]:
    """The public methods that the classes of a user's model add to those of torch and transformers, and `generate`."""
    found: dict[str, None] = {}
    taken: set[str] = set()
    for kind in type(model).__mro__:
        foreign = kind.__module__.partition(".")[0] in FOREIGN
        for name, value in vars(kind).items():
            if foreign:
                taken.add(name)
            elif not name.startswith("_") and inspect.isfunction(value):
                found[name] = None
    generates = ["generate"] if isinstance(model, GenerationMixin) else []
    return [*(name for name in found if name not in taken), *generates]


def in_methods(
    model: nn.Module, context: Callable[[str], AbstractContextManager[object]], names: Sequence[str]
) -> None:
    """Let methods of a model run in a context, which gets the method's name."""
    for name in names:
        vars(model)[name] = _within(getattr(model, name), context)


def _within(method: Callable[..., Any], context: Callable[[str], AbstractContextManager[object]]) -> Callable[..., Any]:
    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context(method.__name__):
            return method(*args, **kwargs)

    return run
