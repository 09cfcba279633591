"""The training of one rank: from its checkpoint and inputs, over the loop, to `final/`."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from shardtune.checkpoint.atomic import read_json, write_json
from shardtune.checkpoint.verified import sound_first
from shardtune.config import Recipe
from shardtune.config.user_code import note_on_other_plugins
from shardtune.data.cache.by_file import RowsByFile
from shardtune.data.loader.step_loader import StepLoader
from shardtune.launch.events import write_event
from shardtune.launch.local import is_launched, report_begun
from shardtune.launch.outcome import recorded_end
from shardtune.launch.progress import FINAL as WRITING_FINAL
from shardtune.launch.progress import PROGRESS
from shardtune.launch.signals import StopSignal
from shardtune.models.action.recipe_normalizer import NORMALIZER_FILE
from shardtune.models.lora.attach import trainable_patterns
from shardtune.models.tasks.task import TASK_FILE
from shardtune.parallel.precision import COMPUTE_DTYPE, MASTER_DTYPE, SUM_DTYPE
from shardtune.run.accelerate_settings import contradicted_settings
from shardtune.run.choose_worker import Objects, unused_workers, user_code
from shardtune.run.directory import (
    DROPPED_ROWS,
    RunLock,
    RunPlan,
    begin_run,
    environment,
    write_dropped_rows,
)
from shardtune.run.display import Display, shown_path
from shardtune.run.dropped_rows import DroppedByFile, noted_before
from shardtune.run.final import FinalScore, check_final, write_final
from shardtune.run.identity import MANIFEST, read_manifest
from shardtune.run.inputs import (
    KNOWN,
    Inputs,
    check_same_teacher,
    input_notes,
    known_models,
    object_inputs,
    record_models,
    run_inputs,
)
from shardtune.run.lone_process import alone_of_several
from shardtune.run.measured_by import measured_by
from shardtune.run.plan.comparison import PeakComparison, is_large
from shardtune.run.preflight import is_one_of_several
from shardtune.run.push import check_push
from shardtune.run.report.write import report_at_end
from shardtune.run.resume_check import check_same_data
from shardtune.training.loggers import first_metrics
from shardtune.training.recorder import Recording
from shardtune.training.resident_memory import keep_freed_memory, return_freed_memory
from shardtune.training.runner import SFTRunner
from shardtune.training.saver import on_main
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.exported_recipe import FOUND, kept_until
from shardtune.training.worker.run_context import silent

SHOWN_SAMPLES = 5


class RankTraining:
    """Trains a worker to the end of its recipe, in a run directory that is locked.

    Args:
        recipe: the same on all ranks.
        objects: in-memory objects that replace what the recipe names.
        in_memory: their records, on rank 0.
        plan: of the run directory; not finished.
        worker: of this rank, before its model is built.
        display: on rank 0.
        lock: on the run directory, if it exists.

    Attributes:
        lock: on the run directory, held on rank 0 from `begin_run` on.
    """

    def __init__(
        self,
        recipe: Recipe,
        objects: Objects,
        in_memory: Inputs,
        plan: RunPlan,
        worker: FSDPSftWorker,
        display: Display | None,
        lock: RunLock,
    ) -> None:
        self._recipe, self._objects, self._in_memory = recipe, objects, in_memory
        self._worker, self._display = worker, display
        self.lock = lock
        self._inputs = run_inputs(recipe, objects, in_memory) if worker.ranks.is_main else Inputs()
        self._notes: list[str] = []
        self._plan = plan if plan.resume_from is None else self._of_sound_checkpoints(plan, plan.resume_from)
        self._compared = None
        if display is not None:
            self._compared = PeakComparison(display, recipe, plan.run_dir, worker, in_files=not objects.any)

    def _of_sound_checkpoints(self, plan: RunPlan, newest: Path) -> RunPlan:
        """The plan with the checkpoints that are not damaged; their data have to be the recipe's."""
        report = silent if self._display is None else self._display.report
        sound = sound_first((newest, *plan.older), self._worker.ranks, report)
        notes = check_same_data(sound[0], self._worker.task, self._recipe.runner)
        check_same_teacher(sound[0].resolve().parent.parent, self._recipe)
        notes += input_notes(sound[0].resolve().parent.parent, self._inputs)
        self._notes = self._worker.ranks.broadcast(notes)
        return replace(plan, resume_from=sound[0], older=tuple(sound[1:]))

    def run(self, stop: StopSignal, recording: Recording | None) -> None:
        """Train, and write `final/`.

        Args:
            stop: polled between steps and evaluation batches.
            recording: what is recorded of each step; None: nothing.
        """
        runner = self._runner(stop, recording)
        self._prepare(runner)
        try:
            on_main(self._worker.ranks, self._begin)
            runner.run()
            score = self._write_final(runner.ended)
        except BaseException:
            self.lock.release()
            self._worker.release()
            if self._compared is not None:
                self._compared.abandon()
            raise
        if self._compared is not None:
            self._compared.close()
        if self._display is not None:
            report_at_end(self._plan.run_dir, self._display.report)
            task = self._worker.task
            _show_end(self._display, self._plan.run_dir, score, answers=task.can_generate, predictions=task.can_predict)

    def _runner(self, stop: StopSignal, recording: Recording | None) -> SFTRunner:
        recipe, plan, worker, display = self._recipe, self._plan, self._worker, self._display
        return SFTRunner(
            recipe,
            worker,
            run_dir=plan.run_dir,
            observer=self._compared,
            stop=stop,
            resume_from=plan.resume_from,
            older=plan.older,
            notes=[
                *self._notes,
                *recipe.notes,
                *note_on_other_plugins(recipe.plugins),
                *_unused_rank_logs(recipe),
                *unused_workers(recipe, worker),
                *contradicted_settings(recipe, os.environ),
                *(alone_of_several(os.environ) if worker.ranks.world_size == 1 else []),
            ],
            on_start=None if display is None else partial(_show_start, display, plan, worker),
            is_gone=lambda: self.lock.is_gone,
            recording=recording,
            measured_by=worker.ranks.broadcast(measured_by(recipe, self._inputs)),
        )

    def _prepare(self, runner: SFTRunner) -> None:
        """Build everything, and check that it can be written in the end."""
        recipe, worker = self._recipe, self._worker
        if recipe.runner.push_to_hub is not None and is_one_of_several():  # otherwise `shardtune.train` has done so
            on_main(worker.ranks, partial(check_push, recipe.runner.push_to_hub))
        if worker.device.type == "cpu":
            return_freed_memory()
        with self._during("loading the model"):
            runner.prepare()
            check_final(recipe, worker)
        if worker.device.type == "cpu" and not is_large(worker):
            keep_freed_memory()

    def _begin(self) -> None:
        """Make the run directory, on rank 0."""
        recipe, plan, worker = self._recipe, self._plan, self._worker
        known = known_models(plan.run_dir if plan.resume_from else None, self._in_memory)
        manifest = {**_manifest(recipe, self._objects, worker), "inputs": self._inputs, KNOWN: known}
        self.lock = begin_run(plan, recipe, manifest, self.lock, self._report_moved)
        report_begun()
        self._keep_other_statistics()
        for name in {*FOUND, TASK_FILE} & worker.saved_files.keys():  # for checkpoints; final/ has its own
            write_json(plan.run_dir / name, worker.saved_files[name])
        rows = worker.task.rows
        before = noted_before(plan.run_dir) if isinstance(rows, RowsByFile) else []
        dropped = write_dropped_rows(plan.run_dir, [*before, *worker.task.dropped_rows()])
        if dropped and self._display is not None:
            file, these = plan.run_dir / DROPPED_ROWS, "row is" if dropped == 1 else "rows are"
            self._display.report(f"data: {dropped:,} {these} not trained or evaluated on: {shown_path(file)}")
        if isinstance(rows, RowsByFile):
            report = silent if self._display is None else self._display.report
            rows.follow(DroppedByFile(plan.run_dir, before, recipe.data.max_length, report))

    def _keep_other_statistics(self) -> None:
        """Keep the statistics of the steps before where the training rows now have others, and say so."""
        worker, run_dir = self._worker, self._plan.run_dir
        for name in {*FOUND} & worker.saved_files.keys():
            file, kept = run_dir / name, kept_until(run_dir, name, worker.step)
            if not file.is_file() or read_json(file) == json.loads(json.dumps(worker.saved_files[name])):
                continue
            if not kept.exists():  # of a start that came no further, from the same checkpoint
                file.replace(kept)
            if self._display is not None:
                what = (
                    "statistics of states and actions"
                    if name == NORMALIZER_FILE
                    else "statistics or settings of actions"
                )
                self._display.report(
                    f"the training data have other {what} than up to step {worker.step}: training goes on with them; "
                    f"those before are kept in {shown_path(kept)} for the checkpoints of these steps, and "
                    "model.action_statistics can name that file to go on with them"
                )

    def _report_moved(self, aside: Path) -> None:
        if self._display is not None:
            self._display.report(f"{shown_path(self._plan.run_dir)}: the old run is now {shown_path(aside)}")

    def _write_final(self, ended: str) -> FinalScore:
        """Write `final/`, and the records of it.

        Args:
            ended: why training ended.
        """
        run_dir, ranks, step = self._plan.run_dir, self._worker.ranks, self._worker.step
        if self._display is not None:
            self._display.report(f"writing {shown_path(run_dir / 'final')}")
        with (
            self._during("writing final/"),
            PROGRESS.during(WRITING_FINAL),
            recorded_end(run_dir, lambda: step, ranks=ranks.world_size, is_main=ranks.is_main),
        ):
            on_main(ranks, self._record_files)
            score = write_final(self._recipe, run_dir, self._worker, ended=ended)
            on_main(ranks, partial(record_models, run_dir, object_inputs(self._recipe, self._objects)))
        if ranks.is_main:
            write_event(run_dir, "end", step=step, ranks=ranks.world_size, reason=ended)
        return score

    def _record_files(self) -> None:
        """Add to the manifest what is known of files that were read while training went on."""
        if isinstance(self._worker.task.rows, RowsByFile):
            manifest = read_manifest(self._plan.run_dir)
            data = {**manifest["data"], "train": self._worker.task.data_files()}
            write_json(self._plan.run_dir / MANIFEST, {**manifest, "data": data})

    def _during(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self._display is None else self._display.during(what)


def _unused_rank_logs(recipe: Recipe) -> list[str]:
    if not recipe.runner.logger.rank_logs or is_launched():
        return []
    return ["runner.logger.rank_logs has no effect under torchrun, which keeps logs with --log-dir=DIR --tee=3"]


def _manifest(recipe: Recipe, objects: Objects, worker: FSDPSftWorker) -> dict[str, object]:
    precision = recipe.actor.model.precision
    return {
        "versions": environment(),
        "data": _describe_data(worker),
        "worker": type(worker).__qualname__,
        "user_code": user_code(recipe),
        "in_memory": objects.keys(),
        "dtypes": {
            "weights": _name(MASTER_DTYPE[precision]),
            "compute": _name(COMPUTE_DTYPE[precision]),
            "optimizer": {"fp32": _name(SUM_DTYPE[precision]), "bf16": "bfloat16", "int8": "int8"}[
                recipe.actor.optim.state_dtype
            ],
        },
        "world_size": worker.ranks.world_size,
        "device": _device_in_words(worker.device),
        "trainable": sorted(worker.weights.trainable()),
        "trainable_patterns": [
            {"name": name, "tensors": tensors, "parameters": parameters}
            for name, tensors, parameters in trainable_patterns(worker.weights.trainable(), worker.weights.shapes)
        ],
    }


def _describe_data(worker: FSDPSftWorker) -> dict[str, object]:
    loader = worker.loader
    counted = not isinstance(loader, StepLoader) or loader.is_counted
    return {**worker.task.describe_data(), "rows_per_epoch": loader.num_samples if counted else None}


def _device_in_words(device: torch.device) -> str:
    """What rank 0 computes on, as far as the last digits of a number depend on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu, {torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' if threads > 1 else ''}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _show_start(display: Display, plan: RunPlan, worker: FSDPSftWorker) -> None:
    for note in plan.notes:
        display.report(note)
    rows = worker.task.rows
    first = rows.row(rows.first_trained) if rows is not None else None
    display.first_screen(worker.summary(), first, worker.tokenizer, plan.run_dir)


def _show_end(display: Display, run_dir: Path, score: FinalScore, *, answers: bool, predictions: bool) -> None:
    first = first_metrics(run_dir)
    before = {key: value for key, value in first.items() if key.startswith("eval/")} if first.get("step") == 0 else {}
    # A wrong answer is more informative than another right one: the first of them is among those shown.
    right_first = sorted(score.samples[:SHOWN_SAMPLES], key=lambda sample: sample["correct"] is not True)
    wrong = [sample for sample in score.samples[SHOWN_SAMPLES:] if sample["correct"] is not True]
    shown = [*right_first[: SHOWN_SAMPLES - 1], *wrong[:1]] if wrong else right_first
    display.summary(run_dir, before, score.metrics, shown, answers=answers, predictions=predictions)
