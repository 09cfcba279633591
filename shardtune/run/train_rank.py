"""One rank's part of a training command, from the run directory's lock to `final/`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from shardtune.checkpoint.atomic import write_json
from shardtune.checkpoint.checksums import CHECKSUMS
from shardtune.checkpoint.verified import directory_damage, sound_first
from shardtune.config import Recipe
from shardtune.errors import Interrupted
from shardtune.launch.events import write_event
from shardtune.launch.heartbeat import PeerWatch
from shardtune.launch.local import is_launched, report_begun
from shardtune.launch.outcome import recorded_end
from shardtune.launch.progress import FINAL as WRITING_FINAL
from shardtune.launch.progress import PROGRESS, START
from shardtune.launch.signals import StopSignal, end_with_parent, is_supervised, listening
from shardtune.launch.watchdog.watchdog import FOLDER, Watchdog
from shardtune.models.action.recipe_normalizer import NORMALIZER_FILE
from shardtune.models.lora.attach import trainable_patterns
from shardtune.models.tasks.task import TASK_FILE
from shardtune.parallel.fsdp2 import COMPUTE_DTYPE, MASTER_DTYPE
from shardtune.parallel.ranks import leave_ranks
from shardtune.parallel.rendezvous import served_by_agent
from shardtune.parallel.torch_private import collectives_issued
from shardtune.run.accelerate_settings import contradicted_settings
from shardtune.run.choose_worker import NOTHING, Objects, make_worker, unused_workers, user_code
from shardtune.run.directory import (
    DROPPED_ROWS,
    RunLock,
    RunPlan,
    begin_run,
    environment,
    plan_run,
    run_directory,
    tidy,
    without_final,
    write_dropped_rows,
)
from shardtune.run.display import Display, shown_path
from shardtune.run.final import FinalScore, check_final, write_final
from shardtune.run.identity import FINAL
from shardtune.run.inputs import (
    KNOWN,
    Inputs,
    check_finished,
    input_notes,
    known_models,
    object_inputs,
    record_models,
    run_inputs,
)
from shardtune.run.plan.comparison import PeakComparison, is_large
from shardtune.run.preflight import check_same_rows, connecting, is_one_of_several, try_collective
from shardtune.run.push import check_push, push_command, push_final
from shardtune.run.report.write import report_at_end
from shardtune.run.resume_check import check_same_data
from shardtune.training.loggers import first_metrics
from shardtune.training.recorder import Recording
from shardtune.training.resident_memory import keep_freed_memory, return_freed_memory
from shardtune.training.runner import SFTRunner
from shardtune.training.saver import on_main
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.run_context import silent

SHOWN_SAMPLES = 5


def train_rank(
    recipe: Recipe,
    objects: Objects = NOTHING,
    peers: PeerWatch | None = None,
    made: FSDPSftWorker | None = None,
    recording: Recording | None = None,
) -> Path:
    """One rank of training (or all of it, on one rank); returns the run directory.

    Args:
        recipe: the same on all ranks.
        objects: in-memory objects that replace what the recipe names.
        peers: watches the other hosts; it is ended with the run.
        made: the worker, where it is not made here.
        recording: what is recorded of each step; None: nothing.
    """
    if is_supervised():
        end_with_parent()
    main = os.environ.get("RANK", "0") == "0"
    display = Display() if main else None
    run_dir = run_directory(recipe)
    lock = RunLock(run_dir)
    try:
        with (
            listening() as stop,
            deterministic(recipe.runner.deterministic),
            watching(recipe.runner.watchdog_seconds, run_dir, stop) as watchdog,
        ):
            if main:
                lock.acquire_existing()
                tidy(run_dir)
            # Every rank runs these checks, so that none waits for another that has failed.
            plan = plan_run(recipe)
            report = display.report if display else silent
            in_memory = object_inputs(recipe, objects) if main else Inputs()
            with connecting():
                worker = made or make_worker(recipe, objects, report=silent if _checked_by_launcher(recipe) else report)
            if worker.ranks.world_size > 1:
                try_collective(worker.device)
                watchdog.meet(worker.ranks.gather(watchdog.identity))
                check_same_rows(worker)
            with _together(worker):
                plan = worker.ranks.broadcast(plan)
                if plan.finished:
                    plan = without_final(plan, partial(directory_damage, ranks=worker.ranks))
                if plan.finished:
                    on_main(worker.ranks, partial(report_finished, plan, recipe, objects, report))
                else:
                    lock = _train(recipe, objects, in_memory, plan, worker, display, stop, lock, recording)
    finally:
        lock.release()
    if peers is not None:
        peers.end()
    if display is not None and recipe.runner.push_to_hub is not None and not plan.finished:
        push_final(run_dir, recipe.runner.push_to_hub, display.report)
    return run_dir


@contextmanager
def watching(seconds: float | None, run_dir: Path, stop: StopSignal) -> Iterator[Watchdog]:
    """A watchdog over this rank's progress, which writes stacks into the run directory."""
    pointer = run_dir / "checkpoints" / "latest"

    def goes_on() -> str:
        try:
            return (
                f"the last checkpoint is {pointer.with_name(pointer.read_text().strip())}: the same command continues"
            )
        except OSError:
            return "there is no checkpoint yet: the same command starts again"

    PROGRESS.phase = START
    PROGRESS.start()
    watchdog = Watchdog(
        seconds or 0.0,
        run_dir / FOLDER,
        stop,
        goes_on=goes_on,
        issued=collectives_issued,
        rank_0_serves=not served_by_agent(),
    )
    try:
        yield watchdog
    finally:
        watchdog.end()
        PROGRESS.phase = START


def report_finished(plan: RunPlan, recipe: Recipe, objects: Objects, report: Callable[[str], None]) -> None:
    """Report that a run is finished, and what of its recipe has changed since.

    Raises:
        CheckpointError: its data, weights, code or objects have changed.
    """
    for note in (*plan.notes, *check_finished(plan.run_dir, recipe, objects)):
        report(note)
    if not (plan.run_dir / FINAL / CHECKSUMS).exists():
        report(f"{plan.run_dir / FINAL} was written by an earlier version and has no checksums: it is not verified")
    report(
        f"{shown_path(plan.run_dir)} is finished; its result is {shown_path(plan.run_dir / FINAL)}. To train on, raise "
        "runner.max_epochs or runner.max_steps; to begin anew, choose another runner.logger.experiment_name"
    )
    if recipe.runner.push_to_hub is not None:
        report(f"to push it again: {push_command(plan.run_dir, recipe.runner.push_to_hub)}")


def _checked_by_launcher(recipe: Recipe) -> bool:
    """Whether the launcher has already reported on the data: on a single machine it reads them first."""
    return is_launched() and recipe.runner.launcher == "local"


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Restrict torch to deterministic kernels inside."""
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is computed
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


@contextmanager
def _together(worker: FSDPSftWorker) -> Iterator[None]:
    """Shut down together with the other ranks, unless this rank alone failed: they may be blocked in a collective."""
    try:
        yield
    except Interrupted as stopped:
        if stopped.together:
            leave_ranks(worker.ranks)
        raise
    leave_ranks(worker.ranks)


def _train(
    recipe: Recipe,
    objects: Objects,
    in_memory: Inputs,
    plan: RunPlan,
    worker: FSDPSftWorker,
    display: Display | None,
    stop: StopSignal,
    lock: RunLock,
    recording: Recording | None,
) -> RunLock:
    """Train to the end of the recipe; returns the lock on the run directory, which is held on rank 0."""
    notes, current_lock = list[str](), [lock]
    inputs = run_inputs(recipe, objects, in_memory) if worker.ranks.is_main else Inputs()
    if plan.resume_from is not None:
        report = silent if display is None else display.report
        sound = sound_first((plan.resume_from, *plan.older), worker.ranks, report)
        plan = replace(plan, resume_from=sound[0], older=tuple(sound[1:]))
        check_same_data(sound[0], worker.task.data_files(), recipe.runner.allow_changes)
        notes = worker.ranks.broadcast(input_notes(sound[0].resolve().parent.parent, inputs))
    planned = (
        None if display is None else PeakComparison(display, recipe, plan.run_dir, worker, in_files=not objects.any)
    )
    runner = SFTRunner(
        recipe,
        worker,
        run_dir=plan.run_dir,
        observer=planned,
        stop=stop,
        resume_from=plan.resume_from,
        older=plan.older,
        notes=[
            *notes,
            *recipe.notes,
            *_unused_rank_logs(recipe),
            *unused_workers(recipe, worker),
            *contradicted_settings(recipe, os.environ),
        ],
        on_start=None if display is None else partial(_show_start, display, plan, worker),
        is_gone=lambda: current_lock[0].is_gone,
        recording=recording,
    )
    if recipe.runner.push_to_hub is not None and is_one_of_several():  # otherwise `shardtune.train` has done so
        on_main(worker.ranks, partial(check_push, recipe.runner.push_to_hub))
    if worker.device.type == "cpu":
        return_freed_memory()
    with nullcontext() if display is None else display.during("loading the model"):
        runner.prepare()
        check_final(recipe, worker)
    if worker.device.type == "cpu" and not is_large(worker):
        keep_freed_memory()

    def begin() -> None:
        known = known_models(plan.run_dir if plan.resume_from else None, in_memory)
        manifest = {**_manifest(recipe, objects, worker), "inputs": inputs, KNOWN: known}
        current_lock[0] = begin_run(plan, recipe, manifest, lock)
        report_begun()
        for name in {NORMALIZER_FILE, TASK_FILE} & worker.saved_files.keys():  # for checkpoints; final/ has its own
            write_json(plan.run_dir / name, worker.saved_files[name])
        dropped = write_dropped_rows(plan.run_dir, worker.task.dropped_rows())
        if dropped and display is not None:
            file, rows = plan.run_dir / DROPPED_ROWS, "row is" if dropped == 1 else "rows are"
            display.report(f"data: {dropped:,} {rows} not trained or evaluated on: {shown_path(file)}")

    on_main(worker.ranks, begin)
    try:
        runner.run()
        if display is not None:
            display.report(f"writing {shown_path(plan.run_dir / 'final')}")
        ranks, step = worker.ranks, worker.step
        with (
            nullcontext() if display is None else display.during("writing final/"),
            PROGRESS.during(WRITING_FINAL),
            recorded_end(plan.run_dir, lambda: step, ranks=ranks.world_size, is_main=ranks.is_main),
        ):
            score = write_final(recipe, plan.run_dir, worker, ended=runner.ended)
            on_main(ranks, partial(record_models, plan.run_dir, object_inputs(recipe, objects)))
        if ranks.is_main:
            write_event(plan.run_dir, "end", step=step, ranks=ranks.world_size, reason=runner.ended)
    except BaseException:
        current_lock[0].release()
        worker.release()
        if planned is not None:
            planned.abandon()
        raise
    if planned is not None:
        planned.close()
    if display is not None:
        report_at_end(plan.run_dir, display.report)
        _show_end(display, plan.run_dir, score, answers=worker.task.can_generate)
    return current_lock[0]


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
            "optimizer": {"fp32": _name(MASTER_DTYPE[precision]), "bf16": "bfloat16", "int8": "int8"}[
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
    return {**worker.task.describe_data(), "rows_per_epoch": worker.loader.num_samples}


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


def _show_end(display: Display, run_dir: Path, score: FinalScore, *, answers: bool) -> None:
    first = first_metrics(run_dir)
    before = {key: value for key, value in first.items() if key.startswith("eval/")} if first.get("step") == 0 else {}
    # A wrong answer is more informative than another right one: the first of them is among those shown.
    right_first = sorted(score.samples[:SHOWN_SAMPLES], key=lambda sample: sample["correct"] is not True)
    wrong = [sample for sample in score.samples[SHOWN_SAMPLES:] if sample["correct"] is not True]
    shown = [*right_first[: SHOWN_SAMPLES - 1], *wrong[:1]] if wrong else right_first
    display.summary(run_dir, before, score.metrics, shown, answers=answers)
