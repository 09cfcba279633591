"""The tasks of lm-evaluation-harness, loaded once in a process; needs the extra `harness`."""

from __future__ import annotations

import difflib
import re
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager

from shardtune.config.values import TASK_FILES
from shardtune.evaluate.harness import Harness, score_name

REFERS = re.compile(r"^(group|include|task_list)\s*:|^task\s*:\s*(\[|$)", re.MULTILINE)
"""What the YAML file of a single task does not have: other tasks by name."""


class LoadedTasks:
    """The tasks of an evaluation with their data; the harness takes it for its `TaskManager`.

    Each training loads its own: the harness writes the options of an evaluation into them.

    Args:
        manager: the index of tasks.
        loaded: as its `load` returns them.
    """

    def __init__(self, manager: TaskManager, loaded: dict[str, dict[str, Any]]) -> None:
        self.task_index = manager.task_index
        self._loaded = loaded

    def load(self, task_list: object) -> dict[str, dict[str, Any]]:
        """All of them; the harness passes its own list of the same tasks."""
        return self._loaded

    def score_names(self) -> list[str] | None:
        """The names of the scores; None where groups have some of their own."""
        if self._loaded["groups"]:
            return None
        names = []
        for name, task in self._loaded["tasks"].items():
            filters = [entry["name"] for entry in task.get_config("filter_list") or [{"name": "none"}]]
            names += [score_name(name, metric, chosen) for metric in task.aggregation() for chosen in filters]
        return names


def check_names(harness: Harness) -> TaskManager:
    """The index of tasks; names that it does not have are refused.

    Raises:
        ConfigError: names the nearest ones.
    """
    files = [Path(name) for name in harness.tasks if name.endswith(TASK_FILES)]
    alone = len(files) == len(harness.tasks) and not any(REFERS.search(file.read_text("utf-8")) for file in files)
    manager = TaskManager(include_defaults=False) if alone else _built_in()
    for name in harness.tasks:
        if name.endswith(TASK_FILES) or name in manager.task_index:
            continue
        near = difflib.get_close_matches(name, manager.all_tasks, n=3)
        remedy = f"the nearest are {', '.join(near)}" if near else "none is similar"
        raise harness.problem(
            f"lm-evaluation-harness has no task {name!r}", f"{remedy}; all are listed by: lm_eval ls tasks"
        )
    return manager


@cache
def _built_in() -> TaskManager:
    """The index of the harness's own tasks: some fifteen thousand files, seconds."""
    return TaskManager()


def load_tasks(harness: Harness) -> LoadedTasks:
    """The tasks of an evaluation with their data.

    Raises:
        ConfigError: names the one that cannot be loaded.
    """
    manager = check_names(harness)
    found: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in harness.tasks:
        try:
            one: Any = manager.load([name])
        except Exception as error:  # a task's code and its data are of others and may raise anything
            raise harness.problem(
                f"the task {name} cannot be loaded: {type(error).__name__}: {_first_line(error)}",
                "a data set of the Hub is read from the network or from what an earlier run has downloaded "
                "(HF_HUB_OFFLINE forbids the network); without it leave the task out",
            ) from error
        for part, entries in one.items():
            twice = found[part].keys() & entries.keys()
            if twice:
                raise harness.problem(
                    f"{', '.join(sorted(twice))} is evaluated twice: {name} contains it, and so does another entry",
                    "leave one of them out",
                )
            found[part] |= entries
    return LoadedTasks(manager, found)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:300]
