"""What the checks of one adapter share: its case, a model to ask, a run to compare with, processes beside this one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from shardtune.errors import ShardtuneError
from shardtune.models.adapter import Adapter
from shardtune.models.find_adapter import find_adapter
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.verify.case import STEPS, Case
from shardtune.verify.processes import FreshProcess, RankPair
from shardtune.verify.result import Failed, Skipped
from shardtune.verify.trial import Trajectory, Trial, run, set_up

PARITY: Mapping[str, Any] = {
    "actor.optim.name": "SGD",
    "actor.optim.lr": 0.1,
    "actor.optim.args": {"momentum": 0.9},
}
"""An optimizer that does not magnify rounding, as Adam does where gradients are near zero."""
TRAINING: Mapping[str, Any] = {"actor.model.precision": "fp32"}
ONE_ROW: Mapping[str, Any] = {"actor.micro_batch_size": 1}
NO_PROCESSES = "it takes processes of its own, which were not wanted"


class CannotStart(Exception):
    """The model cannot be set up, which is one fault and not one of every check."""


class Kit:
    """What is shared is made when it is first asked for.

    Args:
        case: the adapter and its rows.
        processes: whether others may be started: two ranks, and a fresh one that loads what was saved.
    """

    def __init__(self, case: Case, *, processes: bool) -> None:
        self.case = case
        self.processes = processes
        self.ranks = RankPair(case.variant({**PARITY, **ONE_ROW}), case.folder)
        self.fresh = FreshProcess(case.folder)
        self.told: dict[str, str] = {}  # errors by their remedy: the check that has told them
        self.cannot_start = ""  # the check that has told why the model cannot be set up

    def close(self) -> None:
        """End the processes that are still there."""
        self.ranks.close()
        self.fresh.close()

    def adapter(self) -> Adapter:
        """An adapter that nothing has been asked of."""
        return find_adapter(self.case.recipe)

    def worker(self, changes: Mapping[str, Any]) -> SFTWorker:
        """A worker of its own, with other values in the recipe, ready for its first step."""
        try:
            return set_up(self.case.variant(changes))
        except (Failed, Skipped):
            raise
        except ShardtuneError as error:
            raise CannotStart(error.what, error.where, error.remedy) from error

    @cached_property
    def trial(self) -> Trial:
        """The model in fp64 and in evaluation mode."""
        return Trial(self.worker(PARITY))

    def steady_trial(self) -> Trial:
        """The same, for checks that compare two forwards.

        Raises:
            Skipped: what they would compare is drawn at random.
        """
        if self.trial.restless is not None:
            raise Skipped(self.trial.restless)
        return self.trial

    @cached_property
    def first_run(self) -> Trajectory:
        """A run in fp32 and in training mode, as a user's own."""
        return run(self.worker(TRAINING), STEPS)
