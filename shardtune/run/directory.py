"""Run directories: whether one is new, to be continued or finished, and the lock on it."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shardtune.checkpoint.atomic import read_json, recover, write_json, write_text
from shardtune.checkpoint.checksums import directory_faults, unlike_written
from shardtune.checkpoint.state_file import fault_of
from shardtune.checkpoint.store import CheckpointStore, open_checkpoint
from shardtune.checkpoint.verified import described, none_is_sound
from shardtune.config import Recipe, load_recipe
from shardtune.config.environment import digests
from shardtune.config.own_code import record_own_code
from shardtune.data.file_lock import FileLock
from shardtune.errors import CheckpointError, ConfigError
from shardtune.launch.events import ALIVE
from shardtune.launch.local import launch_id, restarted_launch
from shardtune.launch.signals import BEFORE_FIRST_STEP, BEFORE_FURTHER_STEP
from shardtune.run.identity import (
    CHECKPOINTS,
    CONFIG,
    FINAL,
    MANIFEST,
    holds_results,
    holds_run,
    lost_run,
    read_manifest,
    record_file,
    replaced_records,
    require_identity,
)
from shardtune.run.own_paths import check_name, check_new, check_overwritten, note_on_moved
from shardtune.run.resume_check import check_changes, goes_on
from shardtune.run.versions import installed_version
from shardtune.training.loggers import METRICS_FILE

DROPPED_ROWS = "dropped_rows.jsonl"
FROM_ENVIRONMENT = "values_from_environment"
"""The entry of the manifest with hashes of the values that the recipe takes from environment variables."""
LOCK = ".lock"
WRITTEN = (MANIFEST, CONFIG, DROPPED_ROWS, "lock-probe")
"""Files that a killed process may leave under temporary names."""
LOCK_WAIT_SECONDS = 5.0
"""Orphaned ranks of a killed run end within a second or two."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a `train` command will do with its run directory.

    Attributes:
        run_dir: the run directory.
        resume_from: the checkpoint to continue from; None: start from scratch.
        older: earlier ones, newest first, for the case that it cannot be loaded.
        finished: the run is complete and there is nothing to do.
        resumed_from: the checkpoint of `runner.resume_dir`, of this run or another, if any.
        move_aside: an older run is renamed first.
        notes: messages for the user.
    """

    run_dir: Path
    resume_from: Path | None = None
    older: tuple[Path, ...] = ()
    resumed_from: str | None = None
    finished: bool = False
    move_aside: bool = False
    notes: tuple[str, ...] = ()

    @property
    def message_of_stop(self) -> str:
        """What a signal before this run's next step ends with."""
        return BEFORE_FIRST_STEP if self.resume_from is None else BEFORE_FURTHER_STEP


def run_directory(recipe: Recipe) -> Path:
    logger = recipe.runner.logger
    return Path(logger.log_path) / str(logger.experiment_name)


def plan_run(recipe: Recipe, *, sizes: bool = True) -> RunPlan:
    """Plan a run, as `_plan`; its first note is on a recipe of a run that was moved."""
    plan, moved = _plan(recipe, sizes=sizes), note_on_moved(recipe, run_directory(recipe))
    return replace(plan, notes=(moved, *plan.notes)) if moved else plan


def _plan(recipe: Recipe, *, sizes: bool) -> RunPlan:
    """Plan a run; writes nothing.

    Args:
        recipe: of the run.
        sizes: whether to look at every file of every checkpoint and of a finished `final/`. They have some of each
            rank, so a rank does not.

    Raises:
        CheckpointError, ConfigError: the directory cannot be used.
    """
    run_dir = run_directory(recipe)
    check_name(run_dir, Path(recipe.runner.logger.log_path))
    check_writable(run_dir, "runner.logger.log_path")
    _check_names(run_dir)
    runner = recipe.runner
    if _begun_before(run_dir):  # the existing run belongs to this launch: it is continued, not moved aside
        return _continue(run_dir, recipe, read_manifest(run_dir).get("resumed_from"), sizes)
    is_old = holds_run(run_dir) or holds_results(run_dir)
    if not is_old:
        check_new(recipe, run_dir)
    if runner.overwrite:
        if is_old:
            check_overwritten(recipe, run_dir)
        return RunPlan(run_dir, move_aside=is_old)
    require_identity(run_dir)
    requested = None if runner.resume_dir in (None, "auto") else open_checkpoint(str(runner.resume_dir), sizes=sizes)
    if not holds_run(run_dir):
        notes = () if requested is None else _check_changes(_run_of(requested), recipe)
        notes = (*notes, *lost_run(run_dir))
        return RunPlan(run_dir, resume_from=requested, resumed_from=str(requested) if requested else None, notes=notes)
    if runner.resume_dir is None:
        raise _occupied(run_dir)
    began_from = read_manifest(run_dir).get("resumed_from")
    if requested is None or str(requested) == began_from or requested == _newest(run_dir, sizes):
        return _continue(run_dir, recipe, began_from, sizes)
    if _run_of(requested) != run_dir.resolve():
        raise _occupied(run_dir)
    notes = (*_check_changes(run_dir, recipe), f"going back to {requested}; later checkpoints go with the next save")
    return RunPlan(run_dir, resume_from=requested, resumed_from=str(requested), notes=notes)


def _check_names(run_dir: Path) -> None:
    """Refuse a directory in the place of a file or link that the run will write."""
    for name in ("checkpoints/latest", "checkpoints/best", CONFIG, MANIFEST, METRICS_FILE):
        place = run_dir / name
        if place.is_dir() and not place.is_symlink():
            raise CheckpointError(
                f"{place} is a directory, and the run keeps a file or link of this name there",
                where=str(place),
                remedy="move it away, or choose another runner.logger.experiment_name",
            )


def _begun_before(run_dir: Path) -> bool:
    """Whether this is a restart of the ranks, of the same launch that created the run."""
    launch = restarted_launch()
    return launch is not None and read_manifest(run_dir).get("launch") == launch


def _continue(run_dir: Path, recipe: Recipe, began_from: str | None, sizes: bool) -> RunPlan:
    """Continue a run from its newest checkpoint; one that has saved nothing yet begins again."""
    store = CheckpointStore(run_dir / CHECKPOINTS, sizes=sizes)
    faults = store.faults()
    candidates = [path.resolve() for path in store.newest_first(faults)]
    notes = [*replaced_records(run_dir), *(f"passed over the checkpoint {name}: {why}" for name, why in faults.items())]
    if began_from is not None and (not candidates or fault_of(Path(began_from), sizes=sizes) is None):
        candidates = list(dict.fromkeys([*candidates, open_checkpoint(began_from, sizes=sizes)]))
    was_finished = "finished" in read_manifest(run_dir)
    if not candidates and faults:
        raise none_is_sound(store.folder, faults)
    if not candidates and not was_finished:
        return RunPlan(
            run_dir, notes=("no checkpoint is left in this directory, or none was saved yet: the run begins again",)
        )
    notes += _check_changes(run_dir, recipe)
    further = not was_finished or goes_on(load_config(run_dir), recipe)
    if was_finished and further and not any(path.parent == store.folder.resolve() for path in candidates):
        raise _without_checkpoints(run_dir)
    kept = [name for name in store.not_provably_own() if name not in faults]
    if kept:
        notes.append(f"{', '.join(kept)}: saved by an earlier version, without the id of the run; never removed")
    newest = candidates[0] if candidates else None
    plan = RunPlan(run_dir, newest, tuple(candidates[1:]), began_from, notes=tuple(notes))
    if further:
        return plan
    plan = replace(plan, finished=True)
    return without_final(plan, partial(directory_faults, content=False)) if sizes else plan


def _without_checkpoints(run_dir: Path) -> CheckpointError:
    return CheckpointError(
        "the run is finished, and no checkpoint is left from which it could train on: it would begin again, and "
        f"replace {FINAL}/",
        where=str(run_dir / CHECKPOINTS),
        remedy=f"put a checkpoint back, train {run_dir / FINAL} on in another run (actor.model.model_path), or start "
        "over with runner.overwrite=true",
    )


def without_final(plan: RunPlan, damage_of: Callable[[Path], Mapping[str, str]]) -> RunPlan:
    """A finished run's plan, as it is if `final/` is what was written; otherwise to write it again.

    Args:
        plan: of a finished run.
        damage_of: the damaged files of a directory, with what is wrong.

    Raises:
        CheckpointError: it has to be written again, and no checkpoint is left.
    """
    final = plan.run_dir / FINAL
    recorded = read_manifest(plan.run_dir)["finished"].get(FINAL)
    what = unlike_written(final, recorded)
    if what is None and (faults := damage_of(final)):
        what = f"is not what was written: {described(faults)}"
    if what is None:
        return plan
    if plan.resume_from is None:
        raise CheckpointError(
            f"the run is finished, but {final} {what}, and no checkpoint is left to write it from",
            where=str(plan.run_dir),
            remedy=f"put back the files of {FINAL}/, or train again: runner.overwrite=true, or another "
            "runner.logger.experiment_name",
        )
    note = f"{final} {what}; it is written again from {plan.resume_from.name}"
    return replace(plan, finished=False, notes=(*plan.notes, note))


def _check_changes(run_dir: Path | None, recipe: Recipe) -> tuple[str, ...]:
    """As `check_changes`; a checkpoint outside a run directory has no recipe to compare with."""
    if run_dir is None:
        return ()
    return check_changes(load_config(run_dir), recipe, run_dir, read_manifest(run_dir).get(FROM_ENVIRONMENT, {}))


def _newest(run_dir: Path, sizes: bool) -> Path | None:
    """The newest checkpoint of a run, as `open_checkpoint` returns it."""
    latest = CheckpointStore(run_dir / CHECKPOINTS, sizes=sizes).latest()
    return None if latest is None else latest.resolve()


def _occupied(run_dir: Path) -> CheckpointError:
    return CheckpointError(
        f"{run_dir} already holds a run",
        where="runner.logger",
        remedy=(
            "choose another runner.logger.experiment_name, continue it with runner.resume_dir=auto, or move it aside "
            "with runner.overwrite=true"
        ),
    )


def _run_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint lies in."""
    candidate = checkpoint.resolve().parent.parent
    return candidate if holds_run(candidate) else None


def check_writable(folder: Path, key: str) -> None:
    """Refuse a folder, existing or not, that cannot be written.

    Args:
        folder: where files will be written.
        key: the setting that named it, for messages.
    """
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise CheckpointError(
            f"{folder} cannot be written: {existing} is {'read-only' if existing.is_dir() else 'not a directory'}",
            where=key,
            remedy=f"set {key} to a directory that can be written",
        )


def load_config(run_dir: Path) -> Recipe:
    """The recipe a run was made with."""
    config = record_file(run_dir, CONFIG)
    if config is None and (run_dir / CONFIG).is_file():
        config = run_dir / CONFIG  # damaged; reading it says how
    if config is None:
        raise no_run(run_dir)
    in_memory = read_manifest(run_dir).get("in_memory", [])
    return load_recipe(config, in_memory=in_memory, files_must_exist=False)


def no_run(directory: Path) -> CheckpointError:
    """The error for a directory that is none of a run, or is gone."""
    return CheckpointError(
        f"{directory} is not a run directory: it has no {CONFIG}",
        where=str(directory),
        remedy="give the directory that shardtune train made (runs/<experiment_name>)",
    )


class RunLock:
    """Prevents two runs in one directory; released when its process ends, in whatever way.

    Args:
        run_dir: the directory.
        patience: how many seconds longer than usual to wait for a process that holds it.
    """

    def __init__(self, run_dir: Path, patience: float = 0.0) -> None:
        self._path = run_dir / LOCK
        self._patience = patience
        self._lock = FileLock(self._path)

    @property
    def held(self) -> bool:
        return self._lock.held

    @property
    def is_gone(self) -> bool:
        """Whether the directory, held by this lock, was deleted or moved; noticed within a second or two."""
        return self._lock.is_gone

    def acquire(self) -> None:
        """Create and lock the directory; waits some seconds for another process to release it.

        Raises:
            CheckpointError: another process has locked it, or it cannot be written.
        """

        def gives_up(_: str, seconds: float) -> bool:
            return seconds > LOCK_WAIT_SECONDS + self._patience and self._lock.holder_alive

        try:
            self._path.parent.resolve().mkdir(parents=True, exist_ok=True)  # also where a link leads to nothing yet
            acquired = self._lock.acquire(gives_up)
        except OSError as error:
            raise unwritable(self._path.parent, error) from error
        if not acquired:
            raise CheckpointError(
                f"{self._lock.holder()} is training in {self._path.parent}",
                where=str(self._path),
                remedy="wait for it, stop it, or choose another runner.logger.experiment_name",
            )

    def acquire_existing(self) -> None:
        """Lock the directory if it already holds a run."""
        run_dir = self._path.parent
        if self._path.exists() or holds_run(run_dir) or holds_results(run_dir):
            self.acquire()

    def release(self) -> None:
        self._lock.release()


def check_unlocked(run_dir: Path) -> None:
    """Refuse a directory that another run is using; changes nothing."""
    lock = RunLock(run_dir)
    lock.acquire_existing()
    lock.release()


def tidy(run_dir: Path) -> None:
    """Clean up after a killed process; the directory must be locked."""
    if not run_dir.is_dir():
        return
    CheckpointStore(run_dir / CHECKPOINTS).clean()
    recover(run_dir)
    (run_dir / ALIVE).unlink(missing_ok=True)
    for left in run_dir.glob(".*"):
        if re.fullmatch(rf"\.{FINAL}(\.(tmp|old)-[0-9a-f]{{8}})*\.(tmp|removed)-[0-9a-f]{{8}}", left.name):
            shutil.rmtree(left, ignore_errors=True)
        elif re.fullmatch(
            rf"\.(lock-probe|{re.escape(MANIFEST)}|{re.escape(CONFIG)}|{DROPPED_ROWS})[.-][0-9a-f]{{8}}", left.name
        ):
            left.unlink(missing_ok=True)


def begin_run(
    plan: RunPlan,
    recipe: Recipe,
    manifest: Mapping[str, object],
    lock: RunLock,
    moved: Callable[[Path], None] = lambda aside: None,
) -> RunLock:
    """Create the run directory with its resolved recipe and manifest; an older run is moved aside first.

    Where the run directory is a link, the directory that it leads to is moved aside, and the link stays.

    Args:
        plan: of the run.
        recipe: the current one.
        manifest: facts about the run (versions, data, dtypes).
        lock: of the directory, acquired if it held a run before.
        moved: receives the new path of the older run.

    Returns:
        The lock on the run directory.
    """
    if plan.move_aside:
        old = plan.run_dir.resolve() if plan.run_dir.is_symlink() else plan.run_dir
        aside = old.with_name(f"{old.name}.old-{time.strftime('%Y%m%d-%H%M%S')}")
        try:
            old.rename(aside)
        except OSError as error:
            raise ConfigError(
                f"{plan.run_dir} cannot be moved aside: {error.strerror}",
                where="runner.overwrite",
                remedy="give write permission to the directory around it, or choose another experiment_name",
            ) from error
        lock.release()
        moved(aside)
    if not lock.held:
        lock = RunLock(plan.run_dir)
        lock.acquire()
        if holds_run(plan.run_dir):
            lock.release()
            raise CheckpointError(
                f"another process has made a run in {plan.run_dir} meanwhile",
                where="runner.logger",
                remedy="choose another runner.logger.experiment_name, or continue that run with the same command",
            )
    try:
        record_own_code(recipe)
        # The manifest first: a directory without a recipe is not yet a run, and an old one loses its "finished" mark.
        facts = {"resumed_from": plan.resumed_from, "launch": launch_id()}
        values = {FROM_ENVIRONMENT: digests(recipe.to_dict(), recipe.references)}
        write_json(plan.run_dir / MANIFEST, {**manifest, **facts, **values})
        write_text(plan.run_dir / CONFIG, recipe.to_yaml())
    except BaseException as error:
        lock.release()
        if isinstance(error, OSError):
            raise unwritable(plan.run_dir, error) from error
        raise
    return lock


def write_dropped_rows(run_dir: Path, rows: Iterable[Mapping[str, object]]) -> int:
    """Write a line of JSON per row into `dropped_rows.jsonl`, which does not exist without any; returns how many."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    try:
        if lines:
            write_text(run_dir / DROPPED_ROWS, "".join(lines))
        else:
            (run_dir / DROPPED_ROWS).unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(run_dir, error) from error
    return len(lines)


def unwritable(run_dir: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{run_dir} cannot be written: {error.strerror}",
        where="runner.logger.log_path",
        remedy="set runner.logger.log_path to a directory that can be written",
    )


def finish_run(run_dir: Path, outcome: Mapping[str, object]) -> None:
    """Record in the manifest that the run is complete."""
    write_json(run_dir / MANIFEST, {**read_json(run_dir / MANIFEST), "finished": dict(outcome)})


def environment() -> dict[str, object]:
    """Versions that numerics depend on, for the manifest and for bug reports; torch's with its build."""
    import torch  # what reads a run's directory alone does without it

    packages = ("shardtune", "transformers", "tokenizers", "safetensors", "datasets", "numpy")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        **{name: installed_version(name) for name in packages},
        "git": _git(),
    }


def _git() -> str | None:
    """The commit of the working directory, with a mark if it has changes; None outside a repository."""
    try:
        describe = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return describe.stdout.strip() if describe.returncode == 0 else None
