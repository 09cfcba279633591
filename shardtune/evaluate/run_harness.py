"""Evaluation by lm-evaluation-harness on all ranks; its package is imported only where a recipe has `eval.harness`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.batch.seeds import generators_kept
from shardtune.errors import ConfigError
from shardtune.evaluate.harness import Harness, HarnessModel
from shardtune.parallel.ranks import Ranks

if TYPE_CHECKING:
    from shardtune.evaluate.harness_tasks import LoadedTasks


@dataclass(frozen=True, slots=True)
class ReadTasks:
    """Tasks whose data is read.

    Attributes:
        loaded: the tasks; None on other ranks than 0.
        score_names: of their scores, without `eval/`; None where a group has some of its own.
    """

    loaded: LoadedTasks | None
    score_names: Sequence[str] | None


def check_task_names(harness: Harness) -> None:
    """Refuse names that the harness does not have, without reading data.

    Raises:
        ConfigError: names the nearest ones.
    """
    from shardtune.evaluate.harness_tasks import check_names

    check_names(harness)


def read_tasks(harness: Harness, ranks: Ranks) -> ReadTasks:
    """Load the tasks' data on rank 0; every rank calls it.

    Raises:
        ConfigError: names the task that cannot be loaded; on all ranks.
    """
    tasks, found = None, None
    if ranks.is_main:
        from shardtune.evaluate.harness_tasks import load_tasks

        try:
            with generators_kept():
                tasks = load_tasks(harness)
                found = tasks.score_names()
        except ConfigError as error:
            found = ConfigError(error.what, where=error.where, remedy=error.remedy)  # its cause may not pickle
    found = ranks.broadcast(found)
    if isinstance(found, ConfigError):
        raise found
    return ReadTasks(tasks, found)


def run_harness(
    harness: Harness, model: HarnessModel, tasks: ReadTasks, *, poll: Callable[[], None], folder: Path | None
) -> dict[str, float]:
    """Evaluate a model; all ranks call it together.

    Args:
        harness: the settings.
        model: sharded, in evaluation mode.
        tasks: as `read_tasks` has read them.
        poll: called between batches, by all ranks alike.
        folder: where rank 0 writes the results and the answers; None: nowhere.

    Returns:
        The scores by name, without `eval/`, the same on all ranks.

    Raises:
        ConfigError: the harness raised an error; on all ranks.
    """
    from shardtune.evaluate.harness_model import evaluate

    return evaluate(harness, model, tasks.loaded, poll=poll, folder=folder)
