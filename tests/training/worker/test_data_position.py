"""The position in the data can be read, and assigned before and after set-up, as a load_checkpoint of a user's does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardtune import SFTRunner
from shardtune.checkpoint.atomic import read_json, write_json
from shardtune.config import load_recipe
from shardtune.errors import CheckpointError, ConfigError, DataError
from shardtune.training.recorder import Recording
from tests.support.tiny_run import assert_same_tensors, lines
from tests.training.worker import test_base as own


class Saving(own.Task):
    """Keeps its position itself, as the guide's troubleshooting describes; the signatures are those of the contract."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._data_epoch = 0
        self._data_iter_offset = 0

    def save_checkpoint(self, path: Any, step: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().save_checkpoint(path, step)
        if self.ranks.is_main:
            write_json(Path(path) / "mine.json", [self._data_epoch, self._data_iter_offset])

    def load_checkpoint(self, path: Any) -> Any:
        super().load_checkpoint(path)
        self._data_epoch, self._data_iter_offset = read_json(Path(path) / "mine.json")


class Forgetful(own.Task):
    def load_checkpoint(self, path: Any) -> Any:
        return 0


class Elsewhere(own.Task):
    """Saves where nothing would find it."""

    def save_checkpoint(self, path: Any, step: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().save_checkpoint(Path(path) / "inner", step)


class Later(own.Task):
    def save_checkpoint(self, path: Any, step: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().save_checkpoint(path, step + 1)


def batches(worker: own.Task, number: int) -> list[torch.Tensor]:
    return [next(worker.data_iter)["x"] for _ in range(number)]  # pyright: ignore


def test_an_assigned_position_is_where_training_continues() -> None:
    straight, before, after = (own.Task(own.recipe()) for _ in range(3))
    straight.setup()
    expected = batches(straight, 8)[4:]
    before._data_iter_offset = own.GLOBAL
    assert (before._data_epoch, before._data_iter_offset) == (0, own.GLOBAL)
    before.setup()
    after.setup()
    batches(after, 1)
    after._data_epoch, after._data_iter_offset = 0, own.GLOBAL
    for worker in (before, after):
        assert all(map(torch.equal, batches(worker, 4), expected))
    after._data_iter_offset = 3
    with pytest.raises(DataError, match="set to 3 rows of the epoch, which is inside a batch"):
        batches(after, 1)
    for wrong in (-1, "two", 1.5):
        with pytest.raises(ConfigError, match=r"_data_epoch is set to .*, which is no position in the data"):
            after._data_epoch = wrong  # pyright: ignore


@pytest.mark.parametrize("in_background", [False, True])
def test_checkpoints_of_a_contracted_override_resume_exactly(
    tmp_path: Path, in_background: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with async_save, which the contracted signature does not know: then training waits, and it is reported."""
    keys = {"save_interval": 1, "async_save": in_background}
    plain, mine = SFTRunner(given := own.recipe(str(tmp_path / "a"), **keys), own.Task(given)), None
    plain.run()
    short = own.recipe(str(tmp_path / "b"), **keys, max_steps=2)
    mine = SFTRunner(short, Saving(short))
    mine.run()
    saved = mine.store.path(2)
    assert (saved / "mine.json").exists()
    longer = own.recipe(str(tmp_path / "b"), **keys)
    SFTRunner(longer, Saving(longer), resume_from=saved).run()
    last = max(plain.store.steps())
    assert_same_tensors(plain.store.path(last), mine.store.path(last))
    assert [line for line in lines(mine.run_dir) if line["step"] > 2] == lines(plain.run_dir)[2:]
    told = "save_checkpoint of Saving takes no background=True, so training waits"
    assert (told in capsys.readouterr().out) is in_background


def test_a_load_that_restores_nothing_is_refused(tmp_path: Path) -> None:
    given = own.recipe(str(tmp_path), max_steps=1)
    runner = SFTRunner(given, Forgetful(given))
    runner.run()
    again = SFTRunner(given, Forgetful(given), run_dir=runner.run_dir, resume_from=runner.store.latest())
    with pytest.raises(
        CheckpointError, match=r"after Forgetful\.load_checkpoint the worker is at step 0, the checkpoint"
    ):
        again.prepare()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Elsewhere, "Elsewhere.save_checkpoint wrote no worker.json"),
        (Later, "Later.save_checkpoint wrote worker.json of"),
    ],
)
def test_a_checkpoint_that_nothing_could_continue_from_ends_the_run_at_once(
    tmp_path: Path, kind: type[own.Task], says: str
) -> None:
    given = own.recipe(str(tmp_path), save_interval=1)
    runner = SFTRunner(given, kind(given))
    with pytest.raises(CheckpointError, match=says):
        runner.run()
    assert runner.store.latest() is None


class Halves(own.Task):
    """Takes one of the batches of a step for each update."""

    def run_training(self) -> dict[str, float]:
        batch: Any = next(self.data_iter)
        mean: Any = self.get_train_model_output(batch)
        mean.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": float(mean.detach())}


def test_a_run_that_is_stopped_between_two_batches_of_a_step_goes_on_with_the_second(tmp_path: Path) -> None:
    def train(folder: Path, stops: list[int]) -> SFTRunner:
        runner = last = None
        for steps in stops:
            given = own.recipe(str(folder), max_steps=steps, allow_changes=["runner.max_steps"])
            runner = SFTRunner(given, Halves(given), resume_from=last)
            runner.run()
            last = runner.store.latest()
        assert runner is not None
        return runner

    whole, stopped = train(tmp_path / "whole", [5]), train(tmp_path / "stopped", [1, 3, 5])
    one, other = ([line["train/loss"] for line in lines(runner.run_dir)] for runner in (whole, stopped))
    assert one == other
    values = own.recipe().to_dict()
    values["actor"]["global_batch_size"] *= 2
    worker = Halves(load_recipe(values))
    worker.setup()
    last = stopped.store.latest()
    assert last is not None
    worker.load_checkpoint(last)
    with pytest.raises(ConfigError, match="after 1 of the 4 batches that each rank had of a step, and here it has 7"):
        worker.run_training()


class There(own.Task):
    """Goes to the beginning of the data and back while it saves."""

    def save_checkpoint(self, path: Any, step: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        epoch, rows = self._data_epoch, self._data_iter_offset
        self._data_epoch = self._data_iter_offset = 0
        super().save_checkpoint(path, step)
        self._data_epoch, self._data_iter_offset = epoch, rows


def test_steps_are_recorded_from_positions_that_a_worker_goes_to(tmp_path: Path) -> None:
    def recorded(kind: type[own.Task]) -> list[dict[str, Any]]:
        folder = tmp_path / kind.__name__
        given = own.recipe(str(folder), save_interval=1, max_steps=4)
        SFTRunner(given, kind(given), recording=Recording(folder / "steps")).run()
        return [json.loads(line) for line in (folder / "steps" / "rank0.jsonl").read_text().splitlines()]

    expected = recorded(own.Task)
    assert len(expected) == 4
    assert recorded(There) == expected


def test_steps_that_a_loop_of_ones_own_has_taken_are_counted() -> None:
    worker = own.Task(own.recipe())
    worker.setup()
    batches(worker, 9)
    assert worker.position.anomalies.steps == 2
    worker.run_training()
    assert worker.position.anomalies.steps == 3


def test_what_is_left_of_a_step_is_passed_over_with_the_next_one() -> None:
    worker, straight = own.Task(own.recipe()), own.Task(own.recipe())
    worker.setup()
    straight.setup()
    expected = batches(straight, 9)
    assert torch.equal(batches(worker, 1)[0], expected[0])
    worker.run_training()
    assert worker._data_iter_offset == 2 * own.GLOBAL
    assert torch.equal(batches(worker, 1)[0], expected[8])
