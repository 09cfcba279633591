"""The training loop: step, log, evaluate and save when due, stop on request; all ranks decide alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig

from shardtune.batch.seeds import derive_seed, seed_generators
from shardtune.checkpoint.state_file import read_state
from shardtune.checkpoint.store import directory_is_gone
from shardtune.config import Recipe, load_recipe
from shardtune.errors import Interrupted, ModelError, ShardtuneError
from shardtune.evaluate.loss import check_monitors
from shardtune.launch.events import Alive
from shardtune.launch.outcome import recorded_end
from shardtune.launch.progress import CALLBACK, EVALUATION, FIRST_STEP, LOADING, PROGRESS, START, STEP
from shardtune.launch.signals import AFTER_LAST_STEP, BEFORE_FIRST_STEP, StopSignal
from shardtune.parallel.gradient_hooks import refuse_gradient_hooks
from shardtune.training.anomalies import Anomaly, beyond_fp16
from shardtune.training.callbacks import (
    NOTHING,
    Ask,
    CallbackError,
    Callbacks,
    Evaluated,
    Event,
    RolledBack,
    Saved,
    StepEnd,
    TrainEnd,
    TrainStart,
    load_callbacks,
)
from shardtune.training.early_stopping import Watches, WatchesState
from shardtune.training.loggers import SAMPLES, check_logger
from shardtune.training.observer import Observer, Silent
from shardtune.training.profiler import FOLDER, ProfileWindow
from shardtune.training.recorder import Recorder, Recording
from shardtune.training.recovery import Recovery, load_first, replay_command
from shardtune.training.run_files import RunFiles
from shardtune.training.saver import Saver, UnfitWeights, on_main
from shardtune.training.step import TRAIN_METRICS
from shardtune.training.worker.assigned_methods import refuse_assigned_methods
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.reported import check_worker_monitors, evaluation_method, training_method
from shardtune.training.worker.run_context import RunContext, set_up


class SFTRunner:
    """Runs a worker from its current step to the end of its recipe.

    It writes checkpoints, metrics and answers into the run directory. What makes a run of that directory (the lock, the
    resolved recipe, the manifest) and the model in `final/` are written by `shardtune.train`, which calls this class.
    Used by hand, it is followed by `actor.export(Path("my-model"), "auto")`, which every rank calls and which writes
    what `final/` would hold.

    Args:
        cfg: the recipe.
        actor: the worker; every rank has one.
        run_dir: where the run's files are written; None: the directory of the recipe's logger section.
        observer: receives progress events, on rank 0.
        stop: polled between steps and evaluation batches.
        resume_from: the checkpoint to continue from.
        older: earlier ones, newest first, for the case that it cannot be loaded.
        notes: lines for the first screen, besides the worker's own.
        on_start: called once everything is built, before the first step.
        is_gone: polled on rank 0: whether the run directory has disappeared.
        recording: what is recorded of each step; None: nothing.
        measured_by: a hash of each key that evaluations depend on beside the weights.

    Attributes:
        ended: why training ended; "" until then.
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
        older: Sequence[Path] = (),
        notes: Sequence[str] = (),
        on_start: Callable[[], None] | None = None,
        is_gone: Callable[[], bool] | None = None,
        recording: Recording | None = None,
        measured_by: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._recipe = cfg if isinstance(cfg, Recipe) else load_recipe(cfg)
        self._actor = actor
        self._ranks = actor.ranks
        runner = self._recipe.runner
        self.run_dir = run_dir or Path(runner.logger.log_path) / str(runner.logger.experiment_name)
        self._observer: Observer = observer if observer is not None and self._ranks.is_main else Silent()
        self._context = RunContext(
            poll=self._poll,
            report=None if observer is None else self._observer.log,
            samples_dir=self.run_dir / SAMPLES,
            notes=notes,
            tries_loss=True,
        )
        self._stop = stop or StopSignal()
        self._resume_from, self._older = resume_from, older
        self._files = RunFiles(self._recipe, actor, self.run_dir)
        self.store = self._files.store
        self._callbacks = Callbacks(load_callbacks(runner.callbacks), self._ranks)
        self._listens_to_steps = self._callbacks.listen_to(StepEnd)
        self._requested = NOTHING  # by callbacks, still to be carried out
        self._saver = Saver(
            self.store,
            actor,
            background=runner.async_save,
            observer=self._observer,
            on_saved=self._saved,
            sync_logs=lambda: self._files.tracker.sync(),
        )
        self._watches = Watches(runner, measured_by)
        window = ProfileWindow(runner.profile_steps, self.run_dir / FOLDER, self._ranks.rank)
        self._profile = window if runner.profile_steps else None
        self._recovery = Recovery(actor, self._files, self._saver, self._observer)
        self._evaluated_at = -1
        self._last_eval: dict[str, float] = {}
        self._line: dict[str, float] = {}  # metrics of the step that is not logged yet
        self._saves_logged = 0.0  # seconds of waiting for checkpoints that are in logged lines
        self._seconds: dict[str, float] = {}  # of the parts of that step, and of evaluations and saves since the last
        self._alive = Alive(self.run_dir, lambda: actor.step)  # on rank 0
        self._on_start, self._is_gone = on_start, is_gone
        self._recording = recording
        self._recorder: Recorder | None = None
        self._prepared = False
        self.ended = ""

    def prepare(self) -> None:
        """Build everything that training needs and check it; writes nothing. `run` calls it first."""
        if self._prepared:
            return
        actor = self._actor
        on_main(self._ranks, lambda: check_logger(self._recipe.runner.logger))
        set_up(actor, self._context)
        refuse_assigned_methods(actor)
        self._model, self._position, self._evaluates = actor.state, actor.position, actor.evaluates
        self._run_training, self._run_eval = training_method(actor), evaluation_method(actor)
        check_worker_monitors(actor)
        refuse_gradient_hooks(actor.weights.parameters.items(), self._ranks, own=actor.weights.hooked)
        self._saver.require_space()
        self._callbacks.make()
        if self._resume_from is not None:
            self._resume_from = load_first(actor, [self._resume_from, *self._older], self._observer.log)
            self._resume(self._resume_from)
            self._recovery.resume(self._resume_from)
        if self._recording is not None:
            self._recorder = Recorder(self._recording, actor, self._stop)
        self._prepared = True

    def run(self) -> dict[str, float]:
        """Train to the end.

        Returns:
            The metrics of the last evaluation.

        Raises:
            Interrupted: stopped by a signal, after writing a checkpoint.
            CallbackError: a callback failed; raised after writing a checkpoint.
        """
        self.prepare()
        ranks, actor = self._ranks, self._actor
        recorded = recorded_end(self.run_dir, lambda: actor.step, ranks=ranks.world_size, is_main=ranks.is_main)
        with self._stop.deferred():
            self._open()
            try:
                if ranks.is_main:
                    self._alive.begin()
                with recorded:
                    self._train()
                self._stop.message = AFTER_LAST_STEP
            finally:
                PROGRESS.phase = START  # what follows has no steps that could be counted
                if ranks.is_main:
                    self._alive.end()
                if self._profile is not None:
                    self._profile.close()
                self._observer.finished()
                self._files.tracker.close()
        return self._last_eval

    def _resume(self, checkpoint: Path, how: str = "continuing") -> None:
        actor, state = self._actor, read_state(checkpoint)
        watched = WatchesState(
            early=state.get("early"), best=state.get("best"), measured_by=state.get("measured_by", {})
        )
        for note in self._watches.restore(watched):
            self._observer.log(note)
        self._evaluated_at = int(state["evaluated_at"])
        self._last_eval = dict(state["last_eval"])
        self._line = dict(state["line"])
        for note in self._callbacks.restore(state.get("callbacks", [])):
            self._observer.log(note)
        if self._files.is_own(checkpoint):
            self._saver.saved_at = actor.step
        self._observer.log(f"{how} after step {actor.step} ({checkpoint})")
        before, now = state["total_steps"], actor.position.horizon
        if before == now:  # a stop requested for the shorter run does not apply to a longer one
            self._requested = Ask(state.get("asked", 0))
        else:
            self._observer.log(f"the schedule's horizon moves from {before} to {now} steps")

    def _open(self) -> None:
        """Open the run's files, cut back to the current step."""
        actor = self._actor
        # Steps logged after the checkpoint are repeated; so is a step that was saved before its evaluation ended.
        done = -1 if self._resume_from is None else actor.step - bool(self._line)
        on_main(self._ranks, lambda: self._files.open(done, self._resume_from))
        self._forget_missing_best()
        if self._on_start is not None:
            self._on_start()
        self._observer.started(actor.step, actor.position.horizon)
        outside = None if self._profile is None else self._profile.outside(actor.step, actor.position.horizon)
        if outside is not None:
            self._observer.log(outside)

    def _train(self) -> None:
        """Train, with the first and last events; a checkpoint is written when a callback fails."""
        PROGRESS.phase, PROGRESS.step = FIRST_STEP if self._recipe.actor.model.compile else STEP, self._actor.step
        try:
            self._notify(TrainStart, resumed_from=self._resume_from)
            self._loop()
            self._saver.finish()
            if self._callbacks.listen_to(TrainEnd):
                last = on_main(self._ranks, self.store.latest)
                self._notify(TrainEnd, metrics=self._last_eval, checkpoint=last)
            self._poll()
        except CallbackError:
            self._callbacks.silence()
            try:
                self._save_now("a callback failed: saving a checkpoint first")
            except ShardtuneError as unsaved:  # a second error, which is not to hide the first
                self._observer.log(f"no checkpoint was saved: {unsaved}")
            raise

    def _notify(self, kind: type[Event], **facts: Any) -> None:
        """Call the callbacks that listen to such events, and collect their requests."""
        if not self._callbacks.listen_to(kind):
            return
        actor = self._actor
        if "metrics" in facts:
            facts["metrics"] = MappingProxyType(dict(facts["metrics"]))
        progress = {
            "step": actor.step,
            "total_steps": actor.position.horizon,
            "epoch": actor.position.epoch,
            "run_dir": self.run_dir,
        }
        with PROGRESS.during(CALLBACK):
            self._requested |= self._callbacks.tell(kind(**{**progress, **facts}))
        if Ask.EVALUATE in self._requested and not actor.evaluates:
            raise CallbackError(
                f"{kind.method} of a callback requests an evaluation, but there is nothing to evaluate on",
                where="runner.callbacks",
                remedy="set data.eval_data_paths or data.eval_split, or do not request one",
            )

    def _saved(self, step: int, path: Path, best: bool) -> None:
        self._notify(Saved, step=step, path=path, best=best)

    def _loop(self) -> None:
        model, position = self._model, self._position
        if model.step == 0 and self._recipe.runner.eval_before_training and self._evaluates:
            if self._evaluated_at < 0:
                self._evaluate()
                self._log()
        elif self._line:  # stopped in the middle of the evaluation after this step
            self._after_step(epoch_ended=position.state.rows_consumed == 0, advanced=True)
        if position.anomalies.may_roll_back and self._saver.saved_at < 0:
            self._saver.save(self._state())  # to go back to
        while not (position.finished(model.step) or self._watches.stop or Ask.STOP in self._requested):
            self._poll()
            if self._saver.unfinished is not None:
                self._saver.finish_if_written()
            self._step()
        self.ended = self._why_ended()
        left_out = position.anomalies.describe()
        self._observer.log(f"ended after step {model.step:,}: {self.ended}{left_out and f'; {left_out}'}")
        without_best = "" if self._watches.best is None else self._watches.best.without_best()
        if without_best:
            self._observer.log(without_best)
        if not model.step and position.skipped_steps:
            raise ModelError(
                f"nothing was trained: all {position.skipped_steps} steps were passed over, "
                f"the last as {position.problem}",
                where=f"the rows {position.passed_over}",
                remedy="look at what the loss of these rows is, and whether they have targets and finite values"
                + beyond_fp16(self._recipe.actor.model.precision),
            )
        if position.none_finite:
            raise ModelError(
                f"after step {model.step} the loss or its gradient is finite for no row, so the model is not written",
                where=f"the rows {position.passed_over}",
                remedy="lower actor.optim.lr, or set actor.optim.clip_grad, and continue from a checkpoint before this "
                "step (runner.resume_dir), or with another runner.logger.experiment_name",
            )
        self._saver.save(self._state())

    def _why_ended(self) -> str:
        if Ask.STOP in self._requested:
            return f"{' and '.join(self._callbacks.stopped_by) or 'a callback'} requested it"
        if self._watches.stop and self._watches.early is not None:
            return self._watches.early.describe()
        return self._position.limit(self._model.step)

    def _step(self) -> None:
        model, position = self._model, self._position
        step, epoch = model.step, position.state.epoch
        if self._profile is not None:
            self._profile.before(step + 1)
        began = time.perf_counter()
        # For what a worker's own method draws; each forward is seeded by itself.
        seed_generators(derive_seed(self._recipe.runner.seed, step, self._ranks.draws_rank, "step"))
        metrics = self._run_training()
        PROGRESS.rounds += 1
        PROGRESS.phase, PROGRESS.step = STEP, model.step
        self._seconds |= {"step": time.perf_counter() - began, **self._actor.step_seconds}
        if self._recorder is not None:
            self._recorder.stepped(metrics)
        advanced = model.step != step
        if advanced:
            self._line = metrics
            trace = None if self._profile is None else self._profile.after(model.step)
            if trace is not None:
                self._observer.log(f"the profile is in {trace}")
        else:
            self._passed_over(step)
        self._observer.stepped(model.step, metrics)
        if self._listens_to_steps:
            self._notify(StepEnd, metrics=metrics, updated=advanced)
        try:
            self._after_step(epoch_ended=position.state.epoch != epoch, advanced=advanced)
        except UnfitWeights as unfit:  # the step has made them so, and they were to be saved
            if self._recipe.runner.on_nonfinite != "rollback":
                raise
            rows = f"those before {position.state.rows_consumed:,} of epoch {position.state.epoch}"
            values = (metrics.get(name, math.nan) for name in ("train/loss", "train/grad_norm"))
            self._observer.log(unfit.what)
            self._follow(position.anomalies.add("nonfinite", unfit.what, rows, position.state, *values), step)

    def _passed_over(self, step: int) -> None:
        """Report a step that changed nothing, and do what the recipe says follows it."""
        position, anomaly = self._position, self._position.anomalies.last
        if anomaly is None or anomaly.action != "rollback":
            self._saver.require_finite()
        self._observer.log(f"after step {step}: {position.skipped}")
        if anomaly is not None:
            self._follow(anomaly, step)

    def _follow(self, anomaly: Anomaly, step: int) -> None:
        """Do what the recipe says follows an anomaly of the step after `step` steps."""
        self._recovery.begin(anomaly)
        if anomaly.over_budget or anomaly.action == "stop":
            raise self._recovery.ended(anomaly, step, self._state)
        if anomaly.action == "rollback":
            requested = self._requested
            with PROGRESS.during(LOADING):
                checkpoint, undone = self._recovery.go_back()
                self._resume(checkpoint, f"rolled back by {undone:,} step{'s' * (undone != 1)}: continuing")
                self._requested = requested
                self._recovery.go_on_behind(undone, self._state)
                self._forget_missing_best()
            self._notify(RolledBack, checkpoint=checkpoint, undone=undone)
        command = replay_command(self.run_dir, self._actor.step)
        self._observer.log(f"{command} --rows names the rows that are left out")

    def _forget_missing_best(self) -> None:
        """Forget the best checkpoint so far, with a line, unless it exists and is marked as the best."""
        best = self._watches.best
        if best is not None and not on_main(self._ranks, lambda: self._files.mark_best(best.best_step)):
            self._observer.log(
                f"runner.best begins anew: its best checkpoint so far, of step {best.best_step:,}, is not in "
                f"{self.store.folder}"
            )
            best.forget()

    def _after_step(self, *, epoch_ended: bool, advanced: bool) -> None:
        """Evaluate, log one line for the step and save, each when due."""
        step, runner = self._model.step, self._recipe.runner
        save = self._due(runner.save_interval, epoch_ended, advanced) or (advanced and Ask.SAVE in self._requested)
        measure = save
        if self._evaluates:
            finished = self._position.finished(step)
            requested = Ask.EVALUATE in self._requested or Ask.STOP in self._requested or self._evaluated_at == step
            measure = finished or requested or self._due(runner.eval_interval, epoch_ended, advanced)
            measure = measure and advanced  # a skipped step has changed nothing
            if measure:
                if save or finished:  # save before the evaluation, which may fail, so that the training is not lost
                    self._saver.save(self._state(), notify=False)
                self._evaluate()
        best = measure and advanced and self._watches.update(self._line, step)
        last = self._position.finished(step) or Ask.STOP in self._requested
        if last or self._evaluated_at == step or step % runner.logger.log_interval == 0:
            self._log()
        self._line = {}
        stopped_there = measure and self._saver.saved_at == step  # in this evaluation, which has ended now
        if best or save or stopped_there or (advanced and Ask.SAVE in self._requested):  # also by on_evaluate
            self._requested &= ~Ask.SAVE
            self._saver.save(self._state(), best=best)

    def _due(self, interval: int | str, epoch_ended: bool, advanced: bool) -> bool:
        if interval == "epoch":
            return epoch_ended
        return advanced and isinstance(interval, int) and interval > 0 and self._model.step % interval == 0

    def _log(self) -> None:
        """Write the metrics of the step; a skipped step has none."""
        if self._line:
            waited, self._saves_logged = self._saver.waited - self._saves_logged, self._saver.waited
            self._files.tracker.log(self._model.step, self._line, {**self._seconds, "save": waited})
            self._seconds = {}
        self._line = {}

    def _evaluate(self) -> None:
        """Evaluate all sets and add the metrics to the step's."""
        began = time.perf_counter()
        with PROGRESS.during(EVALUATION):
            metrics = self._run_eval()
        self._seconds["evaluate"] = time.perf_counter() - began
        check_monitors(self._recipe.runner, [*metrics, *TRAIN_METRICS])
        self._evaluated_at, self._last_eval = self._actor.step, metrics
        self._line = {"epoch": self._actor.position.epoch, **self._line, **metrics}
        self._observer.evaluated(self._actor.step, metrics)
        self._files.tracker.samples(self._actor.step)
        self._requested &= ~Ask.EVALUATE
        self._notify(Evaluated, metrics=metrics)

    def _poll(self) -> None:
        """Once any rank has received a stop signal, save and stop on all ranks; without a run directory, only stop."""
        PROGRESS.beats += 1
        gone = self._is_gone is not None and self._is_gone()
        reason = self._ranks.largest(2.0 if gone else float(self._stop.requested))
        if not reason:
            return
        if reason == 2.0:
            raise directory_is_gone(self.run_dir)
        self._save_now("stopping: saving a checkpoint first")
        step = self._actor.step
        message = f"stopped after step {step}; the same command continues" if step else BEFORE_FIRST_STEP
        raise Interrupted(message, together=True)

    def _save_now(self, message: str) -> None:
        """Save the current state, in the middle of a step too; before the first step there is nothing to save."""
        if self._actor.step:
            self._observer.log(message)
            self._saver.save(self._state())
            self._saver.finish()

    def _state(self) -> dict[str, object]:
        return {
            **self._watches.state(),
            "moved": self._recovery.moved_at(self._actor.step),
            "total_steps": self._actor.position.horizon,
            "asked": self._requested.value,
            "callbacks": self._callbacks.state(),
            "evaluated_at": self._evaluated_at,
            "line": {key: value for key, value in self._line.items() if math.isfinite(value)},
            "last_eval": {key: value for key, value in self._last_eval.items() if math.isfinite(value)},
        }
