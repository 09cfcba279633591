"""Weights of FSDP1 in operations outside of its modules: the counterpart of `direct_use`, whose weights are ranges."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardtune.errors import ModelError
from shardtune.parallel.direct_use import (
    beside_whole,
    lost_view,
    other_data,
    same_memory,
)
from shardtune.parallel.fsdp1 import Place, Routed
from shardtune.parallel.operation import DETACH, GET_DATA, TRANSPOSED, Operation, operands, returned
from shardtune.parallel.torch_private.fsdp1 import free_gathered, is_gathered
from shardtune.parallel.torch_private.fsdp2 import in_backward
from shardtune.parallel.torch_private.modules import LOADING
from shardtune.parallel.torch_private.operations import tree_map, tree_map_only
from shardtune.parallel.torch_private.tensors import base_of, storage_identity


class FlatOperands(TorchFunctionMode):
    """Operations outside of the model's modules get whole weights, if they compute tensors; those of optimizers do not.

    `detach()`, `.data` and `.grad` of a weight give this rank's part, which may be changed, copied and computed with
    entry by entry; `zeros_like` and `empty_like` are of the part, too, for states beside it. What would give less than
    the part (a sum, a norm, a slice) is refused, as it would be of the part; so is a sum in an optimizer's step. The
    shape of a weight itself is the whole one's. After a change in place the weights of that unit are gathered anew.

    Args:
        owners: of the parameters, each with its place, what gathers it, and its whole shape.
        root: what gathers the root's; only the root ends a backward pass.
        compare: is called before weights are gathered.
        on_parts: whether operations are those of an optimizer, whose states belong to this rank's part of a weight.
        parts: tensors of earlier calls that are of parts (an average of the weights, say); those of this one are added.
    """

    def __init__(
        self,
        owners: Mapping[nn.Parameter, tuple[Place, Routed, torch.Size]],
        root: Routed,
        compare: Callable[[str], None],
        on_parts: Callable[[], bool],
        parts: WeakIdKeyDictionary,
    ) -> None:
        super().__init__()
        self._owners = {id(parameter): owner for parameter, owner in owners.items()}
        self._root = root
        self._compare = compare
        self._on_parts = on_parts
        self._parts = parts
        self._aliases: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._views: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # The ids of what is in these, as they are slow; some ids are others' by now.
        self._noted = {id(part) for part in parts}
        self._divides = root.through[0].world_size > 1

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = kwargs or {}
        if self._root.is_open or in_backward():  # FSDP1 does with its parameters what it has to
            return func(*args, **given)
        operation = Operation.of(func)
        tensors = operands(args, given)
        used = [tensor for tensor in tensors if id(tensor) in self._owners]
        if used and operation.sets_data:
            if not same_memory(args[0], args[1]):
                raise other_data()
            return None  # parameter.data -= …, which has changed it in place
        if self._on_parts():
            return self._of_optimizer(operation, args, given, tensors)
        if not used and self._noted.isdisjoint(map(id, tensors)) and not (self._views and operation.changes):
            return func(*args, **given)
        if used and len(tensors) == 1 and func in SHAPES and sys._getframe(1).f_code is not LOADING:
            return func(torch.empty(self._owners[id(used[0])][2], device="meta"), *args[1:], **given)
        if used and not (operation.keeps_parts or _is_of_the_part(operation) or _is_first_state(operation, 1)):
            return self._on_whole(operation, args, given, tensors, used)
        return self._on_rank(operation, args, given, tensors, used)

    def _on_whole(
        self,
        operation: Operation,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        tensors: Sequence[torch.Tensor],
        used: Sequence[torch.Tensor],
    ) -> object:
        """An operation with weights among its operands, on whole ones."""
        if any(tensor in self._parts for tensor in tensors):
            raise _of_a_part(operation.name)
        computes = len(used) < len(tensors) or operation.call in TRANSPOSED
        if not computes and operation.name not in READS and _gives_no_tensor(operation.call, args, kwargs):
            return operation.call(*args, **kwargs)
        self._compare(operation.name)
        args, kwargs = tree_map(self._place, (args, dict(kwargs)))

        def computed(*placed: object, **named: object) -> object:
            whole = tree_map(_at, (placed, named))
            if operation.name in READS:  # an array of numpy would keep the memory of what is gathered
                whole = tree_map_only(torch.Tensor, torch.clone, whole)
            return self._without_views(operation.call, *whole)

        call: Callable[..., object] = computed
        for routed in {self._owners[id(parameter)][1] for parameter in used} - {self._root}:
            call = routed.method(call)
        return self._root.method(call)(*args, **kwargs)

    def _on_rank(
        self,
        operation: Operation,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        tensors: Sequence[torch.Tensor],
        used: Sequence[torch.Tensor],
    ) -> object:
        """An operation on what this rank has of weights."""
        if self._divides and operation.draws and (used or tensors[0] in self._aliases):
            raise _drawn(operation.name)
        if self._views and operation.changes and any(map(self._is_lost, operands(args[:1], {}))):
            raise lost_view(operation.name)
        result = self._on_parts_of(operation, args, kwargs, tensors, bool(used))
        self._follow(operation, args, result)
        return result

    def note(self, part: torch.Tensor) -> None:
        """Note a tensor that is of a part."""
        self._note(self._parts, part)

    def _note(self, which: WeakIdKeyDictionary, tensor: torch.Tensor, value: object = True) -> None:
        which[tensor] = value
        self._noted.add(id(tensor))

    def _without_views(self, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The result of an operation on whole weights, copied: a view would go with what is gathered."""
        memory = {storage_identity(tensor.untyped_storage()) for tensor in operands(args, kwargs)}
        result = func(*args, **kwargs)
        views = [storage_identity(each.untyped_storage()) in memory for each in operands((result,), {})]
        copied = tree_map_only(torch.Tensor, torch.clone, result)
        for each, is_view in zip(operands((copied,), {}), views, strict=True):
            if is_view:
                self._note(self._views, each)
        return copied

    def _is_lost(self, tensor: torch.Tensor) -> bool:
        """Whether a change of a tensor would change a weight, if that were not gathered for an operation alone."""
        return tensor in self._views or ((base := base_of(tensor)) is not None and base in self._views)

    def _of_optimizer(
        self, operation: Operation, args: tuple[object, ...], kwargs: Mapping[str, object], used: Sequence[torch.Tensor]
    ) -> object:
        if self._divides and operation.name in SUMS and any(tensor.ndim for tensor in used):
            result = operation.call(*args, **kwargs)
            if any(not each.ndim for each in operands((result,), {})):
                raise _in_an_optimizer(operation.name)
            return result
        return operation.call(*args, **kwargs)

    def _on_parts_of(
        self,
        operation: Operation,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        used: Sequence[torch.Tensor],
        own: bool,
    ) -> object:
        """An operation on what this rank has of weights; refused where it would be of a part alone.

        Args:
            operation, args, kwargs: what is done.
            used: its operands.
            own: whether a weight itself is among them.
        """
        parts = [tensor for tensor in used if tensor in self._parts] if self._divides and self._parts else []
        try:
            result = operation.call(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            if parts:
                raise _of_a_part(operation.name) from error
            if own and self._divides and operation.changes:
                raise beside_whole(operation.name) from error
            raise
        if not parts and not (self._divides and own and (operation.name == "grad" or _is_of_the_part(operation))):
            return result
        if parts and (operation.name in READS or (not operation.keeps_parts and self._gives_less(args, parts, result))):
            raise _of_a_part(operation.name)
        for each in operands((result,), {}):
            self._note(self._parts, each)
        return result

    def _gives_less(self, args: tuple[object, ...], parts: Sequence[torch.Tensor], result: object) -> bool:
        """Whether a result has fewer numbers than the parts that it is computed from; of lists each has its own."""
        listed = args[0] if args and isinstance(args[0], (list, tuple)) else ()
        if isinstance(result, (list, tuple)) and len(result) == len(listed):
            pairs = [pair for pair in zip(listed, result, strict=True) if pair[0] in self._parts]
        else:
            most = max(parts, key=torch.Tensor.numel)
            pairs = [(most, each) for each in operands((result,), {})]
        return any((part.ndim and not each.ndim) or each.numel() < part.numel() for part, each in pairs)

    def _follow(self, operation: Operation, args: tuple[object, ...], result: object) -> None:
        """Note another tensor for a weight's part; free what was gathered of a weight that was changed in place."""
        changes = operation.keeps_parts and operation.name not in ("grad", "backward", "requires_grad_", "__set__")
        is_alias = operation.call in (DETACH, GET_DATA)
        if not changes and not is_alias:
            return
        first = operands(args[:1], {})
        owners = [mine[1] if (mine := self._owners.get(id(t))) else self._aliases.get(t) for t in first]
        if is_alias and owners and owners[0] is not None and isinstance(result, torch.Tensor):
            self._note(self._aliases, result, owners[0])
        if changes:
            for routed in {owner for owner in owners if owner is not None}:
                for shell in filter(is_gathered, routed.through):
                    free_gathered(shell)

    def _place(self, value: object) -> object:
        return _Placed(*owner[0]) if (owner := self._owners.get(id(value))) else value


@dataclasses.dataclass(frozen=True, slots=True)
class _Placed:
    """The place of a parameter among the arguments of an operation."""

    module: nn.Module
    key: str


def _at(value: object) -> object:
    return getattr(value.module, value.key) if isinstance(value, _Placed) else value


_TENSOR: Any = torch.Tensor
SHAPES = frozenset(
    (
        *(_TENSOR.size, _TENSOR.dim, _TENSOR.ndimension, _TENSOR.numel, _TENSOR.nelement, _TENSOR.__len__),
        *(torch.numel, _TENSOR.shape.__get__, _TENSOR.ndim.__get__),
    )
)
"""Functions of the shape of a tensor, of which those of a weight are the whole one's."""
SUMS = frozenset((
    *("norm", "linalg_norm", "linalg_vector_norm", "vector_norm", "_foreach_norm", "_foreach_max", "sum", "nansum"),
    *("mean", "std", "var", "prod", "max", "min", "amax", "amin", "median", "logsumexp", "count_nonzero", "all", "any"),
    *("dot", "vdot", "inner", "dist", "argmax", "argmin"),
))  # fmt: skip
"""Functions whose result, where it has no dimension, is of all numbers of a tensor."""
READS = (
    *("item", "tolist", "numpy", "equal", "allclose", "__bool__", "__float__", "__int__", "__index__"),
    returned.__name__,
)
"""Functions that give values of a tensor in Python, or to the caller of a method."""


def _of_a_part(name: str) -> ModelError:
    what, where = ("what a method returns", "return") if name == returned.__name__ else (name, name)
    return ModelError(
        f"{what} of a weight's detach(), .data or .grad, of an optimizer's state, or of state_dict(), is that of this "
        "rank's part alone: fsdp1 divides each over the ranks, and these have no shape there",
        where=where,
        remedy="use the weight itself (under torch.no_grad(); dict(self.named_parameters()) for a state_dict()), which "
        "is whole in every operation, and none of these with it; keep states as zeros_like(weight); for the norm of "
        'the gradient self.clip_grad_norm_(); or executor="fsdp2", where they are whole',
    )


def _drawn(name: str) -> ModelError:
    return ModelError(
        f"{name} of a weight draws each rank's part from the beginning of the same stream: fsdp1 divides it over the "
        "ranks, and parts would repeat one another",
        where=name,
        remedy='draw in __init__ or _init_weights, where weights are whole, or use executor="fsdp2"',
    )


def _in_an_optimizer(name: str) -> ModelError:
    return ModelError(
        f"{name} in the step of an optimizer is that of this rank's part alone: fsdp1 divides each weight over the "
        "ranks",
        where="optimizer.step()",
        remedy='use executor="fsdp2", or an optimizer that computes entry by entry (Adam, SGD)',
    )


def _is_of_the_part(operation: Operation) -> bool:
    """Whether an operation is about what this rank has: a copy or state of it, or an attribute but the transpose."""
    return operation.is_read or operation.name in ("zeros_like", "empty_like")


def _is_first_state(operation: Operation, depth: int) -> bool:
    """Whether an optimizer of torch makes its state of a weight when it is created, as Adagrad does.

    Args:
        operation: of torch.
        depth: how many callers above this function's the operation was called.
    """
    name = sys._getframe(depth + 1).f_globals.get("__name__", "") if operation.name == "full_like" else ""
    return name.startswith("torch.optim.")


def _gives_no_tensor(func: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Whether an operation, tried on parts, gives something else (a size, a dtype)."""
    with suppress(RuntimeError, IndexError):
        return not list(operands((func(*args, **kwargs),), {}))
    return False
