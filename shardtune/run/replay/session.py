"""A run's worker in one process, at the position of a step that is to be replayed; nothing of the run is written."""

from __future__ import annotations

from collections.abc import Callable

from shardtune.checkpoint.state_file import read_state
from shardtune.checkpoint.verified import damage_on_ranks, require_sound
from shardtune.config import Recipe
from shardtune.config.rank_layout import Layout
from shardtune.config.stored_recipe import stored_recipe
from shardtune.config.tree import set_value
from shardtune.config.user_code import import_plugins
from shardtune.errors import CheckpointError, ConfigError
from shardtune.run.choose_worker import Objects, make_worker
from shardtune.run.identity import read_manifest
from shardtune.run.replay.record import Record, Start
from shardtune.run.resume_check import data_changes
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.cached_rows import CachedRowsTask
from shardtune.training.worker.run_context import RunContext, set_up

ONE_PROCESS = {
    "runner.nproc_per_node": 1,
    "runner.num_ranks": None,
    "runner.launcher": "local",
    "runner.max_restarts": 0,
    "runner.min_ranks": None,
    "runner.device": "auto",
    "runner.logger.rank_logs": False,
}
"""Where it runs does not matter to the numbers."""
NO_EVALUATION = {
    "eval.harness": [],
    "eval.harness_options": {},
    "eval.environment": None,
    "runner.eval_before_training": False,
    "runner.eval_interval": -1,
    "runner.early_stop.enabled": False,
    "runner.best.monitor": None,
}
NO_EVALUATION_ROWS = {"data.eval_data_paths": None, "eval.generate": False, "eval.metrics": []}
"""Unless they are a part of the training rows."""


def one_process(recipe: Recipe) -> Recipe:
    """The recipe of a run for one process, without its evaluations; the training rows stay what they are."""
    values, defaults = recipe.to_dict(), Recipe().to_dict()
    changes = {**ONE_PROCESS, **NO_EVALUATION, **({} if recipe.data.eval_split else NO_EVALUATION_ROWS)}
    for key, value in changes.items():
        set_value(values, key, value)
    values["actor"]["parallel"] = defaults["actor"]["parallel"]
    values["runner"]["ray"] = defaults["runner"]["ray"]
    return stored_recipe(values)


def made_worker(recipe: Recipe, record: Record, objects: Objects, report: Callable[[str], None]) -> FSDPSftWorker:
    """The worker of a run, its rows encoded, its model not built.

    Args:
        recipe: of the run, whose code may be executed.
        record: of the run.
        objects: that the run was trained with in place of what the recipe names.
        report: receives messages while the data is prepared.

    Raises:
        ConfigError: the run was trained with objects in memory that are not given.
    """
    alone = one_process(recipe)
    import_plugins(alone.plugins)
    in_memory = read_manifest(record.run_dir).get("in_memory", [])
    # A model that was trained in place is read from a checkpoint, but its class is only known from the object.
    given = {*objects.keys(), "data.eval_data_paths"}
    lacking = [key for key in in_memory if key not in given]
    if lacking:
        raise ConfigError(
            f"the run was trained with objects in memory ({', '.join(lacking)}), which a command cannot have",
            where=str(record.run_dir),
            remedy="from Python, with the same objects: from shardtune.run.replay.replay import replay; "
            "replay(RUN, step, objects=Objects(train_data=…)); or name files in the recipe before training",
        )
    worker, trained_by = make_worker(alone, objects, report=report), read_manifest(record.run_dir).get("worker")
    if trained_by not in (None, type(worker).__qualname__):
        raise ConfigError(
            f"the run was trained by {trained_by}, which its recipe does not name; {type(worker).__qualname__} would "
            "compute another loss",
            where=str(record.run_dir),
            remedy=f"name the class in the recipe before training, actor.worker: file.py:{trained_by}",
        )
    return worker


def check_data(worker: FSDPSftWorker, record: Record, start: Start, step: int) -> None:
    """Refuse rows that are not those of the run, at its checkpoint or, where it went on with others, behind it.

    Raises:
        CheckpointError: names what has changed.
    """
    recorded = record.data_files(start, step)
    worker.task.recall_files(recorded[0])
    changes = [data_changes(files, worker.task.data_files()) for files in recorded]
    if all(changes):
        raise CheckpointError(
            f"the training data is not what it was at {start}:\n    " + "\n    ".join(changes[0]),
            where=str(record.run_dir),
            remedy="put the data back; the rows of a step are not stored, they are read again",
        )


def stand_for(worker: FSDPSftWorker, recipe: Recipe, ranks: int) -> list[str]:
    """Let one process compute the micro-batches of a run's ranks; returns notes on what it does otherwise.

    Args:
        worker: not set up.
        recipe: of the run.
        ranks: on which the step was trained.
    """
    layout, task = Layout.of(recipe.actor, ranks), worker.task
    if isinstance(task, CachedRowsTask):
        task.stands_for = layout.num_data_ranks
    if layout.model_ranks > 1:
        return [f"{layout.model_ranks} ranks had shared each row: what dropout draws is not what it was"]
    if not isinstance(task, CachedRowsTask) and ranks > 1:
        return [f"the batches are those of {ranks} ranks, drawn by one: what dropout draws is not what it was"]
    if not task.losses_add_up and ranks > 1:
        return ["the loss is one of whole steps: what dropout draws is not what it was on several ranks"]
    return []


def at(worker: FSDPSftWorker, start: Start, report: Callable[[str], None]) -> None:
    """Set up the worker with the weights, the optimizer and the position of a checkpoint, or the initial ones.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    set_up(worker, RunContext(report=report))
    if start.checkpoint is not None:
        damage = damage_on_ranks(start.checkpoint, worker.ranks)
        require_sound(damage, start.checkpoint, "take another: --checkpoint N")
        worker.load_checkpoint(start.checkpoint)
        moved = read_state(start.checkpoint).get("moved")
        if moved is not None:  # by an anomaly: rows have their places in the order, a loader's batches only this one
            worker.position.restore(moved["position"])
