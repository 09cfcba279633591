"""Steps of a user's optimizers that cannot step the parts of ranks: torch's Adafactor and Rprop, under FSDP2."""

from __future__ import annotations

import copy
from collections import defaultdict

import torch
from torch.distributed.tensor import DTensor

from shardtune.optim.low_bit import ParamGroup
from shardtune.optim.named_class import PLAIN, WHOLE
from shardtune.optim.sharded import step_whole
from shardtune.parallel.direct_use import ShardedOperands
from shardtune.parallel.torch_private.operations import without_modes


class WholeSteps:
    """Steps sharded parameters as whole ones, one after the other, before an optimizer's own step.

    That step leaves them out, as they have no gradient meanwhile. All ranks compute the same.
    """

    def __init__(self) -> None:
        self._kinds = tuple(vars(torch.optim)[name] for name in (*WHOLE, *PLAIN))
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Step those parameters of an optimizer that its own step cannot."""
        if not isinstance(optimizer, self._kinds):
            return

        def of_one(groups: list[ParamGroup]) -> torch.optim.Optimizer:
            inner = copy.copy(optimizer)
            inner.param_groups, inner.state = groups, defaultdict(dict)
            return inner

        with without_modes(ShardedOperands), torch.no_grad():
            for group in optimizer.param_groups:
                parameters = group["params"]
                group["params"] = [p for p in parameters if isinstance(p, DTensor)]
                try:
                    step_whole(group, optimizer.state, of_one)
                    self._held.extend((p, p.grad) for p in group["params"] if p.grad is not None)
                finally:
                    group["params"] = parameters
        for parameter, _ in self._held:
            parameter.grad = None

    def after(self) -> None:
        """Give the parameters their gradients back, which their user clears."""
        for parameter, gradient in self._held:
            parameter.grad = gradient
        self._held.clear()
