"""Units that are called on all ranks, and of which a rank's rows use no weight.

A unit gathers its weights and sums its gradients in the backward pass where a gradient comes back through it. A block
that a rank's rows skip returns what it was given; other ranks, whose rows use it, would wait for that rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardtune.parallel.outputs import tensors_in, with_tensors


def tie(output: object, others: Sequence[torch.Tensor]) -> object:
    """What a unit returns, with other tensors to which gradients of zeros come back through it.

    Args:
        output: of the unit; its tensors that have gradients are copied, or else the first of floating numbers.
        others: tensors with gradients.
    """
    tied = tensors_in(output) or [each for each in tensors_in(output, constants=True) if each.is_floating_point()][:1]
    copies = {id(tensor): Tie.apply(tensor, *others) for tensor in tied}
    return with_tensors(output, copies) if copies else output


class Tie(torch.autograd.Function):
    """A copy of a tensor, through which others get gradients of zeros."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.others = [(other.shape, other.dtype) for other in inputs[1:]]

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor | None, *others: torch.Tensor | None) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None if tangent is None else tangent.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], *(grads[0].new_zeros(shape, dtype=dtype) for shape, dtype in ctx.others)
