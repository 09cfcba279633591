"""One rank's part of a training command, from the run directory's lock to `final/`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from shardtune.checkpoint.checksums import CHECKSUMS
from shardtune.checkpoint.verified import directory_damage
from shardtune.config import Recipe
from shardtune.errors import Interrupted
from shardtune.launch.heartbeat import PeerWatch
from shardtune.launch.local import is_launched, restarted_launch
from shardtune.launch.progress import PROGRESS, START
from shardtune.launch.signals import StopSignal, end_with_parent, is_supervised, listening
from shardtune.launch.watchdog.watchdog import FOLDER, Watchdog
from shardtune.parallel.ranks import leave_ranks
from shardtune.parallel.rendezvous import served_by_agent
from shardtune.parallel.torch_private.processes import collectives_issued
from shardtune.run.choose_worker import NOTHING, Objects, make_worker
from shardtune.run.directory import (
    RunLock,
    RunPlan,
    plan_run,
    run_directory,
    tidy,
    without_final,
)
from shardtune.run.display import Display, shown_path
from shardtune.run.identity import FINAL
from shardtune.run.inputs import (
    Inputs,
    check_finished,
    object_inputs,
)
from shardtune.run.preflight import check_same_rows, connecting, is_one_of_several, try_collective
from shardtune.run.push import push_command, push_final
from shardtune.run.rank_training import RankTraining
from shardtune.run.resume_check import ALLOWED
from shardtune.training.recorder import Recording
from shardtune.training.saver import on_main
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.run_context import silent

HOSTS_NOTICE = 2.0
"""After so many times `runner.lost_after` a host that is cut off has ended its ranks, under every launcher."""


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
    # A rank of the start before that was cut off may train on until it notices.
    lock = RunLock(run_dir, HOSTS_NOTICE * recipe.runner.lost_after if restarted_launch() else 0.0)
    try:
        with (
            listening() as stop,
            deterministic(recipe.runner.deterministic),
            watching(recipe.runner.watchdog_seconds, run_dir, stop) as watchdog,
        ):
            if main:
                lock.acquire_existing()
                tidy(run_dir)
            # Every rank runs these checks, so that none waits for another that has failed. Of several, each looks at a
            # part of the files when the checkpoint is verified (`sound_first`).
            plan = plan_run(recipe, sizes=not is_one_of_several())
            stop.message = plan.message_of_stop
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
                    training = RankTraining(recipe, objects, in_memory, plan, worker, display, lock)
                    training.run(stop, recording)
                    lock = training.lock
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
    notes = (*plan.notes, *check_finished(plan.run_dir, recipe, objects))
    for note in notes:
        report(note)
    if not (plan.run_dir / FINAL / CHECKSUMS).exists():
        report(f"{plan.run_dir / FINAL} was written by an earlier version and has no checksums: it is not verified")
    unused = ", on which these changes have no effect" if any(ALLOWED in note for note in notes) else ""
    early = " (or, for early stopping, runner.early_stop.patience)" if recipe.runner.early_stop.enabled else ""
    report(
        f"{shown_path(plan.run_dir)} is finished; its result is {shown_path(plan.run_dir / FINAL)}{unused}. To train "
        f"on, raise runner.max_epochs or runner.max_steps{early}; to begin anew, choose another "
        "runner.logger.experiment_name"
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
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is computed
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        torch.backends.cudnn.benchmark = benchmark


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
