"""What the checks of one adapter share: its case, a model, a run to compare with, and other processes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from shardtune.errors import ShardtuneError
from shardtune.models.adapter import Adapter
from shardtune.models.find_adapter import find_adapter
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.verify.case import STEPS, Case
from shardtune.verify.processes import FreshProcess, RankPair
from shardtune.verify.result import Failed, Skipped
from shardtune.verify.trial import Trajectory, Trial, run, set_up

MOMENTUM = 0.9
PARITY: Mapping[str, object] = {
    "actor.optim.name": "SGD",
    "actor.optim.lr": 0.1,
    "actor.optim.args": {"momentum": MOMENTUM},
}
"""An optimizer that does not amplify rounding, as Adam does where gradients are near zero."""
TRAINING: Mapping[str, object] = {"actor.model.precision": "fp32"}
ONE_ROW: Mapping[str, object] = {"actor.micro_batch_size": 1}
NO_PROCESSES = "it needs other processes, which were switched off"


class CannotStart(Exception):
    """The model cannot be set up, which is reported once and not by every check."""


class Kit:
    """Shared objects are made when they are first used.

    Args:
        case: the adapter and its rows.
        processes: whether others may be started: two ranks, and a fresh one that loads what was saved.
    """

    def __init__(self, case: Case, *, processes: bool) -> None:
        self.case = case
        self.processes = processes
        self.ranks = RankPair(case.variant({**PARITY, **ONE_ROW}), case.folder)
        self.fresh = FreshProcess(case.folder)
        self.reported: dict[str, str] = {}  # errors by their remedy: the check that reported them
        self.cannot_start = ""  # the check that reported why the model cannot be set up

    def close(self) -> None:
        """End the processes that are still running."""
        self.ranks.close()
        self.fresh.close()

    def adapter(self) -> Adapter:
        """A new adapter, of which nothing has been called yet."""
        return find_adapter(self.case.recipe)

    def worker(self, changes: Mapping[str, object]) -> SFTWorker:
        """A new worker, with changed values in the recipe, ready for its first step."""
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

    def deterministic_trial(self) -> Trial:
        """The same, for checks that compare two forwards.

        Raises:
            Skipped: the loss is random even in evaluation mode, and with torch's draws held.
        """
        if self.trial.nondeterminism is not None:
            raise Skipped(self.trial.nondeterminism)
        return self.trial

    @cached_property
    def first_run(self) -> Trajectory:
        """A run in fp32 and in training mode, as a user's own."""
        return run(self.worker(TRAINING), STEPS)
