"""What units returned and a loss left out, on one rank and not on another.

A unit gathers its weights and sums its gradients where a gradient comes back through what it returned. A loss that
takes an output by what is in the rows (`if batch.has_boxes: loss += box_loss(found)`) brings none on a rank without
such rows, and the other ranks would wait for that one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardtune.parallel.outputs import tensors_in


class UnitOutputs:
    """At each output of a unit an end of the graph, from which a backward pass goes through it without a gradient.

    Autograd runs the functions of a graph from the last to the first, so ranks that have called the same units come
    by them in one order, whichever outputs their losses use. Ends hold no output: only its place in the graph.

    Attributes:
        on: whether ends are made, which a micro-batch begins and its backward pass ends.
    """

    def __init__(self) -> None:
        self.on = False
        self._ends: list[torch.Tensor] = []

    def note(self, _unit: nn.Module, _inputs: object, output: object) -> None:
        """After a forward of a unit, whose hook it is: make an end at each tensor of its output."""
        if self.on and torch.is_grad_enabled():
            self._ends += [_End.apply(tensor) for tensor in tensors_in(output)]

    def clear(self) -> None:
        """Make no more ends, and forget those that there are.

        After a backward pass inside a forward, as adversarial training has one, the graph of some may be freed.
        """
        self._ends.clear()
        self.on = False

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss, through all units that were called while it was on."""
        ends, self._ends, self.on = self._ends, [], False
        torch.autograd.backward((loss, *ends), (None, *(end.detach() for end in ends)))


class _End(torch.autograd.Function):
    """Of a tensor, with no numbers and no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> None:
        return None
