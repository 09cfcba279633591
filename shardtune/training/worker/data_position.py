"""A trained model with its data: where in it training stands, how far it is to go, and the same in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from typing import Any

from omegaconf import DictConfig

from shardtune.config import Recipe
from shardtune.data.loader.step_loader import DataState, Step, StepLoader
from shardtune.data.user_loader.batch import UserBatch, with_names
from shardtune.data.user_loader.loader import BatchLoader
from shardtune.data.user_loader.position import LoaderRecord
from shardtune.errors import ModelError
from shardtune.training.step import StepResult
from shardtune.training.worker.model_state import TrainedModel

MAX_SKIPPED = 10
"""Steps in a row that may be skipped for a gradient that is not finite."""


class TrainedOnData(TrainedModel):
    """A model that is trained on the steps of a loader.

    Args:
        cfg: the recipe, validated and resolved.
    """

    loader: StepLoader | BatchLoader

    def __init__(self, cfg: DictConfig | Recipe) -> None:
        super().__init__(cfg)
        self.data_state = DataState()
        self.problem = ""  # why the last skipped step was
        self.passed_over = ""  # its rows
        self._open_steps: Iterator[Step] | None = None
        self._total_steps: int | None = None
        self._skipped_in_a_row = 0

    def release(self) -> None:
        super().release()
        for name in {"loader", "_open_steps"} & vars(self).keys():
            delattr(self, name)

    # What a user's method may read.

    @property
    def _steps(self) -> Iterator[Step]:
        if self._open_steps is None:
            self._open_steps = self.loader.steps(self.data_state)
        return self._open_steps

    @cached_property
    def data_iter(self) -> Iterator[Any]:
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        while True:
            step = next(self._steps)
            *others, last = (with_names(b.fields) if isinstance(b, UserBatch) else b for b in step.micro_batches)
            yield from others
            self.data_state = step.after
            yield last

    @property
    def _data_epoch(self) -> int:
        return self.data_state.epoch

    @property
    def _data_iter_offset(self) -> int:
        return self.data_state.rows_consumed

    def total_steps(self) -> int:
        """The horizon: optimizer steps until `max_epochs` or `max_steps`, whichever comes first."""
        runner = self.recipe.runner
        steps = runner.max_steps if runner.max_steps > 0 else None
        if runner.max_epochs > 0:
            epochs = 0
            for epoch in range(runner.max_epochs):
                epochs += self.loader.num_steps(epoch)
                if steps is not None and epochs >= steps:
                    return steps
            return epochs
        assert steps is not None
        return steps

    @property
    def epoch(self) -> float:
        """How far training is, in epochs."""
        return self.data_state.epoch + self.data_state.rows_consumed / max(1, self.loader.rows_per_epoch)

    @property
    def finished(self) -> bool:
        """Whether `max_epochs` or `max_steps` is reached."""
        runner = self.recipe.runner
        return (runner.max_epochs > 0 and self.data_state.epoch >= runner.max_epochs) or (
            runner.max_steps > 0 and self.step >= runner.max_steps
        )

    def _horizon(self) -> int:
        if self._total_steps is None:
            self._total_steps = self.total_steps()
        return self._total_steps

    _total_steps: int | None = None
    _skipped_in_a_row = 0

    def _count(self, step: Step, result: StepResult) -> None:
        """A skipped step moves the data on and nothing else."""
        if result.updated:
            self.step += 1
            self._skipped_in_a_row = 0
            return
        self.skipped_steps += 1
        self.problem, self.passed_over = result.problem, self.name_rows(step)
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED:
            raise ModelError(
                f"{MAX_SKIPPED} steps in a row were passed over, the last as {result.problem}",
                where=f"after step {self.step}, the rows {self.passed_over}",
                remedy="look at these rows, or lower actor.optim.lr",
            )

    def name_rows(self, step: Step) -> str:
        """Which rows a step holds, in few words."""
        return f"those after {step.state.rows_consumed:,} of epoch {step.state.epoch}"

    # Checkpoints.

    def data_files(self) -> list[dict[str, Any]]:
        """What the training rows come from; a resumed run must have the same."""
        return []

    def training_state(self) -> dict[str, Any]:
        loader = self.loader.record().to_json() if isinstance(self.loader, BatchLoader) else None
        data = {"data": asdict(self.data_state), "data_files": self.data_files(), "loader": loader}
        return {**super().training_state(), **data}

    def restore_state(self, state: dict[str, Any]) -> None:
        super().restore_state(state)
        self.data_state = DataState(**state["data"])
        self._open_steps = None
        if isinstance(self.loader, BatchLoader) and state.get("loader") is not None:
            allowed = "data.train_data_paths" in self.recipe.runner.allow_changes
            self.loader.resume(self.data_state, LoaderRecord.from_json(state["loader"]), allow_changed=allowed)
