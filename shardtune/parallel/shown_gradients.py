"""Gradients of weights that are kept beside a model in half precision, at the model's own parameters.

In a user's own loop what it does there counts, as it does where parameters are the weights themselves: it reads
gradients, changes and replaces them, clips them with torch's function, and clears them by `model.zero_grad()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from shardtune.parallel.half_products import add_converted

Pair = tuple[nn.Parameter, nn.Parameter]
"""A parameter that computes, and the one in full precision that is updated."""


class ShownGradients:
    """Whether gradients stand at the parameters that compute, too.

    Attributes:
        on: whether they do now.
    """

    def __init__(self) -> None:
        self.on = False
        self._common: dict[nn.Parameter, torch.Tensor | None] = {}

    def take(self, master: nn.Parameter, computed: torch.Tensor) -> None:
        """Add what autograd has computed to the master's gradient; a hook of the parameter that computes."""
        assert computed.grad is not None
        if computed.grad is master.grad:
            return  # autograd has added to it
        if master.grad is None:
            master.grad = computed.grad.to(master.dtype)
        else:
            add_converted(master.grad, computed.grad)
        computed.grad = None
        if self.on:
            computed.grad = self._common[master] = master.grad

    @contextmanager
    def showing(self, pairs: Sequence[Pair]) -> Iterator[None]:
        """Inside, gradients of both of a pair are one tensor; `settle` takes over what was changed there."""
        for computed, master in pairs:
            computed.grad_dtype = None  # any
            computed.grad = self._common[master] = master.grad
        hooks = [
            computed.register_hook(partial(self._settle_before, computed, master))
            for computed, master in pairs
            if computed.requires_grad
        ]
        self.on = True
        try:
            yield
        finally:
            self.settle(pairs)
            self.on = False
            self._common.clear()
            for hook in hooks:
                hook.remove()
            for computed, _ in pairs:
                computed.grad = None

    def settle(self, pairs: Sequence[Pair]) -> None:
        """Take over gradients that were replaced or cleared, at either of a pair."""
        for computed, master in pairs if self.on else ():
            self._settle(computed, master)

    def _settle_before(self, computed: nn.Parameter, master: nn.Parameter, _: torch.Tensor) -> None:
        self._settle(computed, master)

    def _settle(self, computed: nn.Parameter, master: nn.Parameter) -> None:
        """What is no longer the common tensor counts: cleared by the model or the optimizer, or replaced."""
        changed = master.grad if computed.grad is self._common.get(master) else computed.grad
        kept = None if changed is None else changed.to(master.dtype)
        computed.grad = master.grad = self._common[master] = kept
