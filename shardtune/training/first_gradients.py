"""Looks at the gradients of the first step; later steps cost nothing.

The trained parameters that its backward pass does not reach are named; refused are a loss that differentiates by a
weight of which a rank has a part, units that draw other numbers where they are computed again, and forwards that write
into weights which they find gathered or rounded for themselves alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardtune.errors import ModelError
from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights
from shardtune.training.step import Accumulate, Totals

SHOWN = 5


def with_report(
    accumulate: Accumulate,
    ranks: Ranks,
    report: Callable[[str], None],
    done: Callable[[], None],
    *,
    may_be_idle: Callable[[str], bool],
    users: bool,
    recomputes: bool,
) -> Accumulate:
    """`accumulate` for the first step, which reports the trained parameters that got no gradient on any rank.

    A user's loss that calls `torch.autograd.grad` for a parameter of which each rank has a part is refused: the graph
    holds the gathered weight, so autograd finds None, or zeros (`allow_unused`, `materialize_grads`). So is a backward
    pass with draws of numpy or Python where units are computed again in it: checkpointing restores torch's generators
    alone, so the units compute other numbers than in the forward pass. And so are forwards that write into weights
    where that is lost.

    Args:
        accumulate: of the following steps.
        ranks: of the run; all of them do the first step.
        report: receives a line, if there are such parameters.
        done: called after it, so that `accumulate` alone is used from then on.
        may_be_idle: whether a parameter may have no gradient, so that it is not reported.
        users: whether the loss is a user's, and not compiled.
        recomputes: whether units are computed again in the backward pass.
    """
    compared = False

    def first(
        forward: Callable[..., object], micro_batches: object, denominators: object, weights: Weights, **settings: Any
    ) -> Totals:
        nonlocal compared
        seen = _seen(forward, weights.parameters) if users and weights.on_ranks else forward
        forwards: list[tuple[object, object]] = []
        seen = _noting(seen, forwards) if recomputes else seen
        written: list[str] = []
        try:
            with weights.noting_written(written):
                totals = accumulate(seen, micro_batches, denominators, weights, **settings)
        except RuntimeError as error:
            if written and "inplace" in str(error):  # gathered weights are views with fsdp1, which autograd refuses
                raise _lost(written) from error
            raise
        if compared:  # the same step again, at another loss scale
            return totals
        compared = True
        drew = [before != after != _generators() for before, after in forwards]
        everywhere = ranks.gather((written, any(drew)))
        if any(redrawn for _, redrawn in everywhere):
            raise _redrawn()
        if lost := list(dict.fromkeys(name for names, _ in everywhere for name in names)):
            raise _lost(lost)
        trained = list(weights.trainable())
        zeros = weights.unit_calls.filling.filled - weights.unit_calls.filling.used
        found = ranks.gather(
            [name for name in trained if (one := weights.parameters[name]).grad is None or id(one) in zeros]
        )
        missing = [name for name in trained if all(name in names for names in found) and not may_be_idle(name)]
        if 0 < len(missing) < len(trained):
            report(_line(missing, len(trained)))
        done()
        return totals

    return first


def _noting(forward: Callable[..., object], states: list[tuple[object, object]]) -> Callable[..., object]:
    """`forward`, which leaves the states of the generators before and after it in `states`, those of the last call."""

    def noted(*args: object, **settings: object) -> object:
        before = _generators()
        output = forward(*args, **settings)
        states[:] = [(before, _generators())]
        return output

    return noted


def _generators() -> tuple[object, ...]:
    """The states of the generators that checkpointing does not restore, as values that can be compared."""
    kind, words, *rest = np.random.get_state()
    return kind, np.asarray(words).tobytes(), *rest, random.getstate()


def _redrawn() -> ModelError:
    return ModelError(
        "forward and backward pass draw numbers of numpy or of Python's random: units that are computed again in the "
        "latter (actor.model.gradient_checkpointing) draw others than in the former, so that gradients are wrong",
        where="forward of the model's layers",
        remedy="draw from torch there (torch.rand), whose generators are restored, or set "
        "actor.model.gradient_checkpointing=false; a thread that draws takes a generator of its own "
        "(np.random.default_rng)",
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")


def _lost(names: list[str]) -> ModelError:
    return ModelError(
        f"the forwards of the first step write into the weights {_some(names)}, which ranks gather for "
        "each forward anew, or round from those in full precision: what is written is lost",
        where=names[0],
        remedy="compute with a changed weight instead (F.linear(x, F.normalize(self.weight))); move weights once a "
        "step in run_training of a worker, by a method of the model; or train on one rank in fp32",
    )


def _line(missing: list[str], trained: int) -> str:
    return (
        f"no gradient in the first step for {len(missing):,} of {trained:,} trained parameters: {_some(missing)}. The "
        "loss of its rows does not depend on them; freeze them (model.freeze), or use them in the forward pass; those "
        "that the code itself moves stay as they are"
    )


def _seen(forward: Callable[..., object], parameters: Mapping[str, torch.Tensor]) -> Callable[..., object]:
    """`forward`, which refuses gradients of parameters of which this rank has a part."""

    def checked(*args: object, **settings: object) -> object:
        with _GradientsOfParts(parameters):
            return forward(*args, **settings)

    return checked


class _GradientsOfParts(TorchFunctionMode):
    """Refuses `torch.autograd.grad` for some parameters; everything else is computed as without it."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._parts = {id(tensor): name for name, tensor in parameters.items() if isinstance(tensor, DTensor)}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.autograd.grad:
            names = [self._parts[id(tensor)] for tensor in args[1] if id(tensor) in self._parts]
            if names:
                raise ModelError(
                    f"the loss differentiates by {', '.join(names[:SHOWN])}{' and others' * (len(names) > SHOWN)}, of "
                    "which each rank has a part: the weight that its unit computed with is another tensor, so autograd "
                    "finds no gradient",
                    where="torch.autograd.grad",
                    remedy="differentiate by inputs or hidden states, or by a weight outside of all units (choose them "
                    "by unit_classes of the adapter, or by actor.fsdp_config.wrap)",
                )
        return func(*args, **(kwargs or {}))
