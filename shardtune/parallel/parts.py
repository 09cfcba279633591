"""Parts of a sharded model that are called by themselves, outside of the forward of the whole.

Sharding gathers the weights of a unit when the unit is called, and those outside of all units when the root is. A
method of a model's (`generate`, one that predicts actions) calls parts instead: an embedding, a vision tower, a head.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardtune.errors import ModelError
from shardtune.parallel.outputs import tensors_in
from shardtune.parallel.torch_private.fsdp2 import (
    Inputs,
    after_forward,
    before_forward,
    gather_before_backward,
    in_backward,
    is_at_rest,
    is_root,
    replaced_parameters,
)
from shardtune.parallel.torch_private.graph import in_transform
from shardtune.parallel.unused_units import tie


def parts_of(root: nn.Module, units: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The modules in `root` that use weights outside of all units: with a forward, and such a parameter in them."""
    for child in root.children():
        if child not in units:
            yield from parts_of(child, units)
            if type(child).forward is not nn.Module.forward and _has_own_weights(child, units):
                yield child


def _has_own_weights(module: nn.Module, units: Collection[nn.Module]) -> bool:
    if any(True for _ in module.parameters(recurse=False)):
        return True
    return any(_has_own_weights(child, units) for child in module.children() if child not in units)


def gather_for_parts(root: FSDPModule, compare: Callable[[str], None], done: Callable[..., None]) -> Gathering:
    """Let FSDP2 treat a call of a part, outside of a forward of the root, as a forward of the root.

    The root's weights are gathered then, and the gradients of what the part returns reach them. All ranks have to call
    the same parts.

    Args:
        root: sharded, with its units.
        compare: is called before weights are gathered for a part or a unit, with the name of its class.
        done: is called after a forward of the root or of a part; what a forward hook is called with can be ignored.

    Returns:
        What does so, which can be paused.
    """
    assert isinstance(root, nn.Module)
    units = {module for module in root.modules() if isinstance(module, FSDPModule)}
    gathering = Gathering(root, units, compare, done)
    parts = set(parts_of(root, units))
    for module in parts | units - {root}:
        module.register_forward_pre_hook(gathering.begin, with_kwargs=True, prepend=True)
    # `find_hidden` sees to it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for unit in units:
        unit.register_forward_pre_hook(refuse_replaced, prepend=True)
        unit.register_forward_hook(find_hidden, with_kwargs=True)
    for part in parts:
        part.register_forward_hook(gathering.end, with_kwargs=True, always_call=True)
    root.register_forward_hook(done)
    return gathering


_eager: Any = torch.compiler.disable


@_eager
def refuse_replaced(module: nn.Module, *_: object) -> None:
    """Before a forward of a sharded module: refuse other tensors in the place of its weights, which would not be used.

    Raises:
        ModelError: names one.
    """
    assert isinstance(module, FSDPModule)
    if replaced := replaced_parameters(module):
        raise ModelError(
            f"another tensor is in the place of {replaced[0]} of {type(module).__name__.removeprefix('FSDP')}, as "
            "torch.func.functional_call puts it there, and a forward of a sharded module computes with its own weights",
            where=replaced[0],
            remedy="compute with the changed weight by an operation (F.linear(x, layer.weight * 1.1)), or on one rank",
        )


@_eager  # a hook of units, which may be compiled; there is no graph of what objects hold
def find_hidden(module: nn.Module, args: object, kwargs: object, output: object) -> object:
    """After a forward of a sharded module: let FSDP2 see the tensors of its output that it does not find by itself, and
    those of which its output has views. An output without gradients gets some in `begin_unused`."""
    assert isinstance(module, FSDPModule)
    if not torch.is_grad_enabled():
        return output
    hidden = tensors_in(output, hidden=True, bases=True)
    if not hidden and not tensors_in(output):
        return begin_unused(module, output)
    if not hidden or in_backward():  # activation checkpointing repeats forwards in the backward pass
        return output
    given = {id(tensor) for tensor in tensors_in((args, kwargs), bases=True)}  # which came through no weight of its own
    if all(id(tensor) in given for tensor in tensors_in(output, bases=True)):  # other ranks may have used its weights
        gather_before_backward(module, tensors_in(output, hidden=True))
    else:
        gather_before_backward(module, [tensor for tensor in hidden if id(tensor) not in given])
    return output


def begin_unused(unit: FSDPModule, output: object) -> object:
    """Let gradients come back through a unit whose output has none, as of one that returns the inputs of the model.

    Other ranks may have used its weights, and would wait in the backward pass.
    """
    assert isinstance(unit, nn.Module)
    first = next(iter(tensors_in(output, constants=True)), None)
    trained = any(parameter.requires_grad for parameter in unit.parameters())
    if first is None or not trained or in_backward() or is_root(unit) or in_transform():
        return output
    tied = tie(output, [torch.zeros(1, device=first.device, requires_grad=True)])
    gather_before_backward(unit, tensors_in(tied))
    return tied


class Gathering:
    """Begins and ends a forward of the root around the outermost call of a part; made by `gather_for_parts`.

    Attributes:
        paused: all weights are gathered already.
    """

    def __init__(
        self,
        root: FSDPModule,
        units: Collection[nn.Module],
        compare: Callable[[str], None],
        done: Callable[..., None],
    ) -> None:
        self._root = root
        self._units = units
        self._compare = compare
        self._done = done
        self.paused = False
        self._outermost: nn.Module | None = None
        self._depth = 0
        self._owners: dict[nn.Module, FSDPModule] = {}
        self._cut: set[nn.Module] = set()

    def gather_inside_units(self) -> None:
        """Treat the call of a module inside a unit as a forward of the unit.

        Where only shards lie on ranks, operations gather what they use (`ShardedOperands`), and no module needs a hook.
        A module with layers that tensor ranks share computes on its rank's part, which only FSDP2 gathers. Such a layer
        by itself has a part of the features: called by itself it computes on its whole weight.
        """
        assert isinstance(self._root, nn.Module)
        for unit in self._root.modules():  # inner units come later
            if unit in self._units and unit is not self._root:
                assert isinstance(unit, FSDPModule)
                self._owners |= {module: unit for module in unit.modules() if module not in self._units}
        for module in self._owners:
            if "forward" in vars(module) and not [*module.children()]:
                self._cut.add(module)
                vars(module)["forward"] = self._whole_if_outermost(module, vars(module)["forward"])
            if type(module).forward is not nn.Module.forward:
                module.register_forward_pre_hook(self.begin, with_kwargs=True, prepend=True)
                module.register_forward_hook(self.end, with_kwargs=True, always_call=True)

    def _whole_if_outermost(self, layer: nn.Module, on_parts: Callable[..., object]) -> Callable[..., object]:
        def forward(*args: object, **kwargs: object) -> object:
            called = partial(type(layer).forward, layer) if layer is self._outermost else on_parts
            return called(*args, **kwargs)

        return forward

    def begin(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Inputs:
        """Before the forward of a part, or of a unit, which gathers its own weights."""
        if self.paused:
            return args, kwargs
        if module is self._outermost:
            self._depth += 1
        owner = self._owners.get(module, self._root)
        if self._outermost is not None or not is_at_rest(self._root) or not is_at_rest(owner):
            return args, kwargs
        self._compare(type(module).__name__)
        if module in self._units:
            return args, kwargs
        self._outermost, self._depth = module, 1
        if module in self._cut:
            return args, kwargs
        assert isinstance(owner, nn.Module)
        refuse_replaced(owner)
        return before_forward(owner, args, kwargs)

    def end(self, part: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> object:
        if part is not self._outermost:
            return output
        self._depth -= 1
        if self._depth:
            return output
        self._outermost = None
        if part in self._cut:
            return output
        owner = self._owners.get(part, self._root)
        assert isinstance(owner, nn.Module)
        output = after_forward(owner, args, output)
        find_hidden(owner, args, kwargs, output)
        self._done()
        return output
