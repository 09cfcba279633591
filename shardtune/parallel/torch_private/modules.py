"""What modules hold, and classes of layers that have a private base."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrize import _inject_new_class, _inject_property

NormBase = _NormBase
"""Batch and instance norms: their common base, which norms of a user's may derive from without the public classes."""
BatchNormBase = _BatchNorm
"""Batch norms; as `NormBase`."""
DropoutBase = _DropoutNd
"""Layers that drop; as `NormBase`."""


def empty_parametrized(kind: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """A module of a class of its own, as `register_parametrization` makes one, without anything in it.

    Args:
        kind: its class before it was parametrized.
        names: of the tensors that are parametrized.
    """
    module = kind.__new__(kind)
    _inject_new_class(module)
    for name in names:
        _inject_property(module, name)
    return module


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` has been called."""
    return module._compiled_call_impl is not None


def own_persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's own persistent buffers, by name.

    Which buffers are persistent can otherwise be read from a state dict only, which hooks change, FSDP's among them.
    """
    return {
        key: buffer
        for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if key not in module._non_persistent_buffers_set
    }


Parameters = dict[str, nn.Parameter | None]
ModuleBuffers = dict[str, torch.Tensor | None]
Children = dict[str, nn.Module | None]


def contents(module: nn.Module) -> tuple[Parameters, ModuleBuffers, Children]:
    """A module's own parameters, buffers and children, with the names that hold None.

    The public iterators leave those out, and of a child that has two names the second.
    """
    return module._parameters, module._buffers, module._modules


def set_contents(module: nn.Module, parameters: Parameters, buffers: ModuleBuffers, children: Children) -> None:
    """Replace all that a module holds; for a copy that was made without its class's `__init__`."""
    module._parameters, module._buffers, module._modules = parameters, buffers, children


def set_parameter(module: nn.Module, key: str, parameter: nn.Parameter) -> None:
    """Put a parameter in the place of another one of a module's own.

    Unlike `setattr` and `register_parameter` it runs no registration hooks (those of `init_empty_weights` would move
    the parameter to the meta device), and leaves a plain attribute of that name alone, such as FSDP1's views.
    """
    module._parameters[key] = parameter


def apply_to_tensors(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change every parameter and buffer of a module as `Module.to` does, with a function of ours.

    FSDP2 learns in the same call where its shards lie; the public methods (`to`, `to_empty`) take one dtype and one
    device for all tensors.
    """
    module._apply(change)


def forward_hooks(module: nn.Module) -> Iterator[Callable[..., object]]:
    """All hooks of forwards in a module; torch has public ways to add one and to remove it, and none to see them."""
    for each in module.modules():
        yield from (*each._forward_pre_hooks.values(), *each._forward_hooks.values())


def remove_forward_hooks(module: nn.Module, chosen: Callable[[Callable[..., object]], bool]) -> None:
    """Remove a module's own forward hooks that somebody else has registered and keeps no handle of."""
    for number, hook in list(module._forward_hooks.items()):
        if chosen(hook):
            del module._forward_hooks[number]
            module._forward_hooks_with_kwargs.pop(number, None)
            module._forward_hooks_always_called.pop(number, None)


class _Listed(dict[str, nn.Parameter | None]):
    """Parameters of a module, of which each loop has its own list."""

    def items(self) -> Any:
        return list(super().items())


def list_parameters(root: nn.Module) -> None:
    """Let a loop over parameters see each of them, though FSDP1 takes them out of their module and puts them back
    where an operation on one gathers its weights."""
    for module in root.modules():
        vars(module)["_parameters"] = _Listed(module._parameters)


LOADING = nn.Module._load_from_state_dict.__code__
"""What compares the shapes of weights with those of a state dict, of which FSDP1 gives this rank's parts."""
