"""The ranks of a training run: on this machine, or on a Ray cluster; started again after a loss."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shardtune.checkpoint.training_state import STATE_FILE
from shardtune.checkpoint.verified import damaged_file
from shardtune.config import Recipe
from shardtune.config.rank_layout import Layout
from shardtune.errors import ConfigError, ParallelError
from shardtune.launch.elastic import Restarts, run_elastic
from shardtune.launch.local import run_ranks
from shardtune.launch.port import free_port
from shardtune.launch.signals import StopSignal
from shardtune.parallel.ranks import choose_device
from shardtune.run.choose_worker import check_worker, make_worker, worker_class
from shardtune.run.directory import RunPlan
from shardtune.run.display import Display
from shardtune.run.inputs import check_same_teacher
from shardtune.run.resume_check import check_same_data
from shardtune.run.train_rank import watching
from shardtune.training.recorder import Recording
from shardtune.training.worker.adapter_worker import SFTWorker


def train_on_this_machine(
    recipe: Recipe, plan: RunPlan, display: Display, stop: StopSignal, recording: Recording | None
) -> None:
    """Run all checks that need no ranks, tokenise, then start the ranks on this machine."""
    free_port(recipe.runner.master_port)
    choose_device(recipe.runner.device, recipe.runner.nproc_per_node - 1)
    # A user-defined worker is created in the ranks only: it may hold resources that cannot be shared.
    kind = worker_class(recipe)
    if not issubclass(kind, SFTWorker):
        check_worker(recipe, kind)
    else:
        with watching(recipe.runner.watchdog_seconds, plan.run_dir, stop):
            worker = make_worker(recipe, report=display.report)
            worker.task.check()
            candidates = () if plan.resume_from is None else (plan.resume_from, *plan.older)
            readable = [path for path in candidates if damaged_file(path, STATE_FILE) is None]
            if readable:  # the ranks choose a checkpoint; each is of the same data
                check_same_data(readable[0], worker.task, recipe.runner)
                check_same_teacher(readable[0].resolve().parent.parent, recipe)
            del worker
    with tempfile.TemporaryDirectory(prefix="shardtune-") as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(recipe.to_yaml(as_given=True))

        runner = recipe.runner
        logs_in = plan.run_dir if runner.logger.rank_logs else None

        def start(workers: int, environment: Mapping[str, str]) -> None:
            command, port = ["train", str(file), *(recording.words if recording else ())], runner.master_port
            run_ranks(command, workers, master_port=port, environment=environment, logs_in=logs_in)

        def left(numbers: Sequence[int], survivors: int) -> int:
            return next((number for number in numbers if number <= survivors), min(numbers, default=0))

        limits, fits, report = _restarts(recipe), _fits(recipe), display.report
        run_elastic(start, limits, left=left, fits=fits, stop=stop, report=report, run_dir=plan.run_dir)


def train_on_ray(
    recipe: Recipe, plan: RunPlan, display: Display, stop: StopSignal, recording: Recording | None
) -> None:
    """Start the ranks on a Ray cluster; each reads data and model on its own host."""
    if recording is not None:
        raise ConfigError(
            "steps are recorded on a single machine or under torchrun, not on Ray",
            where="--record, --stop-after",
            remedy="runner.launcher=local, or leave the option out",
        )
    from shardtune.launch.ray.ranks import connected, reserve_for_the_rest, run_ranks_on_ray

    with connected(recipe.runner) as cluster:

        def start(workers: int, environment: Mapping[str, str]) -> None:
            run_ranks_on_ray(
                cluster, ["train", "RECIPE"], recipe, workers, environment, stop=stop, report=display.report
            )

        def left(numbers: Sequence[int], survivors: int) -> int:
            return reserve_for_the_rest(cluster, numbers, stop)

        limits, fits, report = _restarts(recipe), _fits(recipe), display.report
        run_elastic(start, limits, left=left, fits=fits, stop=stop, report=report, run_dir=plan.run_dir)


def _restarts(recipe: Recipe) -> Restarts:
    runner = recipe.runner
    return Restarts(runner.max_restarts, runner.workers, runner.min_ranks or runner.workers)


def _fits(recipe: Recipe) -> Callable[[int], bool]:
    """Whether a number of ranks can have the layout of a recipe."""

    def fits(workers: int) -> bool:
        try:
            Layout.of(recipe.actor, workers)
        except ParallelError:
            return False
        return True

    return fits
