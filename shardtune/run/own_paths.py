"""What a recipe reads must not lie in the directory that its run writes, or moves aside."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from shardtune.config import Recipe
from shardtune.config.paths import DATA_KEYS, MODEL_KEYS, data_paths, named_files
from shardtune.config.tree import get_value
from shardtune.errors import ConfigError
from shardtune.run.identity import CONFIG, holds_run

PLACE = ("runner.logger.log_path", "runner.logger.experiment_name")
"""Keys that name the run directory."""

WRITTEN_KEYS = ("data.quarantine",)
"""Keys of files that a run writes itself."""


def check_name(run_dir: Path, log_path: Path) -> None:
    """Refuse a run directory that is the directory of all runs.

    Raises:
        ConfigError: its name is `.`.
    """
    if os.path.abspath(run_dir) != os.path.abspath(log_path):
        return
    raise ConfigError(
        f"the run would be written into {log_path} itself, the directory of all runs",
        where=f"runner.logger.experiment_name: {os.path.relpath(run_dir, log_path)}",
        remedy="give the run a name; for another place set runner.logger.log_path too",
    )


def note_on_moved(recipe: Recipe, run_dir: Path) -> str:
    """A line where the recipe is that of a run which was moved or copied, and names its former place; "" otherwise.

    Args:
        recipe: of the command.
        run_dir: that it names.
    """
    names = {(recipe.where(key) or "").rpartition(":")[0] for key in PLACE}
    given = Path(names.pop())
    if names or given.name != CONFIG or not holds_run(given.parent) or given.parent.resolve() == run_dir.resolve():
        return ""
    log_path, name = os.path.split(given.parent.resolve())
    does = "goes on with" if holds_run(run_dir) else "begins"
    return (
        f"{given} names the run directory {run_dir}, so this command {does} a run there, not the one that lies beside "
        f"it; that one is meant by runner.logger.log_path={log_path} runner.logger.experiment_name={name}"
    )


def check_new(recipe: Recipe, run_dir: Path) -> None:
    """Refuse to begin a run among the data or in the model that its recipe names; code may lie beside it.

    Raises:
        ConfigError: with the first of these paths.
    """
    for key, path in _read_from(recipe, run_dir):
        if key not in (*DATA_KEYS, *MODEL_KEYS):
            continue
        raise ConfigError(
            f"the run would be written into {run_dir}, which holds no run, and {_what(key, path, run_dir)}",
            where=_where(recipe),
            remedy="choose another runner.logger.experiment_name or runner.logger.log_path, for a directory of its own",
        )


def check_overwritten(recipe: Recipe, run_dir: Path) -> None:
    """Refuse to move a run aside with anything that its recipe reads, such as its own `final/`.

    Raises:
        ConfigError: with the first of these paths.
    """
    for key, path in _read_from(recipe, run_dir):
        raise ConfigError(
            f"the run in {run_dir} would be moved aside, and {_what(key, path, run_dir)}",
            where=f"runner.overwrite: true, {_where(recipe)}",
            remedy="choose another runner.logger.experiment_name, or copy to another place what the new run reads",
        )


def _read_from(recipe: Recipe, run_dir: Path) -> Iterator[tuple[str, str]]:
    """(key, path) of what a recipe reads in a directory, by the path as written or where its links lead."""
    tree = recipe.to_dict()
    named = [pair for pair in named_files(tree) if pair[0] not in WRITTEN_KEYS]
    named += [(key, path) for key in DATA_KEYS for path in data_paths(get_value(tree, key)) if os.path.isabs(path)]
    folders = {Path(os.path.abspath(run_dir)), run_dir.resolve()}
    for key, path in named:
        fixed = Path(re.split(r"[*?\[]", path)[0])  # of a pattern, what is before it
        if any(place.is_relative_to(folder) for place in (Path(path), fixed.resolve()) for folder in folders):
            yield key, path


def _what(key: str, path: str, run_dir: Path) -> str:
    here = Path(os.path.abspath(path)) in (Path(os.path.abspath(run_dir)), run_dir.resolve())
    return f"{key} {'is that directory' if here else f'lies in it: {path}'}"


def _where(recipe: Recipe) -> str:
    logger = recipe.runner.logger
    return f"runner.logger.log_path: {logger.log_path}, experiment_name: {logger.experiment_name}"
