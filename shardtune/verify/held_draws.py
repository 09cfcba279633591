"""Holds what torch's generators draw, so that two ways to compute a random loss can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardtune.parallel.torch_private.operations import OpOverload, TorchDispatchMode, schema_of

HALF = ("normal", "normal_", "rand", "rand_like", "randn", "randn_like", "uniform_")
KEEPING = ("bernoulli", "bernoulli_")
INTEGERS = ("randint", "randint_like")


class HeldDraws(TorchDispatchMode):
    """Inside, whatever torch draws is one constant: one half, 1 for what is kept by chance, or the middle of a range.

    A sum over rows remains one, and a loss that depends on the draws depends on them still; only their distribution is
    lost. Random orders, choices and attention dropout are drawn as always.
    """

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping | None = None
    ) -> object:
        given = dict(kwargs or {})
        drawn = func(*args, **given)
        schema = schema_of(func)
        name = schema.name.rpartition("::")[2]
        if isinstance(drawn, torch.Tensor):
            if name in HALF:
                drawn.fill_(0.5)
            elif name in KEEPING:
                drawn.fill_(1)
            elif name in INTEGERS:
                named = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **given}
                low, high = (value if isinstance(value, int) else 0 for value in (named.get("low"), named["high"]))
                drawn.fill_((low + high) // 2)
        return drawn
