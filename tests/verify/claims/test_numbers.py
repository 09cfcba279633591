"""The numbers of two runs side by side: what only one of them has is a difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shardtune.verify.claims.numbers import gaps


@dataclass(frozen=True)
class Computed:
    """The numbers of a run of one step."""

    log: tuple[tuple[float, float], ...]
    after: Mapping[str, torch.Tensor]

    def weights(self, step: int) -> Mapping[str, torch.Tensor]:
        return self.after


def test_a_weight_that_a_run_lacks_is_a_difference() -> None:
    whole = Computed(((2.0, 1.0),), {"a": torch.ones(2), "b": torch.ones(3)})
    found = {gap.name: gap for gap in gaps(whole, Computed(((2.0, 1.0),), {"a": torch.ones(2), "c": torch.ones(1)}))}
    assert {name: gap.size for name, gap in found.items() if not math.isinf(gap.size)} == {
        "train/loss": 0.0,
        "train/grad_norm": 0.0,
        "a": 0.0,
    }
    assert str(found["b"]) == "the weight b is not among the run's"
