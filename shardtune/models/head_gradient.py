"""The gradient of a large head's weight, computed in the backward pass, some rows of the vocabulary at a time.

Held whole from forward to backward in fp32, that of 152,000 tokens and a width of 4,096 takes 2.5 GB beside all
activations. Here the logits are computed once more instead: four matrix products in the place of three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from shardtune.parallel.half_products import factors_in_bf16

HELD_BYTES = 2**30
"""Up to this size the gradient is held, which takes less time."""
BLOCK_BYTES = 2**28
"""Of the rows that are summed at a time."""


class SlopeOfBlock(Protocol):
    """The gradient of a loss with respect to the logits of some tokens of the vocabulary."""

    def __call__(
        self,
        logits: torch.Tensor,
        index: torch.Tensor,
        here: torch.Tensor,
        normalizer: torch.Tensor,
        scale: torch.Tensor,
    ) -> torch.Tensor:
        """[targets, tokens], in the memory of `logits` if possible.

        Args:
            logits: [targets, tokens], after the model's transform.
            index: int64 [targets, 1], the place of each target among these tokens.
            here: bool [targets, 1], whether it is among them; if not, `index` has some valid number.
            normalizer: [targets, 1], the logsumexp of all logits.
            scale: [targets, 1], the weight of each target.
        """
        ...


@dataclass(frozen=True, slots=True)
class HeadGradient:
    """What the gradient of a head's weight is computed from.

    Attributes:
        slope: of the loss.
        first: the number of this rank's first row in the vocabulary.
        logits_at_once: of a block and a chunk of targets.
    """

    slope: SlopeOfBlock
    first: int
    logits_at_once: int

    def compute(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        normalizer: torch.Tensor,
        scale: torch.Tensor,
        factor: torch.Tensor,
    ) -> torch.Tensor:
        """`factor` times the gradient, in the weight's dtype; summed in that of sums and rounded once.

        Args:
            hidden: [targets, width].
            weight: [vocabulary, width]; this rank's rows.
            bias: [vocabulary], or None.
            targets: int64 [targets].
            normalizer: [targets, 1].
            scale: [targets, 1].
            factor: a scalar, the gradient of the sum of losses.
        """
        acc = normalizer.dtype
        mixed = hidden.is_cuda and hidden.dtype != acc
        multiply: Callable[..., torch.Tensor] = partial(torch.mm, out_dtype=acc) if mixed else torch.mm
        result = torch.empty_like(weight)
        size = max(1, BLOCK_BYTES // (acc.itemsize * weight.shape[1]))
        chunk = max(1, self.logits_at_once // size)
        for start in range(0, len(weight), size):
            block = weight[start : start + size]
            head = block if mixed else block.to(acc)
            total = torch.zeros(block.shape, dtype=acc, device=weight.device)
            for begin in range(0, len(hidden), chunk):
                rows = slice(begin, begin + chunk)
                inputs = hidden[rows] if mixed else hidden[rows].to(acc)
                with factors_in_bf16(hidden.device, hidden.dtype):
                    logits = multiply(inputs, head.t())
                if bias is not None:
                    logits += bias[start : start + size].to(acc)
                index = targets[rows, None] - (self.first + start)
                here = (index >= 0) & (index < len(block))
                grad = self.slope(logits, index.where(here, 0), here, normalizer[rows], scale[rows]).to(inputs.dtype)
                if mixed:
                    total += multiply(grad.t(), inputs)
                else:
                    total.addmm_(grad.t(), inputs)
            result[start : start + size] = total.mul_(factor.to(acc))
        return result
