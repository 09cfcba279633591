"""The loop: train a step, log, evaluate and save when it is time, stop when asked, agree on all of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from omegaconf import DictConfig

from shardtune.checkpoint.durable import require_space
from shardtune.checkpoint.sharded import PendingSave
from shardtune.checkpoint.store import CheckpointStore, read_state
from shardtune.config import Recipe, load_recipe
from shardtune.errors import Interrupted
from shardtune.evaluate import check_monitors
from shardtune.interrupt import StopSignal
from shardtune.track import Tracker, open_tracker
from shardtune.worker import FSDPSftWorker

T = TypeVar("T")


class Observer(Protocol):
    """Who is told how training goes, to show it."""

    def started(self, step: int, total_steps: int) -> None: ...
    def stepped(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def saved(self, step: int, path: Path) -> None: ...
    def said(self, text: str) -> None: ...
    def finished(self) -> None: ...


class Silent:
    """An observer that shows nothing."""

    def started(self, step: int, total_steps: int) -> None: ...
    def stepped(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def saved(self, step: int, path: Path) -> None: ...
    def said(self, text: str) -> None: ...
    def finished(self) -> None: ...


@dataclass(slots=True)
class Watch:
    """The best value of a metric so far; what early stopping and the best checkpoint are decided by.

    Attributes:
        monitor: the metric's name.
        mode: min or max.
        min_delta: how much better counts as better.
        best: the best value, None before the first.
        best_step: where it was measured.
        bad: evaluations since then.
    """

    monitor: str
    mode: str
    min_delta: float = 0.0
    best: float | None = None
    best_step: int = -1
    bad: int = 0

    def update(self, value: float, step: int) -> bool:
        """Take a new value; returns whether it is the best."""
        gain = -math.inf if math.isnan(value) else math.inf
        if self.best is not None and not math.isnan(value):
            gain = self.best - value if self.mode == "min" else value - self.best
        if gain > self.min_delta:
            self.best, self.best_step, self.bad = value, step, 0
            return True
        self.bad += 1
        return False


def direction(mode: str, monitor: str) -> str:
    """min or max; `auto` reads it off the name: accuracies grow, everything else falls."""
    if mode != "auto":
        return mode
    return "max" if "accuracy" in monitor else "min"


class SFTRunner:
    """Runs a worker from wherever it stands to the end of its recipe.

    Args:
        cfg: the recipe.
        actor: the worker; every rank has one.
        run_dir: where the run's files go; None: as the recipe's logger section says.
        observer: told how it goes, on rank 0.
        stop: polled between steps and evaluation batches.
        resume_from: a checkpoint to continue.
    """

    def __init__(
        self,
        cfg: DictConfig | Recipe,
        actor: FSDPSftWorker,
        *,
        run_dir: Path | None = None,
        observer: Observer | None = None,
        stop: StopSignal | None = None,
        resume_from: Path | None = None,
    ) -> None:
        self._recipe = cfg if isinstance(cfg, Recipe) else load_recipe(cfg)
        self._actor = actor
        self._ranks = actor.ranks
        logger = self._recipe.runner.logger
        self.run_dir = run_dir or Path(logger.log_path) / str(logger.experiment_name)
        self._observer: Observer = observer if observer is not None and self._ranks.is_main else Silent()
        self._stop = stop or StopSignal()
        self._resume_from = resume_from
        runner = self._recipe.runner
        self._store = CheckpointStore(
            self.run_dir / "checkpoints", keep_last=runner.keep_last, keep_every=runner.keep_every
        )
        stop_config, best = runner.early_stop, runner.best
        self._early = None
        if stop_config.enabled:
            mode = direction(stop_config.mode, stop_config.monitor)
            self._early = Watch(stop_config.monitor, mode, stop_config.min_delta)
        self._best = Watch(best.monitor, direction(best.mode, best.monitor)) if best.monitor else None
        self._pending: tuple[Path, int, dict[str, Any], bool, list[PendingSave]] | None = None
        self._evaluated_at = self._saved_at = -1
        self._last_eval: dict[str, float] = {}
        self._line: dict[str, float] = {}
        self._tracker = Tracker([])
        self.on_start: Callable[[], None] = lambda: None  # called once all is built, before the first step
        self._prepared = False
        self._resumed_at: int | None = None

    def prepare(self) -> None:
        """Build all that training needs, and find what is wrong with it; nothing is written yet. `run` begins with it."""
        if self._prepared:
            return
        self._actor.setup()
        check_monitors(self._recipe.runner, self._actor.evaluation_metrics())
        needed = self._actor.checkpoint_bytes()
        self._on_main(lambda: require_space(self.run_dir, needed))
        self._resumed_at = self._resume()
        self._prepared = True

    def run(self) -> dict[str, float]:
        """Train to the end; returns the metrics of the last evaluation. Raises `Interrupted` once a signal's checkpoint is written."""
        actor, runner = self._actor, self._recipe.runner
        self.prepare()
        resumed_at = self._resumed_at
        total = actor.total_steps()
        if self._ranks.is_main:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            logger = runner.logger
            self._tracker = open_tracker(
                self.run_dir,
                logger.logger_backends,
                project=logger.project_name,
                name=str(logger.experiment_name),
                config=self._recipe.to_dict(),
                resumed_at=resumed_at,
            )
        actor.poll = self._poll
        self.on_start()
        self._observer.started(actor.step, total)
        try:
            if resumed_at is None and runner.eval_before_training and actor.eval_loaders:
                self._evaluate()
                self._tracker.log(actor.step, self._line)
                self._line = {}
            self._loop()
            self._finish_save()
        finally:
            self._observer.finished()
            self._tracker.close()
        return self._last_eval

    def _resume(self) -> int | None:
        if self._resume_from is None:
            return None
        step = self._actor.load_checkpoint(self._resume_from)
        state = read_state(self._resume_from)
        for watch, saved in ((self._early, state.get("early")), (self._best, state.get("best"))):
            if watch is not None and saved is not None and saved["monitor"] == watch.monitor:
                watch.best, watch.best_step, watch.bad = saved["best"], saved["best_step"], saved["bad"]
        self._evaluated_at = int(state.get("evaluated_at", -1))
        self._last_eval = dict(state.get("last_eval", {}))
        self._line = dict(state.get("line", {}))
        self._saved_at = step
        self._observer.said(f"continuing from step {step} ({self._resume_from})")
        return step

    def _loop(self) -> None:
        actor = self._actor
        if self._line:  # stopped in the middle of the evaluation after this step
            self._after_step(epoch_ended=actor.data_state.rows_consumed == 0, advanced=True)
        while not actor.finished and not self._stopped_early:
            self._poll()
            step, epoch = actor.step, actor.data_state.epoch
            metrics = actor.run_training()
            advanced = actor.step != step
            if advanced:
                self._line = metrics
            else:
                self._observer.said(f"after step {step}: the gradient was not finite, these rows are passed over")
            self._observer.stepped(actor.step, metrics)
            self._after_step(epoch_ended=actor.data_state.epoch != epoch, advanced=advanced)
        if self._saved_at != actor.step:
            self._save()

    def _after_step(self, *, epoch_ended: bool, advanced: bool) -> None:
        """Evaluate, log one line for the step, save: each where it is due."""
        actor, runner = self._actor, self._recipe.runner
        best = False
        if actor.eval_loaders and (actor.finished or self._due(runner.val_check_interval, epoch_ended, advanced)):
            best = self._evaluate()
        if self._evaluated_at == actor.step or (advanced and actor.step % runner.logger.log_interval == 0):
            self._tracker.log(actor.step, self._line)
        self._line = {}
        if best or self._due(runner.save_interval, epoch_ended, advanced):
            self._save(best=best)

    def _due(self, interval: int | str, epoch_ended: bool, advanced: bool) -> bool:
        if interval == "epoch":
            return epoch_ended
        assert isinstance(interval, int)
        return advanced and interval > 0 and self._actor.step % interval == 0

    @property
    def _stopped_early(self) -> bool:
        early = self._early
        return early is not None and early.bad >= self._recipe.runner.early_stop.patience

    def _poll(self) -> None:
        """Stop together once any rank was told to: save where training stands, then say so."""
        if not self._ranks.largest(float(self._stop.asked)):
            return
        self._observer.said("stopping: saving a checkpoint first")
        self._finish_save()
        if self._saved_at != self._actor.step:
            self._save()
            self._finish_save()
        raise Interrupted(f"stopped at step {self._actor.step}; the same command continues")

    def _evaluate(self) -> bool:
        """Evaluate all sets into the step's line; returns whether the watched metric is the best so far."""
        step = self._actor.step
        metrics = self._actor.run_eval()
        check_monitors(self._recipe.runner, metrics)
        if self._early is not None:
            self._early.update(metrics[self._early.monitor], step)
        self._evaluated_at, self._last_eval = step, metrics
        self._line = {"epoch": self._actor.epoch, **self._line, **metrics}
        self._observer.evaluated(step, metrics)
        return self._best is not None and self._best.update(metrics[self._best.monitor], step)

    def _save(self, best: bool = False) -> None:
        """Write a checkpoint of the current step, or mark the one that is there as the best."""
        step = self._actor.step
        self._finish_save()
        if self._saved_at == step:
            if best and self._ranks.is_main:
                self._store.mark_best(step)
            self._ranks.barrier()
            return
        needed = self._actor.checkpoint_bytes()
        temporary = self._on_main(lambda: self._store.begin(step, needed_bytes=needed))
        background = self._recipe.runner.async_save
        pending = self._actor.save_checkpoint(temporary, step, background=background)
        self._pending = (temporary, step, self._state(), best, pending)
        self._saved_at = step
        if not background:
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait for the checkpoint in writing, then give it its name."""
        if self._pending is None:
            return
        temporary, step, state, best, pending = self._pending
        self._pending = None
        for save in pending:
            save.wait()
        self._ranks.barrier()
        path = self._on_main(lambda: self._store.commit(temporary, step, state, best=best))
        self._observer.saved(step, path)

    def _on_main(self, action: Callable[[], T]) -> T:
        """Do something on rank 0; its result, or its error, is every rank's."""
        outcome: T | Exception | None = None
        if self._ranks.is_main:
            try:
                outcome = action()
            except Exception as error:
                outcome = error
        outcome = self._ranks.broadcast(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        return cast(T, outcome)

    def _state(self) -> dict[str, Any]:
        return {
            "early": asdict(self._early) if self._early else None,
            "best": asdict(self._best) if self._best else None,
            "evaluated_at": self._evaluated_at,
            "line": {key: value for key, value in self._line.items() if math.isfinite(value)},
            "last_eval": {key: value for key, value in self._last_eval.items() if math.isfinite(value)},
        }

    @property
    def store(self) -> CheckpointStore:
        return self._store
