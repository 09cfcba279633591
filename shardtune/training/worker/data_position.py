"""The position of training in its data: the remaining steps, the horizon, and their state in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, final

from shardtune.config import RunnerConfig
from shardtune.data.loader.protocol import DataState, Loader, MicroBatch, Step
from shardtune.data.loader.step_loader import StepLoader
from shardtune.data.user_loader.batch import UserBatch, with_names
from shardtune.data.user_loader.loader import BatchLoader
from shardtune.errors import ConfigError, ModelError
from shardtune.training.anomalies import Anomalies
from shardtune.training.bad_rows import BadPart
from shardtune.training.step import StepResult

NameRows = Callable[[Step[MicroBatch], Sequence[BadPart]], str]
Wrap = Callable[[Iterator[Step[MicroBatch]]], Iterator[Step[MicroBatch]]]
"""Passes steps on, unchanged."""
MAX_SKIPPED = 10
"""Steps in a row that may be skipped for a loss or gradient that is not finite."""


@final
class DataPosition:
    """The position of training in the steps of a loader.

    Args:
        loader: yields steps from any position.
        runner: how long training lasts.
        name_rows: maps a step, and its parts that are not finite, to the names of rows, for messages.
        further: a remedy for steps that are passed over, beside those for any run.

    Attributes:
        state: epoch and rows consumed.
        steps: the steps from there on.
        horizon: optimizer steps until `max_epochs` or `max_steps`, whichever comes first; those behind count as they
            were cut, also where batches or data have changed since.
        taken: this rank's batches of the next step that `batches` has given already, where not all have been.
        skipped_steps: the number of skipped steps.
        problem: why the last of them was skipped.
        anomalies: skipped steps whose numbers are wrong, and what follows them.
        none_finite: whether each of its rows is not finite by itself; False once a step updates.
        passed_over: its rows; those that are not finite, where they were found.
        skipped: both, for a message.
    """

    def __init__(
        self, loader: Loader[MicroBatch], runner: RunnerConfig, name_rows: NameRows, further: str = ""
    ) -> None:
        self.loader = loader
        self._runner = runner
        self._name_rows = name_rows
        self._further = further
        self.state = DataState()
        self._wrap: Wrap = lambda steps: steps
        self.steps: Iterator[Step[MicroBatch]] = loader.steps(self.state)
        self._ahead = 0  # steps behind, less those that the same rows would be as they are cut now
        self.horizon = horizon(runner, loader)
        self.taken, self._cut, self._after = 0, 0, self.state
        self._rest: list[object] = []
        self.skipped_steps = 0
        self._skipped_in_a_row = 0
        self.problem = ""
        self.skipped = ""
        self.anomalies = Anomalies(runner)
        self.none_finite = False
        self.passed_over = ""
        self.batches: Iterator[object] = self._batches()

    def _batches(self) -> Iterator[object]:
        """This rank's batches, one by one; what is taken counts as consumed when the last of its step is."""
        while True:
            if not self._rest:
                step = next(self.steps)
                batches: list[object] = [
                    with_names(b.fields) if isinstance(b, UserBatch) else b for b in step.micro_batches
                ]
                if self.taken and len(batches) != self._cut:
                    raise _cut_otherwise(self.taken, self._cut, len(batches))
                self._cut, self._rest, self._after = len(batches), batches[self.taken :], step.after
            batch = self._rest.pop(0)
            if self._rest:
                self.taken += 1
            else:
                self.state, self.taken = self._after, 0
                self.anomalies.steps += 1
            yield batch

    def _restart(self, state: DataState, taken: int = 0) -> None:
        """Continue from a position; what was left of a step is not given any more."""
        self.state, self.taken, self._rest = state, taken, []
        self.steps = self._wrap(self.loader.steps(state))

    def observe(self, wrap: Wrap) -> None:
        """Wrap the steps from here on, and those from each position that is gone to later; once."""
        self._wrap = wrap
        self.steps = wrap(self.steps)

    def close(self) -> None:
        """End what the loader's steps run on: threads and processes."""
        for each in (self.batches, self.steps):
            if isinstance(each, Generator):
                each.close()

    @property
    def epoch(self) -> float:
        """Progress in epochs, with a fraction."""
        if isinstance(self.loader, StepLoader):
            return self.loader.progress(self.state)
        return self.state.epoch + self.state.rows_consumed / max(1, self.loader.rows_per_epoch)

    def finished(self, step: int) -> bool:
        """Whether `max_epochs` or `max_steps` is reached after this many optimizer steps."""
        runner = self._runner
        return (0 < runner.max_epochs <= self.state.epoch) or (0 < runner.max_steps <= step)

    def limit(self, step: int) -> str:
        """The key of the recipe that ends training after this many steps, and the one that would have later."""
        runner = self._runner
        if 0 < runner.max_steps <= step:
            return f"runner.max_steps: {runner.max_steps:,}"
        before = f", which comes before runner.max_steps: {runner.max_steps:,}" if runner.max_steps > 0 else ""
        return f"runner.max_epochs: {runner.max_epochs:,}{before}"

    def advance(self, step: Step[MicroBatch], result: StepResult, done: int, bad: Sequence[BadPart] = ()) -> None:
        """Advance past a step; one that updated nothing advances only the data.

        Args:
            step: the computed one.
            result: of it.
            done: optimizer steps before it.
            bad: its parts at fault, where they were found.
        """
        self.state, self.taken, self._rest = step.after, 0, []
        anomalies, kind = self.anomalies, result.anomaly
        anomalies.last, anomalies.steps = None, anomalies.steps + 1
        self.none_finite = kind == "nonfinite" and len(bad) > 1 and len(bad) == len(step.rows)
        if result.updated:
            self._skipped_in_a_row = 0
            if anomalies.spikes is not None:
                anomalies.spikes.accept(result.loss, result.gradient_norm, max(step.denominators.values()))
            return
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        self.problem, self.passed_over = result.problem, self._name_rows(step, bad)
        self.skipped = (
            f"{self.problem} for {self.passed_over}; the whole step is passed over"
            if bad
            else f"{self.problem}, its rows are passed over: {self.passed_over}"
        )
        if kind == "spike" and bad:
            bad = [part for part in bad if part.loss > result.loss] or bad[:1]
            self.passed_over = self._name_rows(step, bad)
            highest = ", ".join(f"{self._name_rows(step, [part])} (loss {part.loss:.4g})" for part in bad)
            self.skipped = f"{self.problem}; highest: {highest}; the whole step is passed over"
        if kind is not None:
            anomalies.add(kind, result.problem, self.passed_over, step.state, result.loss, result.gradient_norm)
        if self._skipped_in_a_row >= MAX_SKIPPED:
            raise ModelError(
                f"{MAX_SKIPPED} steps in a row were passed over, the last as {result.problem}",
                where=f"after step {done}, the rows {self.passed_over}",
                remedy="look at these rows, or lower actor.optim.lr" + self._further,
            )

    def move_to(self, state: DataState) -> None:
        """Continue from another position."""
        if state != self.state:
            self._restart(state)

    # Checkpoints.

    def checkpoint_state(self) -> dict[str, object]:
        """The position as JSON, for a checkpoint; all ranks call it."""
        spikes = self.anomalies.spikes
        return {**self.place(), **({"spikes": spikes.state()} if spikes is not None else {})}

    def place(self) -> dict[str, object]:
        """That without the steps that spikes are measured by: what a rollback keeps; all ranks call it."""
        return {
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self._skipped_in_a_row,
            "anomalies": self.anomalies.state(),
            "data": asdict(self.state),
            **({"taken": [self.taken, self._cut]} if self.taken else {}),
            "loader": self._loader_state(),
            "ahead": self._ahead,
            **({"epoch_size": self._epoch_size(self.state)} if self._counts_epochs else {}),
        }

    @property
    def _counts_epochs(self) -> bool:
        """Whether the steps of an epoch are known without reading files for it."""
        loader, runner = self.loader, self._runner
        known = not isinstance(loader, StepLoader) or loader.is_counted or self.horizon != runner.max_steps
        return runner.max_epochs > 0 and known

    def _epoch_size(self, state: DataState) -> list[int]:
        """The rows and steps of the epoch of a position, which show whether its steps are cut as they were."""
        epoch = min(state.epoch, self._runner.max_epochs - 1)
        return [self.loader.rows_per_epoch, self.loader.num_steps(epoch)]

    def _move_horizon(self, saved: Mapping[str, Any], state: DataState) -> None:
        """Count the steps behind a position as they were cut, and those to come as they are cut now.

        Worked example: two epochs of 100 rows, and 20 steps of 8 rows are done, which end at row 56 of the second one.
        Steps of 16 rows would be 14, of which 3 are to come from there: the horizon is 20 + 3.
        """
        self._ahead = saved.get("ahead", 0)
        self.horizon = horizon(self._runner, self.loader, self._ahead)
        size = saved.get("epoch_size")
        if size is None or not self._counts_epochs or size == self._epoch_size(state):
            return
        loader, here = self.loader, 0
        if isinstance(loader, StepLoader | BatchLoader):
            here = loader.num_steps(state.epoch) - loader.steps_left(state)
        behind = sum(loader.num_steps(epoch) for epoch in range(state.epoch)) + here
        self._ahead = self.anomalies.steps - behind
        self.horizon = horizon(self._runner, loader, self._ahead)

    def _loader_state(self) -> Mapping[str, object] | None:
        saved = self.loader.state_dict()
        if saved is None or not self.taken:
            return saved
        return {**saved, "states": None, "seen": ()}  # those are of the end of the step

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `checkpoint_state` or `place` returned; all ranks call it."""
        data, saved, skipped = state["data"], state.get("loader"), state["skipped_steps"]
        if not isinstance(data, Mapping) or not isinstance(skipped, int):
            raise TypeError(f"the state of a checkpoint holds no position: {state}")
        place = DataState(**data)
        self.skipped_steps = skipped
        if "anomalies" in state:  # checkpoints of earlier versions have none
            self.anomalies.restore(state["anomalies"])
            self._skipped_in_a_row = state["skipped_in_a_row"]
        if "spikes" in state and self.anomalies.spikes is not None:
            self.anomalies.spikes.restore(state["spikes"])
        if isinstance(saved, Mapping):
            allowed = self._runner.allows("data.train_data_paths")
            self.loader.load_state_dict(saved, place, allow_changed=allowed)
        self._move_horizon(state, place)
        taken, self._cut = state.get("taken", (0, 0))
        self._restart(place, taken)


def _cut_otherwise(taken: int, before: int, batches: int) -> ConfigError:
    return ConfigError(
        f"the checkpoint was written after {taken} of the {before} batches that each rank had of a step, and here it "
        f"has {batches}",
        where="run_training",
        remedy="continue on the same number of ranks with the same micro_batch_size, or take all batches of a step "
        "(global_batch_size) in each run_training",
    )


def horizon(runner: RunnerConfig, loader: Loader[MicroBatch], ahead: int = 0) -> int:
    """The optimizer steps until `max_epochs` or `max_steps`, whichever comes first.

    Args:
        runner: has both.
        loader: cuts epochs into steps.
        ahead: steps that are done beyond those that the loader would have done.
    """
    both, most = min(runner.max_epochs, runner.max_steps) > 0, runner.max_steps - ahead
    if both and isinstance(loader, StepLoader) and loader.has_steps(most, runner.max_epochs):
        return runner.max_steps
    steps = 0
    for epoch in range(max(0, runner.max_epochs)):
        steps += loader.num_steps(epoch)
        if 0 < runner.max_steps <= steps + ahead:
            break
    steps += ahead if steps else 0
    return min(steps, runner.max_steps) if steps and runner.max_steps > 0 else steps or runner.max_steps
