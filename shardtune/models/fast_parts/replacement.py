"""Modules whose forward is computed by other code, and how far its results are from their own.

A module stays what it is, with its parameters and their names; only its `forward` is another function. So a model that
is sharded, has an adapter or is saved does not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from shardtune.parallel.torch_private.operations import tree_iter, tree_map

Forward = Callable[..., Any]


class Replacement:
    """A module, its own forward, and the functions that may compute it instead.

    Args:
        name: of the module in the model.
        module: keeps its parameters.
        ways: functions with the arguments of the module's forward; the one with the smallest error is used.

    Attributes:
        errors: of each way, the largest yet; empty before the module has been called in `compared`.
        problems: of each way, what it has raised; empty text for nothing.
        chosen: the number of the way that is used; None: the module's own forward is.
    """

    def __init__(self, name: str, module: nn.Module, ways: Sequence[Forward]) -> None:
        self.name = name
        self.module = module
        self._plain: Forward = module.forward
        self._ways = ways
        self._of_instance: Forward | None = vars(module).get("forward")
        self.errors: list[float] = []
        self.problems: list[str] = []
        self.chosen: int | None = None

    @property
    def kind(self) -> type[nn.Module]:
        return type(self.module)

    def restore(self) -> None:
        """Give the module its own forward."""
        if self._of_instance is None:
            vars(self.module).pop("forward", None)
        else:
            self._put(self._of_instance)

    def resume(self) -> None:
        """Compute the module as it was chosen; by its own forward where nothing was."""
        if self.chosen is not None:
            self._put(self._ways[self.chosen])

    def compare(self) -> None:
        """From now on compute the module by its own forward, and measure each way beside it."""
        self._put(self._compared)

    def _put(self, forward: Forward) -> None:
        self.module.forward = cast(Any, forward)

    def _compared(self, *args: Any, **kwargs: Any) -> Any:
        expected = results(self._plain, self.module, args, kwargs)
        self.errors = self.errors or [0.0] * len(self._ways)
        self.problems = self.problems or [""] * len(self._ways)
        for number, way in enumerate(self._ways):
            try:
                error = relative_error(results(way, self.module, args, kwargs), expected)
            except Exception as problem:  # a library's kernel may raise anything; what it raises is in the refusal
                error = float("inf")
                self.problems[number] = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
            self.errors[number] = max(self.errors[number], error)
        return self._plain(*args, **kwargs)


@contextmanager
def compared(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Inside, forwards of the model measure these replacements; afterwards modules have their own forwards."""
    for one in replacements:
        one.compare()
    try:
        yield
    finally:
        for one in replacements:
            one.restore()


@contextmanager
def plainly(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Inside, modules compute by their own forwards."""
    for one in replacements:
        one.restore()
    try:
        yield
    finally:
        for one in replacements:
            one.resume()


def results(
    forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The outputs of a forward and its gradients, of the first input that has numbers, and of the parameters.

    The gradients of the outputs are the same random numbers in each call. Nothing is accumulated in `.grad`.
    """
    inputs: list[torch.Tensor] = []

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        copied = value.detach().clone()
        if copied.is_floating_point() and not inputs:
            inputs.append(copied.requires_grad_())
        return copied

    with torch.enable_grad():
        copied_args, copied_kwargs = tree_map(copy, (args, dict(kwargs)))
        made = forward(*copied_args, **copied_kwargs)
        outputs = [one for one in tree_iter(made) if isinstance(one, torch.Tensor) and one.requires_grad]
        wanted = [*inputs, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
        found = torch.autograd.grad(outputs, wanted, [_noise_like(one) for one in outputs], allow_unused=True)
    gradients = [torch.zeros_like(one) if grad is None else grad for grad, one in zip(found, wanted, strict=True)]
    return [one.detach() for one in (*outputs, *gradients)]


def _noise_like(tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(tensor.device).manual_seed(0)
    noise = torch.randn(tensor.shape, generator=generator, device=tensor.device, dtype=torch.float32)
    return noise.to(tensor.dtype)


def relative_error(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest, over tensors, of the norm of the difference divided by the norm of what is expected."""
    if len(got) != len(expected):
        return float("inf")
    largest = 0.0
    for one, own in zip(got, expected, strict=True):
        kind = torch.promote_types(own.dtype, torch.float32)
        if one.shape != own.shape:
            return float("inf")
        distance = torch.linalg.vector_norm(one.to(kind) - own.to(kind))
        error = float(distance / torch.linalg.vector_norm(own.to(kind)).clamp(min=1e-30))
        if not error <= largest:  # NaN too
            largest = error if error > largest else float("inf")
    return largest
