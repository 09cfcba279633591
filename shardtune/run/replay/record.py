"""What a run has recorded that a replay of one of its steps starts from: checkpoints, metrics, ranks, data files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardtune.checkpoint.records import intact_copy
from shardtune.checkpoint.state_file import saved_step
from shardtune.checkpoint.store import CheckpointStore, open_checkpoint
from shardtune.checkpoint.training_state import read_training_state
from shardtune.data.loader.protocol import DataState
from shardtune.data.loader.step_loader import StepLoader
from shardtune.errors import CheckpointError, ConfigError
from shardtune.launch.events import ANOMALY, BEGINS, EVENTS
from shardtune.run.identity import CONFIG, MANIFEST, read_manifest
from shardtune.training.loggers import read_metrics

LOSS, NORM = "train/loss", "train/grad_norm"
INITIAL = "initial"
"""The value of `--checkpoint` for the weights that training began with."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a replay begins.

    Attributes:
        checkpoint: the folder; None: the initial weights.
        step: optimizer steps done there.
        state: the JSON part of the checkpoint; empty without one.
    """

    checkpoint: Path | None
    step: int
    state: Mapping[str, Any]

    @property
    def data(self) -> DataState:
        """The position in the data."""
        return DataState(**self.state["data"]) if self.state else DataState()

    def __str__(self) -> str:
        return "the initial weights" if self.checkpoint is None else f"the checkpoint {self.checkpoint.name}"


class Record:
    """The record of a run.

    Args:
        run_dir: of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    @cached_property
    def steps(self) -> dict[int, dict[str, float]]:
        """The logged lines of training by step; a value that was not finite is NaN."""
        found = {}
        for line in read_metrics(self.run_dir):
            if LOSS in line:
                known = {key: float("nan") if value is None else value for key, value in line.items()}
                found[int(line["step"])] = known
        return found

    @cached_property
    def last_step(self) -> int:
        """The last step that is known of: logged, or in a checkpoint."""
        return max([*self.steps, *self._store.steps()], default=0)

    def after(self, step: int, loader: StepLoader) -> DataState | None:
        """The position in the data after a logged step; None where it was not logged."""
        line = self.steps.get(step)
        if line is None or "epoch" not in line:
            return None
        return loader.state_at(line["epoch"])

    def nearest_before(self, step: int, loader: StepLoader, start: Start) -> tuple[int, DataState]:
        """The last step before `step`, not before `start`, after which the position is known, and that position.

        That in metrics.jsonl comes first: the one in a checkpoint may be behind rows that a spike was left out with.
        """
        for done in range(step - 1, start.step - 1, -1):
            state = self.after(done, loader)
            if state is not None:
                return done, state
        return start.step, start.data

    def ranks(self, step: int) -> int:
        """The ranks on which a step was trained; the last ones where that is not recorded."""
        known = int(read_manifest(self.run_dir).get("world_size", 1))
        for event in self._begun:
            if int(event["step"]) < step and event.get("ranks"):
                known = int(event["ranks"])
        return known

    def between_starts(self, step: int) -> tuple[int, int | None]:
        """The step after which the run was started or continued to train `step`, and the next such; None: no other."""
        begun = [int(event["step"]) for event in self._begun]
        mine = max((place for place, done in enumerate(begun) if done < step), default=-1)
        return begun[mine] if mine >= 0 else 0, min(begun[mine + 1 :], default=None)

    def recipe_at(self, step: int) -> Path | None:
        """The recipe with which a step was trained, if it was another time than the last and a checkpoint has it."""
        return self._copy(step, CONFIG)

    def uncertain_settings(self, step: int, start: Start) -> list[str]:
        """Why a step, replayed from a checkpoint, may have been trained with other settings than those taken."""
        after, end = self.between_starts(step)
        notes = []
        if end is not None and self.recipe_at(step) is None:
            notes.append(
                f"the run went on after step {end}, and no checkpoint is left of steps {after + 1} to {end}, with "
                "their recipe: if settings were changed then, these numbers are those of the later ones"
            )
        if start.step < after:
            notes.append(
                f"the run went on after step {after}: if settings or the number of ranks were changed then, the steps "
                f"from {start.step + 1} to {after} were trained otherwise than here"
            )
        return notes

    def _copy(self, step: int, name: str) -> Path | None:
        """A file of the run as it was when a step was trained; None if that was the last time, or is not known."""
        after, end = self.between_starts(step)
        if end is None:
            return None
        folders = (self._store.path(done) for done in self._store.steps() if after < done <= end)
        return next((file for file in (intact_copy(folder, name) for folder in folders) if file is not None), None)

    def stopped_before(self, step: int) -> DataState | None:
        """The position before a step that the run has tried last, and whose numbers were wrong; None if it was not."""
        if step != self.last_step + 1:
            return None
        found = None
        for event in self._events:
            if event.get("event") == ANOMALY and int(event["step"]) == step - 1:
                found = DataState(int(event["epoch"]), int(event["rows_consumed"]))
        return found

    @property
    def _begun(self) -> list[dict[str, Any]]:
        """The events of its starts and continuations."""
        return [event for event in self._events if event.get("event") in BEGINS]

    @cached_property
    def _events(self) -> list[dict[str, Any]]:
        found, file = [], self.run_dir / EVENTS
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            with suppress(ValueError):  # a torn line
                found.append(json.loads(line))
        return found

    def data_files(self, start: Start, step: int) -> list[Sequence[Mapping[str, object]]]:
        """The training files with their hashes, as they were at a checkpoint, and when the run went on to a step."""
        copy = self._copy(step, MANIFEST)
        manifest = read_manifest(self.run_dir) if copy is None else json.loads(copy.read_text(encoding="utf-8"))
        then = manifest.get("data", {}).get("train", [])
        if not start.state:
            return [then]
        at_start = start.state["data_files"]
        return [at_start] if start.step > self.between_starts(step)[0] else [at_start, then]

    # Where to begin.

    def start(self, step: int, which: str | None) -> Start:
        """The checkpoint that a replay of a step begins with.

        Args:
            step: to be replayed.
            which: `--checkpoint`; None: the nearest before the step.

        Raises:
            CheckpointError: there is no such checkpoint, or it is of a later step.
        """
        if which == INITIAL:
            return Start(None, 0, {})
        if which is not None:
            found = self._store.resolve(which)
            start = self._of(found)
            if start.step >= step:
                raise CheckpointError(
                    f"the checkpoint {found.name} is not from before step {step}",
                    where=f"--checkpoint {which}",
                    remedy=f"name one of at most step {step - 1}, or {INITIAL} for the initial weights",
                )
            return start
        folders = {done: self._store.path(done) for done in self._store.steps()}
        for folder in self._begun_from():
            folders.setdefault(saved_step(folder), folder)
        before = [done for done in folders if done < step]
        return self._of(folders[max(before)]) if before else Start(None, 0, {})

    @property
    def _store(self) -> CheckpointStore:
        return CheckpointStore(self.run_dir / "checkpoints")

    def _begun_from(self) -> list[Path]:
        """The checkpoint of another run that this one went on from, if it is still there."""
        given = read_manifest(self.run_dir).get("resumed_from")
        if given is None:
            return []
        try:
            return [open_checkpoint(str(given))]
        except CheckpointError:
            if not self._store.steps():
                raise
            return []

    def _of(self, folder: Path) -> Start:
        return Start(folder, saved_step(folder), read_training_state(folder))


def check_step(record: Record, step: int) -> None:
    """Refuse a step that the run cannot have.

    Raises:
        ConfigError: it is no step, or the run has not come that far.
    """
    last = record.last_step
    if step < 1:
        raise ConfigError(f"there is no step {step}: the first is 1", where="--step", remedy=f"1 to {last + 1}")
    if step > last + 1:
        raise ConfigError(
            f"the run has {last:,} steps, and of those after it only the next is known",
            where=f"--step {step}",
            remedy=f"a step up to {last + 1:,}",
        )
