"""Weights of a sharded model in operations outside of its modules: `hidden @ self.head.weight.T` in a method.

Such an operation gets a part of the weight on each rank. While one of the modes here is active, it gets the whole one,
and its gradient is summed over ranks. All ranks have to run the same operations. What changes weights in place (an
average of them, an optimizer) works on parts as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache, wraps
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
from shardtune.parallel.torch_private import (
    base_of,
    count_parameters,
    gather_before_backward,
    gathered_parameters,
    holds_gathered,
    is_at_rest,
    local_part,
    storage_identity,
    tree_map,
    tree_map_only,
)

FOREIGN = ("torch", "transformers", "peft", "shardtune")
"""Packages whose classes have methods of their own beside a user's."""


_TENSOR: Any = torch.Tensor
SET_DATA = _TENSOR.data.__set__


class ShardedOperands(TorchFunctionMode):
    """With FSDP2: operations outside of the forward get whole weights beside plain tensors and where gradients count.

    The root's weights stay gathered between its forward and its backward pass, and its modules have the gathered ones
    meanwhile. Operations compute with these, and what changes a weight changes this rank's part of it.

    Args:
        root: the sharded module.
        compute: the dtype of the computation.
        compare: is called before weights are gathered.
        units: sharded modules in the root whose weights are DTensors also while they are gathered, for tensor ranks.
    """

    def __init__(
        self,
        root: FSDPModule,
        compute: torch.dtype,
        compare: Callable[[str], None],
        units: Sequence[FSDPModule] = (),
    ) -> None:
        super().__init__()
        self._root = root
        self._compute = compute
        self._compare = compare
        self._units = units
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
        given = dict(kwargs or {})
        if holds_gathered(self._root) or any(map(holds_gathered, self._units)):
            return func(*args, **given)
        is_derivative = func.__name__ in ("grad", "backward")  # of what has been computed, whose weights these were
        gathered = {} if is_derivative else self._gathered(args, given)
        if gathered and is_at_rest(self._root):
            return self._on_gathered(gathered, func, types, args, given)
        sharded, plain = _kinds(args, given)
        if sharded and func == SET_DATA and isinstance(args[0], DTensor):
            if not same_memory(args[0], args[1]):
                raise other_data()
            return None  # parameter.data -= …, which has changed it in place
        if changes_in_place(func) and any(map(self._is_lost, operands(args[:1], {}))):
            raise lost_view(str(func.__name__))
        if sharded and draws(func) and isinstance(filled := _filled(args, given), DTensor):
            return self._drawn(func, filled, args, given)
        if not sharded or keeps_parts(func):
            return func(*args, **given)
        if not plain:
            with suppress(RuntimeError):  # an operation that DTensors do not have
                result = func(*args, **given)
                # The gradient of a DTensor may be laid out otherwise than the weight, to which FSDP2 adds its own.
                if not any(isinstance(tensor, DTensor) and tensor.requires_grad for tensor in operands((result,), {})):
                    return result
        self._compare(str(func.__name__))
        parts = {_memory(tensor) for tensor in operands(args, given) if isinstance(tensor, DTensor)}
        args, given = tree_map_only(DTensor, self._whole, (args, given))
        copies = {_memory(tensor) for tensor in operands(args, given)} - parts
        result = func(*args, **given)
        for each in operands((result,), {}):
            if _memory(each) in copies and base_of(each) is not None:
                self._views[each] = True
        return result

    def _drawn(self, func: Any, weight: DTensor, args: tuple[Any, ...], given: dict[str, Any]) -> object:
        """A weight filled with random numbers: on CPUs this rank's part of what the first rank draws for all of it.

        There torch draws each part from the beginning of the same stream, so that parts repeat one another.
        """
        if weight.device.type != "cpu" or (weight.requires_grad and torch.is_grad_enabled() and not is_init(func)):
            return func(*args, **given)
        self._compare(str(func.__name__))
        whole = torch.empty(weight.shape, dtype=weight.dtype)
        args, given = tree_map(lambda value: whole if value is weight else value, (args, given))
        func(*args, **given)
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

    def _gathered(self, args: tuple[Any, ...], given: Mapping[str, Any]) -> dict[int, tuple[torch.Tensor, DTensor]]:
        """The root's gathered weights, with their parts, if they or views of them are among the operands."""
        plain = [tensor for tensor in operands(args, given) if not isinstance(tensor, DTensor)]
        if not plain:
            return {}
        if not self._complete:  # weights that have been gathered once keep their tensors, and these their memory
            self._weights = gathered_parameters(self._root)
            self._memory = {_memory(whole) for whole, _ in self._weights.values()}
            self._complete = len(self._weights) == count_parameters(self._root)
        for tensor in plain:
            if id(tensor) in self._weights or storage_identity(tensor.untyped_storage()) in self._memory:
                return self._weights
        return {}

    def _on_gathered(
        self,
        weights: Mapping[int, tuple[torch.Tensor, DTensor]],
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...],
        given: dict[str, Any],
    ) -> Any:
        used = [weights[id(tensor)][0] for tensor in operands(args, given) if id(tensor) in weights]
        changes = keeps_parts(func) or (func.__name__ in ("detach", "__get__") and func not in TRANSPOSED)
        if used and (changes or any(not whole.untyped_storage().nbytes() for whole in used)):
            if changes and func.__name__ not in ("__get__", "__set__", "detach", "requires_grad_"):
                self._root.reshard()  # the next forward or backward pass gathers what the weights are then
            parts = {id(whole): weights[id(whole)][1] for whole in used}
            args, given = tree_map(lambda value: parts.get(id(value), value), (args, given))
            return self.__torch_function__(func, types, args, given)
        if changes_in_place(func) and any(
            id(tensor) not in weights and _memory(tensor) in self._memory for tensor in operands(args[:1], {})
        ):
            raise lost_view(str(func.__name__))
        if _kinds(args, given)[0]:
            self._compare(str(func.__name__))
            args, given = tree_map_only(DTensor, self._whole, (args, given))
        result = func(*args, **given)
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
        whole = tensor.full_tensor(grad_placements=gradient)
        return whole.to(self._compute) if whole.is_floating_point() else whole


DRAWS = frozenset(
    ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_")
)
"""Functions that fill a tensor with random numbers."""
INITS = frozenset(function for name, function in inspect.getmembers(nn.init, inspect.isfunction) if name.endswith("_"))


def is_init(func: Any) -> bool:
    """Whether a function is one of `torch.nn.init`, whose operations inside are not seen one by one."""
    return func in INITS


def draws(func: Any) -> bool:
    """Whether a function fills its first operand with random numbers."""
    return func.__name__ in DRAWS or is_init(func)


def _filled(args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    return args[0] if args else kwargs.get("tensor")


def _part(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor) if isinstance(tensor, DTensor) else tensor


def _memory(tensor: torch.Tensor) -> int:
    return storage_identity(_part(tensor).untyped_storage())


def same_memory(weight: object, other: object) -> bool:
    """Whether a tensor is all of what a rank has of a weight: the same numbers at the same place."""
    if not isinstance(weight, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    first, second = ((_memory(t), (part := _part(t)).storage_offset(), part.shape, part.dtype) for t in (weight, other))
    return first == second


def _kinds(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[bool, bool]:
    """Whether an operation has DTensors, and plain tensors; a number is neither, unless it has a gradient."""
    sharded = plain = False
    for tensor in operands(args, kwargs):
        if isinstance(tensor, DTensor):
            sharded = True
        elif tensor.ndim or tensor.requires_grad:
            plain = True
    return sharded, plain


def operands(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an operation, those in lists included."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, torch.Tensor))


TRANSPOSED = (_TENSOR.T.__get__, _TENSOR.mT.__get__)


def other_data() -> ModelError:
    """Another tensor in the place of what a rank has of a weight: sharding goes on with the one that it was."""
    return ModelError(
        "`parameter.data = …` has no effect on a weight that is sharded: what computes, trains and is saved is the "
        "tensor that was there",
        where="parameter.data",
        remedy="change it in place: parameter.data.copy_(…), mul_, add_, lerp_; and keep copies of weights "
        "(parameter.detach().clone()), as they change, too",
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


def changes_in_place(func: Any) -> bool:
    """Whether a function of torch changes its first operand."""
    return _changes(str(func.__name__))


@cache
def _changes(name: str) -> bool:
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return name != "requires_grad_"
    return name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")


def keeps_parts(func: Any) -> bool:
    """Whether a function of torch works on what this rank has: it changes a weight in place, or computes gradients."""
    return _keeps(str(func.__name__))


@cache
def _keeps(name: str) -> bool:
    if name in ("__set__", "__setitem__", "grad", "backward"):
        return True
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


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
