"""Names the trained parameters that the first step's backward pass does not reach; later steps cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardtune.parallel.ranks import Ranks
from shardtune.parallel.weights import Weights
from shardtune.training.step import Accumulate, Totals

SHOWN = 5


def with_report(
    accumulate: Accumulate, ranks: Ranks, report: Callable[[str], None], done: Callable[[], None]
) -> Accumulate:
    """`accumulate` for the first step, which reports the trained parameters that got no gradient on any rank.

    Args:
        accumulate: of the following steps.
        ranks: of the run; all of them do the first step.
        report: receives a line, if there are such parameters.
        done: called after it, so that `accumulate` alone is used from then on.
    """

    compared = False

    def first(
        forward: Callable[..., object], micro_batches: object, denominators: object, weights: Weights, **settings: Any
    ) -> Totals:
        nonlocal compared
        totals = accumulate(forward, micro_batches, denominators, weights, **settings)
        if compared:  # the same step again, at another loss scale
            return totals
        compared = True
        trained = list(weights.trainable())
        zeros = weights.unit_calls.filling.filled - weights.unit_calls.filling.used
        found = ranks.gather(
            [name for name in trained if (one := weights.parameters[name]).grad is None or id(one) in zeros]
        )
        missing = [name for name in trained if all(name in names for names in found)]
        if 0 < len(missing) < len(trained):
            report(_line(missing, len(trained)))
        done()
        return totals

    return first


def _line(missing: list[str], trained: int) -> str:
    shown = ", ".join(missing[:SHOWN]) + (f" and {len(missing) - SHOWN:,} more" if len(missing) > SHOWN else "")
    return (
        f"no gradient in the first step for {len(missing):,} of {trained:,} trained parameters: {shown}. The loss of "
        "its rows does not depend on them; freeze them (model.freeze), or use them in the forward pass"
    )
