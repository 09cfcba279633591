"""What a run is about to do, once all of it is built: model, data, ranks, steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What the first screen shows of a run.

    Attributes:
        model: the model's class.
        parameters: how many, and how many of them are trained.
        trainable: of them, how many are trained.
        dtypes: what weights, computation and optimizer are held in.
        ranks: and where they compute.
        attention: how rows share a forward; "" where that says nothing.
        rows: of an epoch.
        tokens: of an epoch; None where rows are no tokens.
        targets: of an epoch.
        steps_per_epoch: optimizer steps of the first epoch.
        total_steps: the horizon.
        evaluation: rows of each evaluation set; None where that is not known.
        notes: what is worth saying besides.
        trained: where not all parameters are: (name with numbers as *, tensors, parameters).
    """

    model: str
    parameters: int
    trainable: int
    dtypes: str
    ranks: str
    attention: str
    rows: int
    tokens: int | None
    targets: float
    steps_per_epoch: int
    total_steps: int
    evaluation: Mapping[str, int | None]
    notes: Sequence[str] = ()
    trained: Sequence[tuple[str, int, int]] = ()
