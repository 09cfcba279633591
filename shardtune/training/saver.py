"""Saves checkpoints during training, on all ranks, synchronously or in the background."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from shardtune.checkpoint.atomic import read_json
from shardtune.checkpoint.dcp import PendingSave
from shardtune.checkpoint.store import CheckpointStore
from shardtune.checkpoint.training_state import STATE_FILE
from shardtune.config import RunnerConfig
from shardtune.errors import CheckpointError, ModelError, disk_error
from shardtune.launch.events import write_event
from shardtune.launch.progress import PROGRESS, SAVING
from shardtune.parallel.finite import some
from shardtune.parallel.ranks import Ranks
from shardtune.training.observer import Observer
from shardtune.training.worker.base import FSDPSftWorker

T = TypeVar("T")


def on_main(ranks: Ranks, action: Callable[[], T]) -> T:
    """Run an action on rank 0; its result, or its error, is broadcast to every rank.

    Raises:
        CheckpointError: a disk that the action writes to is full, read-only or broken.
    """
    outcome: T | Exception | None = None
    if ranks.is_main:
        try:
            outcome = action()
        except Exception as error:
            outcome = disk_error(error) or error
            if outcome is not error:
                outcome.__cause__ = error
    outcome = ranks.broadcast(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return cast(T, outcome)


class UnfitWeights(ModelError):
    """The weights are not finite."""


def expected_saves(runner: RunnerConfig, steps: int) -> int:
    """How many checkpoints a run of so many steps writes, at least."""
    interval = runner.save_interval
    if isinstance(interval, str):
        return runner.max_epochs if runner.max_epochs > 0 and runner.max_steps <= 0 else 1
    return max(1, math.ceil(steps / interval)) if interval > 0 else 1


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A checkpoint that is being written."""

    folder: Path
    step: int
    began: float  # time.perf_counter()
    state: dict[str, object]
    best: bool
    notify: bool
    writes: list[PendingSave]


class Saver:
    """Writes checkpoints of a worker into a store; every rank calls every method.

    Args:
        store: where checkpoints are written.
        worker: whose state is saved.
        background: write while training continues.
        observer: its `saved` is called for each checkpoint.
        on_saved: called on every rank once a checkpoint is complete, with its step, path and whether it is best.
        sync_logs: makes the logs durable; called on rank 0 before a checkpoint counts.

    Attributes:
        saved_at: the step of the last checkpoint, -1 before the first.
        unfinished: the checkpoint that is being written, if any.
        waited: seconds that training has waited for checkpoints so far.
    """

    def __init__(
        self,
        store: CheckpointStore,
        worker: FSDPSftWorker,
        *,
        background: bool,
        observer: Observer,
        on_saved: Callable[[int, Path, bool], None],
        sync_logs: Callable[[], None],
    ) -> None:
        self._store = store
        self._worker = worker
        self._ranks = worker.ranks
        self._background = background
        self._observer = observer
        self._on_saved = on_saved
        self._sync_logs = sync_logs
        self.unfinished: Unfinished | None = None
        self._unannounced: tuple[int, Path] | None = None  # complete, without a notification so far
        self.saved_at = -1
        self.waited = 0.0

    def require_space(self) -> None:
        """Check, before training, that the disk has room for a checkpoint and for the model in `final/`.

        Where it has none for all checkpoints that will be kept, there is a line.
        """
        checkpoint, model = self._worker.state.checkpoint_bytes(), self._worker.state.model_bytes()
        on_main(self._ranks, lambda: self._store.require_space(checkpoint + model))
        runner, steps = self._worker.recipe.runner, self._worker.position.horizon
        saves, best = expected_saves(runner, steps), runner.best.monitor is not None
        note = on_main(self._ranks, lambda: self._store.note_on_space(checkpoint, model, saves, steps, best=best))
        if note:
            self._worker.report(note)

    def save(self, state: dict[str, object], *, best: bool = False, notify: bool = True) -> None:
        """Write a checkpoint of the worker's current state; if this step has one already, update only its run state.

        Args:
            state: the run's state (early stopping, metrics, pending requests), stored in the checkpoint.
            best: whether it is the best so far.
            notify: False where another `save` of this step follows, which sends the notification.
        """
        with PROGRESS.during(SAVING):
            self._save(state, best=best, notify=notify)

    def _save(self, state: dict[str, object], *, best: bool, notify: bool) -> None:
        step = self._worker.step
        self.finish()
        began = time.perf_counter()
        if self.saved_at == step:
            on_main(self._ranks, lambda: self._update(step, state, best))
            if notify and self._unannounced is not None:
                (_, path), self._unannounced = self._unannounced, None
                self._notify(step, path, best)
            return
        self.require_finite()
        needed = self._worker.state.checkpoint_bytes()
        folder = on_main(self._ranks, lambda: self._store.begin(step, needed_bytes=needed))
        writes = self._write(folder, step)
        self.unfinished = Unfinished(folder, step, began, state, best, notify, writes)
        self.saved_at = step
        self.waited += time.perf_counter() - began
        if not self._background:
            self.finish()

    def require_finite(self) -> None:
        """End training whose weights are not finite; every rank calls it.

        Raises:
            UnfitWeights: names the first such tensor, the step, and the last checkpoint, whose weights are finite.
        """
        worker = self._worker
        unfit = worker.state.finite.find()
        if not unfit:
            return
        self.finish()
        last, optim = on_main(self._ranks, self._store.latest), worker.recipe.actor.optim
        steadier = "lower actor.optim.lr" + (", or set actor.optim.clip_grad" if optim.clip_grad is None else "")
        steadier += ", or use actor.model.precision: bf16" if worker.state.loss_scale is not None else ""
        raise UnfitWeights(
            f"the weights are not finite after step {worker.step:,}: {some(unfit)}",
            where=f"step {worker.step:,}, actor.optim.lr = {optim.lr:g}",
            remedy=f"{steadier}; "
            + (
                "there is no checkpoint before it, so the same command begins anew"
                if last is None
                else f"the last checkpoint is fine: the same command continues from {last} with "
                f"{worker.recipe.runner.allowing('actor.optim')}"
            ),
        )

    def _write(self, folder: Path, step: int) -> list[PendingSave]:
        """Call the worker's `save_checkpoint`; an override may accept only folder and step, and then training waits."""
        if self._background and not self._takes_background():
            self._background = False
            self._worker.report(
                f"runner.async_save: save_checkpoint of {type(self._worker).__name__} takes no background=True, so "
                "training waits for each checkpoint"
            )
        if not self._background:
            return self._worker.save_checkpoint(folder, step) or []
        return self._worker.save_checkpoint(folder, step, background=True) or []

    def _takes_background(self) -> bool:
        try:
            inspect.signature(self._worker.save_checkpoint).bind(self._store.folder, 0, background=True)
        except TypeError:
            return False
        return True

    def finish_if_written(self) -> None:
        """Commit a background checkpoint once rank 0's writes are on the disk."""
        if self.unfinished is not None:
            writes = self.unfinished.writes
            if self._ranks.broadcast(all(write.done() for write in writes)):
                self.finish()

    def finish(self) -> None:
        """Wait until the pending checkpoint is written, then commit it."""
        if self.unfinished is None:
            return
        began = time.perf_counter()
        done, self.unfinished = self.unfinished, None
        with PROGRESS.during(SAVING):
            for write in done.writes:
                write.wait()
            self._ranks.barrier()
            path = on_main(self._ranks, lambda: self._commit(done))
        self.waited += time.perf_counter() - began
        if done.notify:
            self._notify(done.step, path, done.best)
        else:
            self._unannounced = done.step, path

    def _commit(self, done: Unfinished) -> Path:
        self._require_state(done)
        self._sync_logs()
        path = self._store.commit(done.folder, done.step, done.state, best=done.best)
        facts = {"seconds": round(time.perf_counter() - done.began, 3), **({"best": True} if done.best else {})}
        write_event(self._store.folder.parent, "save", step=done.step, ranks=self._ranks.world_size, **facts)
        return path

    def _require_state(self, done: Unfinished) -> None:
        """Refuse what a `save_checkpoint` of the user's has written, if the run could not continue from it."""
        kind = type(self._worker)
        if (
            kind.save_checkpoint is FSDPSftWorker.save_checkpoint
            or kind.load_checkpoint is not FSDPSftWorker.load_checkpoint
        ):
            return
        file = done.folder / STATE_FILE
        step = read_json(file).get("step") if file.is_file() else None
        if step != done.step:
            written = f"{STATE_FILE} of step {step}" if file.is_file() else f"no {STATE_FILE}"
            raise CheckpointError(
                f"{kind.__name__}.save_checkpoint wrote {written} for the checkpoint of step {done.step}, from which "
                "the run could not continue",
                where=f"{kind.__name__}.save_checkpoint",
                remedy="call super().save_checkpoint(path, step) with what it is given; files of your own may lie "
                "beside those that it writes, or load_checkpoint reads yours",
            )

    def _update(self, step: int, state: dict[str, object], best: bool) -> None:
        self._sync_logs()
        self._store.update(step, state, best=best)

    def _notify(self, step: int, path: Path, best: bool) -> None:
        self._observer.saved(step, path)
        self._on_saved(step, path, best)
