"""Weights and buffers that the code of a loss moves itself: what no checkpoint holds, or ranks lose, is said."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

from shardtune import Adapter, Batch, LossSum, Sample
from shardtune.checkpoint.dcp import PendingSave
from shardtune.config import load_recipe
from shardtune.errors import CheckpointError, ModelError
from shardtune.models.whole_step_adapter import WholeStepAdapter
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.reported import training_method
from tests.support.dist.ranks import run_ranks


class Twins(nn.Module):
    """A trained layer, a copy that follows it, and the sum of what forwards have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.slow = nn.Linear(1, 1), nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(()))

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.slow.parameters(), self.layer.parameters(), strict=True):
            slow.lerp_(fast, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.get_buffer("seen").add_(x.sum())
        with torch.no_grad():
            wanted = self.slow(x)
        return self.layer(x) - wanted


class Following(Adapter):
    """The copy keeps requires_grad, and has no gradient."""

    def build(self) -> nn.Module:
        return Twins()

    def encode(self, row: Mapping[str, float]) -> Sample:
        return Sample(fields={"x": np.array([row["x"]])})

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        assert isinstance(model, Twins)
        if model.training:
            model.follow()
        return LossSum(model(batch["x"]).square().sum(), len(batch.rows))


class Seeing(Following):
    """Only a buffer is moved."""

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        return LossSum(model(batch["x"]).square().sum(), len(batch.rows))


class FrozenFollowing(Following):
    """The copy is frozen, so that no checkpoint has it."""

    def build(self) -> nn.Module:
        model = Twins()
        model.slow.requires_grad_(False)
        return model


class Still(FrozenFollowing):
    """A frozen copy that stays what it was."""

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        return LossSum(model(batch["x"]).square().sum(), len(batch.rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"x": float(n)}) + "\n" for n in range(1, 17)))
    return tmp_path


def worker(
    folder: Path,
    adapter: str,
    lines: list[str],
    kind: type[SFTWorker] = SFTWorker,
    model: Mapping[str, object] = MappingProxyType({}),
    backend: str = "fsdp",
    micro_batch_size: int = 2,
    **runner: object,
) -> SFTWorker:
    recipe = {
        "actor": {
            "model": {"adapter": f"{__file__}:{adapter}", "precision": "fp64", **model},
            "optim": {"lr": 0.1},
            "micro_batch_size": micro_batch_size,
            "global_batch_size": 8,
            "training_backend": backend,
        },
        "data": {"train_data_paths": str(folder / "rows.jsonl"), "cache_dir": str(folder / "cache"), "num_workers": 0},
        "runner": runner,
    }
    made = kind(load_recipe(recipe), report=lines.append)
    made.setup()
    return made


def moved(folder: str, adapter: str) -> tuple[list[str], list[float], list[float]]:
    """The lines of a step that is saved, and the loss of the step after it, at once and continued elsewhere."""
    place, lines = Path(folder), list[str]()
    first = worker(place, adapter, lines)
    first.run_training()
    for number in (1, 2):
        first.save_checkpoint(place / f"saved{number}", 1)
    at_once = [first.run_training()["train/loss"]]
    first.release()
    second = worker(place, adapter, [])
    second.load_checkpoint(place / "saved2")
    continued = [second.run_training()["train/loss"]]
    second.release()
    return lines, at_once, continued


def about(lines: list[str], what: str) -> list[str]:
    return [line for line in lines if what in line]


def test_a_frozen_weight_that_a_loss_moves_is_named_at_a_save_and_not_continued(folder: Path) -> None:
    lines: list[str] = []
    first = worker(folder, "FrozenFollowing", lines)
    first.run_training()
    assert not about(lines, "frozen weights")
    for number in (1, 2):
        first.save_checkpoint(folder / f"saved{number}", 1)
    (line,) = about(lines, "frozen weights")  # once
    assert "slow.bias, slow.weight have changed" in line
    first.release()
    second = worker(folder, "FrozenFollowing", [])
    with pytest.raises(CheckpointError, match=r"slow\.bias, slow\.weight changed in training") as error:
        second.load_checkpoint(folder / "saved2")
    assert "requires_grad" in str(error.value)
    second.release()
    third = worker(folder, "FrozenFollowing", [], allow_changes=["model.model_path"])
    assert third.load_checkpoint(folder / "saved2") == 1
    third.release()


def test_a_process_goes_back_to_its_own_checkpoint_and_keeps_the_frozen_weights_it_has_moved(folder: Path) -> None:
    made = worker(folder, "FrozenFollowing", [])
    made.run_training()
    made.save_checkpoint(folder / "saved", 1)
    made.run_training()
    slow = {name: part.clone() for name, part in made.weights.left_out_parts().items()}
    assert made.load_checkpoint(folder / "saved") == 1
    assert all(torch.equal(part, slow[name]) for name, part in made.weights.left_out_parts().items())
    made.release()


class Keeping(SFTWorker):
    """Its checkpoints have the frozen weights in a file of their own."""

    def save_checkpoint(self, path: str | Path, step: int, *, background: bool = False) -> list[PendingSave]:
        pending = super().save_checkpoint(path, step, background=background)
        torch.save(self.weights.left_out_parts(), Path(path) / "slow.pt")
        return pending

    def load_checkpoint(self, path: str | Path) -> int:
        step = super().load_checkpoint(path)
        with torch.no_grad():
            for name, values in torch.load(Path(path) / "slow.pt").items():
                self.weights.left_out_parts()[name].copy_(values)
        return step


def test_a_worker_that_keeps_frozen_weights_itself_continues(folder: Path) -> None:
    lines: list[str] = []
    first = worker(folder, "FrozenFollowing", lines, kind=Keeping)
    first.run_training()
    first.save_checkpoint(folder / "saved", 1)
    at_once = first.run_training()["train/loss"]
    first.release()
    (line,) = about(lines, "frozen weights")
    assert "save_checkpoint and load_checkpoint of Keeping have to keep them" in line
    second = worker(folder, "FrozenFollowing", [], kind=Keeping)
    second.load_checkpoint(folder / "saved")
    assert second.run_training()["train/loss"] == at_once
    second.release()


@pytest.mark.parametrize("adapter", ["Following", "Still"])
def test_what_checkpoints_hold_or_nothing_moves_is_continued_without_a_line(folder: Path, adapter: str) -> None:
    lines, at_once, continued = moved(str(folder), adapter)
    assert not about(lines, "frozen weights")
    assert not about(lines, "differ between ranks")
    assert at_once == continued


def test_ranks_name_the_buffers_that_become_rank_0s(folder: Path) -> None:
    (lines, at_once, continued), _ = run_ranks(moved, 2, str(folder), "Seeing")
    assert at_once == continued
    (line,) = about(lines, "the buffers seen")
    assert "the buffers seen of Twins differ between ranks" in line


def test_a_rank_without_a_part_of_a_frozen_weight_takes_part(folder: Path) -> None:
    (lines, at_once, continued), _ = run_ranks(moved, 2, str(folder), "Still")
    assert not about(lines, "frozen weights")
    assert at_once == continued


def test_a_weight_that_the_loss_itself_moves_is_not_advised_to_be_frozen(folder: Path) -> None:
    lines, *_ = moved(str(folder), "Following")
    (line,) = about(lines, "no gradient")
    assert "slow.weight" in line
    assert "those that the code itself moves stay as they are" in line


class StepwiseFollowing(Following):
    """The loss moves nothing; a worker does, once a step."""

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        return LossSum(model(batch["x"]).square().sum(), len(batch.rows))


class Stepwise(SFTWorker):
    def run_training(self) -> dict[str, float]:
        found = super().run_training()
        self.model.model.follow()
        return found


def stepwise(folder: str) -> list[float]:
    """The losses of four steps, of which the last two are continued elsewhere."""
    place = Path(folder)
    first = worker(place, "StepwiseFollowing", [], Stepwise, max_epochs=2)
    losses = [first.run_training()["train/loss"] for _ in range(2)]
    first.save_checkpoint(place / "saved", 2)
    first.release()
    second = worker(place, "StepwiseFollowing", [], Stepwise, max_epochs=2)
    second.load_checkpoint(place / "saved")
    losses += [second.run_training()["train/loss"] for _ in range(2)]
    second.release()
    return losses


def test_a_worker_moves_weights_once_a_step_on_any_ranks(folder: Path) -> None:
    """As docs/add-a-model.md has it, continued or not."""
    found = stepwise(str(folder))
    made = worker(folder, "StepwiseFollowing", [], Stepwise, max_epochs=2)
    expected = [made.run_training()["train/loss"] for _ in range(4)]
    assert found == expected
    assert len(set(found)) == 4
    for rank in run_ranks(stepwise, 2, str(folder)):
        assert rank == pytest.approx(expected, rel=1e-12)


class Root(nn.Module):
    """Weights of its own, which all ranks gather for a forward of the whole model, and a copy that follows them."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    @torch.no_grad()
    def follow(self) -> None:
        self.slow.lerp_(self.fast, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * (self.fast - self.slow.detach() / 2)).sum(-1)


class RootFollowing(Following):
    """The loss moves the copy, in a step in which it is still equal."""

    def build(self) -> nn.Module:
        return Root()

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        assert isinstance(model, Root)
        model.follow()
        return LossSum(model(batch["x"]).square().sum(), len(batch.rows))


class Replacing(Following):
    """The forward writes into `data`, which torch does not count as a change."""

    def build(self) -> nn.Module:
        return Root()

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        assert isinstance(model, Root)
        model.fast.data.mul_(0.5)
        return LossSum(model(batch["x"]).square().sum(), len(batch.rows))


class RootStepwise(RootFollowing):
    """The loss moves nothing."""

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        return LossSum(model(batch["x"]).square().sum(), len(batch.rows))


class InPlace(Replacing):
    """The forward writes into a weight that autograd has seen as a view, with fsdp1."""

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        assert isinstance(model, Root)
        with torch.no_grad():
            model.fast.mul_(0.5)
        return LossSum(model(batch["x"]).square().sum(), len(batch.rows))


def written(folder: str, adapter: str, backend: str = "fsdp", **model: object) -> str:
    """The error of a first step."""
    made = worker(Path(folder), adapter, [], model=model, backend=backend)
    try:
        with pytest.raises(ModelError) as error:
            made.run_training()
    finally:
        made.release()
    return f"{error.value.what}; {error.value.where}"


@pytest.mark.parametrize(
    ("adapter", "name", "backend"),
    [
        ("RootFollowing", "slow", "fsdp"),
        ("Replacing", "fast", "fsdp"),
        ("Replacing", "fast", "fsdp1"),
        ("InPlace", "fast", "fsdp1"),
    ],
)
def test_what_a_forward_writes_into_weights_that_ranks_gather_for_it_is_refused(
    folder: Path, adapter: str, name: str, backend: str
) -> None:
    for rank in run_ranks(written, 2, str(folder), adapter, backend):
        assert "what is written is lost" in rank
        assert rank.endswith(f"; {name}")


def test_what_a_forward_writes_into_weights_that_are_rounded_for_it_is_refused(folder: Path) -> None:
    assert written(str(folder), "RootFollowing", precision="bf16").endswith("; slow")


def root_stepwise(folder: str) -> list[float]:
    made = worker(Path(folder), "RootStepwise", [], Stepwise, max_epochs=2)
    losses = [made.run_training()["train/loss"] for _ in range(4)]
    made.release()
    return losses


def test_a_worker_moves_weights_outside_of_all_units_once_a_step(folder: Path) -> None:
    expected = root_stepwise(str(folder))
    assert len(set(expected)) == 4
    for rank in run_ranks(root_stepwise, 2, str(folder)):
        assert rank == pytest.approx(expected, rel=1e-12)


class Slowly(SFTWorker):
    def run_training(self) -> dict[str, float]:
        found = super().run_training()
        with torch.no_grad():
            self.model.model.slow.mul_(1 - 1e-6)  # in bf16 no value changes
        return found


class Twice(SFTWorker):
    def run_training(self) -> dict[str, float]:
        super().run_training()
        return super().run_training()


def test_a_worker_may_take_two_steps_at_once_with_rounded_weights(folder: Path) -> None:
    made = worker(folder, "RootStepwise", [], Twice, model={"precision": "bf16"})
    train = training_method(made)
    assert math.isfinite(train()["train/loss"])
    assert math.isfinite(train()["train/loss"])
    made.release()


def test_what_a_worker_writes_into_rounded_weights_is_refused(folder: Path) -> None:
    made = worker(folder, "RootStepwise", [], Slowly, model={"precision": "bf16"})
    with pytest.raises(ModelError, match=r"Slowly\.run_training changes slow after the step"):
        training_method(made)()


class Unsaved(Twins):
    """What it has seen is in no checkpoint; a cache is made anew, and belongs to none."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("cache", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("cache", x.sum(), persistent=False)
        return super().forward(x)


class SeeingUnsaved(Seeing):
    def build(self) -> nn.Module:
        return Unsaved()


def test_a_buffer_that_is_changed_and_not_saved_is_named(folder: Path) -> None:
    lines: list[str] = []
    made = worker(folder, "SeeingUnsaved", lines)
    for _ in range(2):
        made.run_training()
    (line,) = about(lines, "not persistent")
    assert "changes the buffers seen of Unsaved in place" in line


class Positions(nn.Module):
    """Reads a buffer that no checkpoint has, as BERT does its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("positions", torch.ones(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.get_buffer("positions")


class Comparing(WholeStepAdapter):
    """A loss over all rows of the step, whose forwards come twice."""

    def build(self) -> nn.Module:
        return Positions()

    def encode(self, row: Mapping[str, float]) -> Sample:
        return Sample(fields={"x": np.array([row["x"]])})

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        return {"found": model(batch["x"])}

    def step_loss(self, outputs: Mapping[str, torch.Tensor]) -> LossSum:
        return LossSum(outputs["found"].square().sum(), len(outputs["found"]))


def test_a_buffer_that_is_only_read_is_not_named_with_a_loss_over_the_whole_step(folder: Path) -> None:
    lines: list[str] = []
    worker(folder, "Comparing", lines).run_training()
    assert not about(lines, "not persistent")


def test_buffers_that_forwards_move_are_named_on_one_rank(folder: Path) -> None:
    lines: list[str] = []
    made = worker(folder, "Seeing", lines)
    for _ in range(2):
        made.run_training()
    (line,) = about(lines, "how rows are cut into micro-batches")
    assert "the forwards of the first step change the buffers seen of Twins" in line


def test_one_micro_batch_a_step_moves_buffers_without_a_line(folder: Path) -> None:
    lines: list[str] = []
    worker(folder, "Seeing", lines, micro_batch_size=8).run_training()
    assert not about(lines, "how rows are cut into micro-batches")


class Updates(SFTWorker):
    """All micro-batches of a step, and the update, by the worker itself."""

    def run_training(self) -> dict[str, float]:
        total = 0.0
        for batch in next(self.position.steps).micro_batches:
            loss = self.get_train_model_output(batch)["loss"]
            loss.total.backward()
            total += loss.total.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": total}


class TwoUpdates(Updates):
    """Two steps at once, of which each moves its buffers once."""

    def run_training(self) -> dict[str, float]:
        super().run_training()
        return super().run_training()


def test_buffers_that_move_once_an_update_are_not_named(folder: Path) -> None:
    lines: list[str] = []
    training_method(worker(folder, "Seeing", lines, TwoUpdates, micro_batch_size=8, max_epochs=2))()
    assert not about(lines, "how rows are cut into micro-batches")


@pytest.mark.parametrize("adapter", ["Seeing", "Still"])
@pytest.mark.parametrize("micro_batch_size", [2, 8])
def test_buffers_that_forwards_move_are_named_with_updates_of_a_workers_own(
    folder: Path, adapter: str, micro_batch_size: int
) -> None:
    lines: list[str] = []
    made = worker(folder, adapter, lines, Updates, micro_batch_size=micro_batch_size, max_epochs=2)
    for _ in range(2):
        training_method(made)()
    found = about(lines, "how rows are cut into micro-batches")
    assert len(found) == (micro_batch_size < 8)
    assert all("seen of Twins" in line and line.endswith("let run_training do it") for line in found)
