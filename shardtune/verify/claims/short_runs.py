"""Shortened runs of a recipe by the real command, and what they recorded."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock, Thread
from typing import IO

from shardtune.config import Recipe
from shardtune.errors import ConfigError, Interrupted
from shardtune.launch.module_process import module_command, module_environment
from shardtune.training.loggers import METRICS_FILE
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.verify.claims.evidence import Evidence, read_evidence, require_frozen
from shardtune.verify.claims.room import Room
from shardtune.verify.claims.short_recipe import shortened
from shardtune.verify.result import Failed, Skipped

LAST_LINES = 12
SECONDS_BETWEEN = 0.5
"""Between two looks at what a run has logged."""
UNREPEATABLE = "does not have a deterministic implementation"
"""In torch's error where an operation has no kernel that repeats its bits."""
OF_OTHER_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(slots=True)
class Attempt:
    """One process that trains a shortened run, from its start or from the last checkpoint.

    Attributes:
        run: the run that it trains.
        process: of the command.
        output: what it prints.
        started: the time of its start, in seconds since 1970.
        continues: whether the same recipe has been accepted before, and is continued.
    """

    run: ShortRun
    process: subprocess.Popen[bytes]
    output: Path
    started: float
    continues: bool
    _stream: IO[bytes] = field(repr=False)

    def wait(self, *, expect: Iterable[int] = (0,)) -> int:
        """The exit code, once the process has ended.

        Raises:
            ConfigError: the recipe has a mistake; the message is the command's.
            Failed: it ended otherwise than expected.
            Skipped: the device has no kernel that repeats its bits.
        """
        code = self.process.wait()
        self._stream.close()
        if code in expect:
            return code
        lines = self.output.read_text(errors="replace").strip().splitlines()
        for line in lines:
            if UNREPEATABLE in line:
                raise Skipped(f"bits cannot be repeated on this device: {line.strip()}")
        last = "\n".join(lines[-LAST_LINES:])
        if code == 2 and self.continues:
            require_frozen(read_evidence(self.run.recorded), f"the run {self.run.name}")
            raise Failed(
                f"the run {self.run.name} is refused where it is continued:\n{last}",
                where=self.run.summary,
                remedy="let what the message names be the same each time that the worker is made: seed what it draws",
            )
        if code == 2:
            raise ConfigError(f"the shortened run was refused:\n{last}", where=f"run {self.run.name}")
        raise Failed(
            f"the run {self.run.name} ended with exit code {code}:\n{last}",
            where=self.run.summary,
            remedy="train the recipe for some steps (runner.max_steps) until this is mended",
        )

    def ends_within(self, seconds: float) -> bool:
        """Whether the process has ended, or does within this time."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            return True
        return False

    def end(self) -> None:
        """End the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._stream.close()


@dataclass(frozen=True)
class ShortRun:
    """A shortened run.

    Attributes:
        name: of its run directory.
        recipe: shortened.
        folder: of its files.
    """

    name: str
    recipe: Recipe
    folder: Path

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.folder / self.name

    @property
    def summary(self) -> str:
        """What distinguishes it, for messages."""
        ranks = self.recipe.runner.nproc_per_node
        return f"{self.name}, {ranks} rank{'s' if ranks > 1 else ''}, {self.recipe.actor.model.precision}"

    @property
    def recorded(self) -> Path:
        """The folder of what its ranks record."""
        return self.folder / f"{self.name}.recorded"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint after a step."""
        return self.directory / "checkpoints" / f"global_step_{step}"

    @cached_property
    def evidence(self) -> Evidence:
        """What its ranks have recorded; read when the run is over."""
        return read_evidence(self.recorded)


class ShortRuns:
    """Makes shortened runs of one recipe; a run of the same values is made once. Several threads may use it.

    Args:
        recipe: the user's.
        folder: for all files; removed by the caller.
        steps: optimizer steps of each run.
        ranks: numbers of ranks to compare.
        fewer_rows: whether the rows are cut, so that an epoch ends within the steps.
        make_worker: maps a recipe to its worker, for claims that compute something in this process.
        report: receives a line for each run that starts.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        *,
        steps: int,
        ranks: tuple[int, ...],
        fewer_rows: bool,
        make_worker: Callable[..., FSDPSftWorker],
        report: Callable[[str], None],
    ) -> None:
        self.make_worker = make_worker
        self._fewer_rows = fewer_rows
        self.recipe, self.folder, self.steps, self.ranks = recipe, folder, steps, ranks
        self._report = report
        self._room = Room(recipe.runner.device)
        self._lock = Lock()
        self._closed = False
        self._locks: dict[str, Lock] = {}  # by the values of a run: only one thread makes it
        self._made: dict[str, ShortRun] = {}
        self._attempts: list[Attempt] = []

    @property
    def on_gpu(self) -> bool:
        """Whether the runs are on GPUs."""
        return self._room.on_gpu

    def new(self, name: str, changes: Mapping[str, object] | None = None, *, ranks: int | None = None) -> ShortRun:
        """A run of which nothing has been trained yet.

        Args:
            name: of its directory, unique.
            changes: values of the recipe by dotted key.
            ranks: by default those of the recipe.
        """
        count = self.recipe.runner.nproc_per_node if ranks is None else ranks
        recipe = shortened(
            self.recipe, self.folder, name, self.steps, count, changes or {}, fewer_rows=self._fewer_rows
        )
        return ShortRun(name, recipe, self.folder)

    def start(
        self, run: ShortRun, *, stop_after: int | None = None, changes: Mapping[str, object] | None = None
    ) -> Attempt:
        """Start a process that trains a run, or continues it from its last checkpoint.

        Args:
            run: to train.
            stop_after: it stops after this step as on a signal, with exit code 75; None: it trains to the end.
            changes: values of the recipe, for this process and not for the run.
        """
        with self._lock:
            number = sum(attempt.run is run for attempt in self._attempts)
        file = self.folder / f"{run.name}.{number}.yaml"
        recipe = run.recipe
        if changes:
            given = changes.get("runner.nproc_per_node", recipe.runner.nproc_per_node)
            assert isinstance(given, int)
            recipe = shortened(run.recipe, self.folder, run.name, self.steps, given, changes, fewer_rows=False)
        file.write_text(recipe.to_yaml())
        taken = self._room.take(recipe.runner.nproc_per_node)
        words = ["--record", str(run.recorded)]
        words += [] if stop_after is None else ["--stop-after", str(stop_after)]
        self._report(f"{run.summary}{'' if stop_after is None else f', stopped after step {stop_after}'}")
        output = self.folder / f"{run.name}.{number}.txt"
        stream = output.open("wb")
        with self._lock:  # no process is started once they are ended
            if self._closed:
                stream.close()
                self._room.give_back(taken)
                raise Interrupted("the check was stopped")
            process = subprocess.Popen(
                module_command("shardtune", "train", str(file), *words),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=_environment(),
            )
            attempt = Attempt(run, process, output, time.time(), number > 0 and not changes, stream)
            self._attempts.append(attempt)
        Thread(target=self._give_back, args=(attempt, taken), daemon=True).start()
        return attempt

    def program(self, name: str, command: Sequence[str], *, remedy: str) -> None:
        """Run another program than a training to its end, on one core.

        Raises:
            Failed: it ended with an error, whose last lines are the message.
        """
        taken = self._room.take(1)
        self._report(name)
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=_environment())
        finally:
            self._room.give_back(taken)
        if done.returncode:
            last = "\n".join(done.stderr.strip().splitlines()[-LAST_LINES:])
            raise Failed(f"{name} ended with exit code {done.returncode}:\n{last}", where=name, remedy=remedy)

    def _give_back(self, attempt: Attempt, taken: int) -> None:
        log = attempt.run.directory / METRICS_FILE
        try:
            while not attempt.ends_within(SECONDS_BETWEEN):
                self._room.weigh_running(log)
            self._room.weigh(log)
        finally:
            self._room.give_back(taken)

    def seconds_to(self, run: ShortRun, step: int) -> float:
        """From the start of a run to its checkpoint of a step."""
        started = next(attempt.started for attempt in self._attempts if attempt.run is run)
        return run.checkpoint(step).stat().st_mtime - started

    def uninterrupted(
        self, name: str, changes: Mapping[str, object] | None = None, *, ranks: int | None = None
    ) -> ShortRun:
        """A run trained from its start to its end; made once for the same values, whatever its name."""
        return self._made_once(self.new(name, changes, ranks=ranks))

    def several(self, runs: Iterable[ShortRun]) -> list[ShortRun]:
        """Runs trained from start to end side by side, as far as there is room; each made once."""
        with ThreadPoolExecutor() as threads:
            return list(threads.map(self._made_once, runs))

    def _made_once(self, run: ShortRun) -> ShortRun:
        key = self._key(run)
        with self._lock:
            lock = self._locks.setdefault(key, Lock())
        with lock:
            if key not in self._made:
                self.start(run).wait()
                self._made[key] = run
            return self._made[key]

    def said(self, text: str) -> list[str]:
        """The first line with some text that a run has printed, if there is one."""
        for attempt in self._attempts:
            for line in attempt.output.read_text(errors="replace").splitlines():
                if text in line:
                    return [line.strip()]
        return []

    def close(self) -> None:
        """End the processes that still run; no others are started."""
        with self._lock:
            self._closed = True
        for attempt in self._attempts:
            attempt.end()

    @staticmethod
    def _key(run: ShortRun) -> str:
        values = run.recipe.to_dict()
        values["runner"]["logger"]["experiment_name"] = None
        return repr(values)


def stopped(attempt: Attempt) -> bool:
    """Wait for a process that may be stopped; whether it was, and not at its end."""
    return attempt.wait(expect=(0, Interrupted.exit_code)) == Interrupted.exit_code


def _environment() -> dict[str, str]:
    """The variables of a run: this process's, without those of a launcher that may have started it."""
    return {name: value for name, value in module_environment().items() if name not in OF_OTHER_LAUNCHERS}
