"""The files of a run while it trains: checkpoints, logs of metrics, and events. Rank 0 writes them."""

from __future__ import annotations

from pathlib import Path

from shardtune.checkpoint.store import CheckpointStore
from shardtune.config import Recipe
from shardtune.launch.events import EventName, write_event
from shardtune.training.loggers import Tracker, open_tracker
from shardtune.training.worker.base import FSDPSftWorker


class RunFiles:
    """What a run writes between its first step and its last.

    Args:
        recipe: of the run.
        actor: the worker.
        run_dir: where the files are.

    Attributes:
        store: the checkpoints.
        tracker: the logs; without any until `open`.
        run_dir: where the files are.
    """

    def __init__(self, recipe: Recipe, actor: FSDPSftWorker, run_dir: Path) -> None:
        self._recipe, self._actor, self.run_dir = recipe, actor, run_dir
        runner = recipe.runner
        self.store = CheckpointStore(run_dir / "checkpoints", keep_last=runner.keep_last, keep_every=runner.keep_every)
        self.tracker = Tracker()

    def open(self, done: int, resumed_from: Path | None) -> None:
        """Open the files, cut back to a step; on rank 0.

        Args:
            done: the last step that is logged; -1: none.
            resumed_from: the checkpoint that training continues from.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.store.open()
        began, source = ("resume", str(resumed_from)) if resumed_from else ("start", "")
        self._event(began, source)
        self._open_tracker(done)
        if resumed_from is not None and self.is_own(resumed_from):
            self.store.go_back_to(self._actor.step)

    def go_back(self, undone: int, state: dict[str, object]) -> None:
        """Cut the files back to the checkpoint that was gone back to; on rank 0.

        Args:
            undone: steps.
            state: of the run, for the checkpoint.
        """
        step = self._actor.step
        self.tracker.close()
        self._open_tracker(step)
        self.store.go_back_to(step)
        self.store.update(step, state)
        self._event("rollback", f"{undone:,} steps are undone; the data goes on after the rows left out")

    def is_own(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is one of this run's."""
        return checkpoint.resolve().parent == self.store.folder.resolve()

    def mark_best(self, step: int) -> bool:
        """Mark the checkpoint of a step as the best; returns whether it exists, also where there is no best step."""
        if step < 0:
            return True
        exists = step in self.store.steps()
        if exists:
            self.store.mark_best(step)
        return exists

    def write_event(self, event: EventName, reason: str, **facts: object) -> None:
        """Record an event, on rank 0; every rank may call it."""
        if self._actor.ranks.is_main:
            self._event(event, reason, **facts)

    def _event(self, event: EventName, reason: str, **facts: object) -> None:
        ranks = self._actor.ranks.world_size
        write_event(self.run_dir, event, step=self._actor.step, ranks=ranks, reason=reason, **facts)

    def _open_tracker(self, done: int) -> None:
        self.tracker = open_tracker(
            self.run_dir,
            self._recipe.runner.logger,
            config=self._recipe.to_stored(),
            done=done,
            ranks=self._actor.ranks.world_size,
            report=self._actor.report,
        )
