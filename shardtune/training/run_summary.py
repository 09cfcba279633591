"""The summary of a run before its first step: model, data, ranks, steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The contents of the first screen of a run.

    Attributes:
        model: the model's class.
        parameters: how many, and how many of them are trained.
        trainable: of them, how many are trained.
        dtypes: what weights, computation and optimizer are held in.
        ranks: and where they compute.
        attention: how rows share a forward; "" if that does not apply.
        rows: of an epoch.
        tokens: of an epoch; None where rows are no tokens.
        targets: of an epoch.
        steps_per_epoch: optimizer steps of the first epoch.
        total_steps: the horizon.
        evaluation: rows of each evaluation set; None where that is not known.
        notes: further messages.
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
