"""Optimizers that are not made for sharded parameters, on parameters of which each rank has a part.

One that steps each number by itself gets the parts, as plain tensors. Any other one that steps parameter by parameter
gets whole parameters, one at a time, which all ranks step alike; its states lie in parts between steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, MutableMapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardtune.optim.low_bit import ParamGroup
from shardtune.parallel.meta_init import shard_of
from shardtune.parallel.weights import local

Make = Callable[[list[ParamGroup]], torch.optim.Optimizer]
"""Makes the inner optimizer of some parameter groups."""
State = dict[str, object]
"""The state of one parameter."""


class _Outer(torch.optim.Optimizer):
    """The optimizer that others see: its groups and states are those of the sharded parameters.

    Args:
        groups: parameter groups with all of their settings.
        make: of the inner optimizer.
    """

    def __init__(self, groups: list[ParamGroup], make: Make) -> None:
        stand_in = make([{"params": [nn.Parameter(torch.zeros(2, 2))]}])
        super().__init__(groups, stand_in.defaults)
        self._make = make

    @abstractmethod
    def _step_group(self, number: int, group: ParamGroup) -> None:
        """Update the parameters of a group that have a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            self._step_group(number, group)
        return loss

    def _inner(self, group: ParamGroup, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimizer of some parameters with a group's settings."""
        return self._make([{**group, "params": parameters}])


class OfParts(_Outer):
    """An optimizer that steps each number by itself: it gets this rank's parts, as plain parameters.

    The states that have the shape of a part are parts of sharded states, in the same memory.
    """

    def __init__(self, groups: list[ParamGroup], make: Make) -> None:
        super().__init__(groups, make)
        self._inners = [self._of_group(group) for group in self.param_groups]
        self._known: dict[nn.Parameter, State] = {}

    def _of_group(self, group: ParamGroup) -> torch.optim.Optimizer:
        return self._inner(group, [nn.Parameter(local(parameter.detach())) for parameter in group["params"]])

    def _step_group(self, number: int, group: ParamGroup) -> None:
        inner = self._inners[number]
        (inner_group,) = inner.param_groups
        inner_group.update({key: value for key, value in group.items() if key != "params"})
        pairs = list(zip(group["params"], inner_group["params"], strict=True))
        for parameter, part in pairs:
            part.data = local(parameter.detach())
            part.grad = None if parameter.grad is None else local(parameter.grad)
            if self.state.get(parameter) is not self._known.get(parameter):  # a checkpoint was read
                inner.state[part] = {key: _part(value) for key, value in self.state[parameter].items()}
        plain_step(inner)
        group.update({key: value for key, value in inner_group.items() if key != "params"})
        for parameter, part in pairs:
            part.grad = None
            if part in inner.state:
                self._take(parameter, part, inner.state[part])

    def _take(self, parameter: nn.Parameter, part: nn.Parameter, state: State) -> None:
        """Show the states of a part as the parameter's."""
        known = self.state[parameter]
        for key, value in state.items():
            if key not in known or not _same_memory(_part(known[key]), value):
                known[key] = _sharded_like(parameter, part, value)
        self._known[parameter] = known


class OfWhole(_Outer):
    """An optimizer of single parameters, each of which it gets as a whole, with its whole gradient and states.

    All ranks compute the same. A state that has the parameter's shape lies in parts between steps, as the parameter
    does; any other one, such as a mean of each row, is on all ranks.
    """

    def _step_group(self, number: int, group: ParamGroup) -> None:
        step_whole(group, self.state, self._make)


def step_whole(group: ParamGroup, states: MutableMapping[torch.Tensor, State], make: Make) -> None:
    """Step those parameters of a group that have a gradient one at a time, as a whole.

    Args:
        group: with all of its settings; what the optimizer changes of them is changed.
        states: of parameters.
        make: of an optimizer of one parameter.
    """
    after = [_step_one(group, p, states[p], make) for p in group["params"] if p.grad is not None]
    for settings in after[:1]:  # what it counts in a group it counts alike for each parameter
        group.update(settings)


def _step_one(group: ParamGroup, parameter: nn.Parameter, state: State, make: Make) -> ParamGroup:
    """Step one parameter; returns the settings of its group after that."""
    assert parameter.grad is not None
    whole = nn.Parameter(_whole(parameter))
    whole.grad = _whole(parameter.grad)
    inner = make([{**group, "params": [whole]}])
    if state:
        inner.state[whole] = {
            key: _whole(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()
        }
    plain_step(inner)
    _put(parameter, whole)
    for key, value in inner.state[whole].items():
        if not (isinstance(value, torch.Tensor) and value.ndim and value.shape == parameter.shape):
            state[key] = value
            continue
        kept = state.get(key)
        if not isinstance(kept, torch.Tensor):
            kept = state[key] = torch.empty_like(parameter.detach(), dtype=value.dtype)
        _put(kept, value)
    (inner_group,) = inner.param_groups
    return {key: value for key, value in inner_group.items() if key != "params"}


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Step without the hooks that torch runs around each optimizer's step: they have run for the outer one."""
    vars(type(optimizer).step)["__wrapped__"](optimizer)


def _part(value: object) -> object:
    return local(value) if isinstance(value, torch.Tensor) else value


def _same_memory(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or (one.ndim > 0 and one.data_ptr() == other.data_ptr())
    return one is other


def _sharded_like(parameter: nn.Parameter, part: nn.Parameter, value: object) -> object:
    """A state of a part as one of the whole parameter."""
    if not (isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.ndim):
        return value
    if value.shape != part.shape:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of a tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def _put(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor."""
    shard = shard_of(target)
    if shard.local.numel():
        shard.local.copy_(shard.of(whole.detach()))
