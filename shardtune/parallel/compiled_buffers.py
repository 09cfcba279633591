"""Buffers of compiled modules that a forward changes in place: torch's compiler can compute wrong gradients with them.

To save memory the compiler keeps what a forward began with and computes the rest again in the backward pass. Where a
forward has changed a buffer in place by then, as `self.count += 1` does, the change is made a second time in what is
computed again, so that `x * self.count` gets the gradient of another count (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from shardtune.errors import ModelError
from shardtune.parallel.torch_private.modules import NormBase, is_compiled
from shardtune.parallel.torch_private.tensors import version_of

P = ParamSpec("P")
R = TypeVar("R")
Versions = Sequence[tuple[torch.Tensor | None, int]]


class CompiledBuffers:
    """The buffers of a model's compiled modules, without those of torch's own modules, such as norms.

    Args:
        model: whose units may be compiled.

    Attributes:
        owners: each module with the name of its buffer, and the name in the model.
    """

    def __init__(self, model: nn.Module) -> None:
        compiled = {part for unit in model.modules() if is_compiled(unit) for part in unit.modules()}
        self.owners = [
            (module, key, f"{name}.{key}" if name else key)
            for name, module in model.named_modules()
            if module in compiled and not _is_of_torch(module)
            for key, _ in module.named_buffers(recurse=False)
        ]

    def watched(self, forwards: Callable[P, R]) -> Callable[P, R]:
        """A function that calls `forwards` and then refuses what they have changed."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            before = self.versions()
            result = forwards(*args, **kwargs)
            self.refuse_changed(before)
            return result

        return call

    def versions(self) -> Versions:
        """The buffers as they are now, each with how often it has been changed in place."""
        found = (_buffer(module, key) for module, key, _ in self.owners)
        return [(buffer, 0 if buffer is None else version_of(buffer)) for buffer in found]

    def refuse_changed(self, before: Versions) -> None:
        """Refuse what forwards have changed in place; what they have replaced by a new tensor is right.

        Args:
            before: the versions before the forwards.

        Raises:
            ModelError: names the first such buffer.
        """
        for (buffer, version), (module, key, name) in zip(before, self.owners, strict=True):
            if buffer is not None and _buffer(module, key) is buffer and version_of(buffer) != version:
                raise ModelError(
                    f"a step changes the buffer {name} of a compiled module in place, with which torch's compiler can "
                    "compute wrong gradients where the forward does so",
                    where=name,
                    remedy=f"set a new tensor (self.{key} = self.{key} + 1), or set actor.model.compile: false",
                )


def _is_of_torch(module: nn.Module) -> bool:
    """Whether torch wrote its forward; a norm's running numbers are not multiplied by in training."""
    kinds = [kind for kind in type(module).__mro__ if kind is not object]  # FSDP2 puts a class of its own in front
    return isinstance(module, NormBase) or all(kind.__module__.startswith("torch.") for kind in kinds)


def _buffer(module: nn.Module, key: str) -> torch.Tensor | None:
    """None where a forward has removed it, or set None in its place."""
    return dict(module.named_buffers(recurse=False)).get(key)
