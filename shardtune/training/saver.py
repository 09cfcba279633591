"""Saving checkpoints of a run in training: on all ranks, at once or in the background."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from shardtune.checkpoint.atomic import require_space
from shardtune.checkpoint.dcp import PendingSave
from shardtune.checkpoint.store import CheckpointStore
from shardtune.errors import ConfigError
from shardtune.parallel.ranks import Ranks
from shardtune.training.observer import Observer
from shardtune.training.worker.base import FSDPSftWorker

T = TypeVar("T")


def on_main(ranks: Ranks, action: Callable[[], T]) -> T:
    """Do something on rank 0; its result, or its error, is every rank's."""
    outcome: T | Exception | None = None
    if ranks.is_main:
        try:
            outcome = action()
        except Exception as error:
            outcome = error
    outcome = ranks.broadcast(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return cast(T, outcome)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A checkpoint that is being written."""

    folder: Path
    step: int
    state: dict[str, object]
    best: bool
    tell: bool
    writes: list[PendingSave]


class Saver:
    """Writes checkpoints of a worker into a store; every rank calls every method.

    Args:
        store: where to.
        worker: what of.
        background: write while training goes on.
        observer: told of each checkpoint.
        on_saved: called on every rank once a checkpoint has its name: its step, its place, whether it is the best.

    Attributes:
        saved_at: the step of the last checkpoint, -1 before the first.
        unfinished: the checkpoint that is being written; None where there is none.
    """

    def __init__(
        self,
        store: CheckpointStore,
        worker: FSDPSftWorker,
        *,
        background: bool,
        observer: Observer,
        on_saved: Callable[[int, Path, bool], None],
    ) -> None:
        self._store = store
        self._worker = worker
        self._ranks = worker.ranks
        self._background = background
        self._observer = observer
        self._on_saved = on_saved
        self.unfinished: Unfinished | None = None
        self._untold: tuple[int, Path] | None = None  # a checkpoint that has its name, which nobody was told of
        self.saved_at = -1

    def require_space(self) -> None:
        """Refuse to train what could not be saved: there is room for a checkpoint and for the model in `final/`."""
        needed = self._worker.state.checkpoint_bytes() + self._worker.state.model_bytes()
        on_main(self._ranks, lambda: require_space(self._store.folder, needed))

    def save(self, state: dict[str, object], *, best: bool = False, tell: bool = True) -> None:
        """Write a checkpoint of the worker as it stands; if there is one of this step, only what it says of the run.

        Args:
            state: what the checkpoint says of the run.
            best: whether it is the best so far.
            tell: False where another `save` of this step follows, after which it is told of.
        """
        step = self._worker.step
        self.finish()
        if self.saved_at == step:
            on_main(self._ranks, lambda: self._store.update(step, state, best=best))
            if tell and self._untold is not None:
                (_, path), self._untold = self._untold, None
                self._tell(step, path, best)
            return
        needed = self._worker.state.checkpoint_bytes()
        folder = on_main(self._ranks, lambda: self._store.begin(step, needed_bytes=needed))
        writes = self._write(folder, step)
        self.unfinished = Unfinished(folder, step, state, best, tell, writes)
        self.saved_at = step
        if not self._background:
            self.finish()

    def _write(self, folder: Path, step: int) -> list[PendingSave]:
        """Call the worker's `save_checkpoint`; one that a user has overridden may take no more than folder and step."""
        if not self._background:
            return self._worker.save_checkpoint(folder, step) or []
        try:
            inspect.signature(self._worker.save_checkpoint).bind(folder, step, background=True)
        except TypeError as error:
            raise ConfigError(
                f"runner.async_save: save_checkpoint of {type(self._worker).__name__} takes no background=True",
                where="runner.async_save",
                remedy="write save_checkpoint(self, path, step, *, background=False) and return what "
                "super().save_checkpoint(path, step, background=background) returns, or leave runner.async_save out",
            ) from error
        return self._worker.save_checkpoint(folder, step, background=True)

    def finish_if_written(self) -> None:
        """Give a checkpoint in the background its name as soon as rank 0 knows it to be on the disk."""
        if self.unfinished is not None:
            writes = self.unfinished.writes
            if self._ranks.broadcast(all(write.done() for write in writes)):
                self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint in writing, then give it its name."""
        if self.unfinished is None:
            return
        done, self.unfinished = self.unfinished, None
        for write in done.writes:
            write.wait()
        self._ranks.barrier()
        path = on_main(self._ranks, lambda: self._store.commit(done.folder, done.step, done.state, best=done.best))
        if done.tell:
            self._tell(done.step, path, done.best)
        else:
            self._untold = done.step, path

    def _tell(self, step: int, path: Path, best: bool) -> None:
        self._observer.saved(step, path)
        self._on_saved(step, path, best)
