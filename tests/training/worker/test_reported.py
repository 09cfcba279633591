"""What a user's own run_training and run_eval return is logged, whatever the names; only training counts as a step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shardtune
from shardtune.errors import ShardtuneError
from shardtune.run.dry_run import dry_run
from shardtune.training.worker.reported import evaluation_method, training_method
from tests.support.dist.ranks import run_ranks
from tests.training.worker import test_base as own

pytestmark = pytest.mark.lengthy
CLIP = 0.25


class Short(own.Task):
    """Both methods return names of their own, as RLinf's do."""

    def run_training(self) -> Any:
        found = super().run_training()
        return {"loss": torch.tensor(found["train/loss"], dtype=torch.float64), "time/step": 1, "rank": self.ranks.rank}

    def run_eval(self) -> Any:
        return {"eval_accuracy": super().run_eval()["eval/ce"], "eval/rank": self.ranks.rank}


class Loop(own.Task):
    """An optimizer step of its own for each batch; a buffer has the sum of what the forwards have seen."""

    def model_provider_func(self) -> Any:
        made = super().model_provider_func()
        made.register_buffer("seen", torch.zeros(()))
        return made

    def get_train_model_output(self, batch: Any) -> Any:
        self.model.get_buffer("seen").add_(batch["value"].sum())
        return super().get_train_model_output(batch)

    def run_training(self) -> Any:
        batch = next(self.data_iter)
        loss = self.get_train_model_output(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss.item()}


class Grows(Loop):
    def get_train_model_output(self, batch: Any) -> Any:
        self.model.register_buffer("late", torch.zeros(2))
        return super().get_train_model_output(batch)


class Scaled(own.Net):
    """With a scalar, which each rank has whole; so it has its gradient, until ranks sum it. Rows choose a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.shifts = torch.nn.ParameterList(torch.full((5,), 0.1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, values = super().forward(x)
        return scores * self.scale + self.shifts[int(x[0, 0]) % 3], values


def scaled() -> Scaled:
    torch.manual_seed(3)
    return Scaled().double()


class Clips(own.Task):
    def model_provider_func(self) -> Any:
        return scaled()

    def run_training(self) -> Any:
        loss = self.get_train_model_output(next(self.data_iter))
        loss.backward()
        norm = self.clip_grad_norm_(CLIP)
        after = math.sqrt(self.ranks.sum((), [self.weights.gradient_square()])[0])
        unused = sum("shifts" in name and weight.grad is None for name, weight in self.weights.parameters.items())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss.item(), "norm": norm, "after": after, "unused": unused}


class ClipsThenLooks(own.Task):
    """A forward between the norm and the update."""

    def model_provider_func(self) -> Any:
        return scaled()

    def run_training(self) -> Any:
        batch = next(self.data_iter)
        loss = self.get_train_model_output(batch)
        loss.backward()
        self.clip_grad_norm_(CLIP)
        with torch.no_grad():
            self.get_train_model_output(batch)
        self.optimizer.step()
        unused = [name for name, weight in self.weights.parameters.items() if weight.grad is None]
        self.optimizer.zero_grad()
        return {"loss": loss.item(), "unused": len(unused), "furthest": self.ranks.largest(float(len(unused)))}


class ClipsTwice(Loop):
    def run_training(self) -> Any:
        self.get_train_model_output(next(self.data_iter)).backward()
        return {"norm": self.clip_grad_norm_() + self.clip_grad_norm_()}


class ClipsBelowZero(Loop):
    def run_training(self) -> Any:
        return {"norm": self.clip_grad_norm_(-1.0)}


class ClipsElsewhere(own.Task):
    def run_eval(self) -> Any:
        return {"norm": self.clip_grad_norm_()}


class Idle(own.Task):
    """No step at all."""

    def run_training(self) -> Any:
        return {"loss": self.get_train_model_output(next(self.data_iter)).detach()}


class NoGradient(own.Task):
    """The optimizer alone."""

    def run_training(self) -> Any:
        self.optimizer.step()
        return {}


class Empty(own.Task):
    def run_training(self) -> Any:
        super().run_training()


class Words(own.Task):
    def run_training(self) -> Any:
        return {**super().run_training(), "mood": "fine"}


def steps(name: str, number: int, precision: str = "fp64", backend: str = "fsdp") -> list[dict[str, float]]:
    values = own.recipe().to_dict()
    values["actor"]["training_backend"] = backend
    values["actor"]["model"]["precision"] = precision
    worker = globals()[name](shardtune.config.load_recipe(values))
    worker.setup()
    found = [training_method(worker)() for _ in range(number)]
    buffers = {name: float(buffer) for name, buffer in worker.model.named_buffers() if name == "seen"}
    return [*found, {"step": worker.step, **buffers}, evaluation_method(worker)()]


def test_names_without_a_prefix_get_one_and_ranks_agree() -> None:
    for found in (steps("Short", 2), *run_ranks(steps, 2, "Short", 2)):
        ranks = 1 if found[0]["train/rank"] == 0.0 else 2
        assert found[0].keys() == {"train/loss", "time/step", "train/rank"}
        assert found[0]["train/rank"] == found[-1]["eval/rank"] == (ranks - 1) / 2  # the mean over the ranks
        assert found[-1].keys() == {"eval/eval_accuracy", "eval/rank"}
        assert found[0]["train/loss"] == pytest.approx(own.plain("mean")[0][0], rel=1e-12)


def plain_loop(ranks: int, number: int, clip: float | None = None) -> list[float]:
    """The same steps by PyTorch alone: each rank's batch has a mean of its own, and gradients add up over ranks."""
    net, rows, found = own.made_net() if clip is None else scaled(), own.data(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=own.RATE)
    cuts = [rows[start : start + own.MICRO] for start in range(0, len(rows), own.MICRO)]
    for step in range(number):
        losses = []
        for cut in cuts[step * ranks : (step + 1) * ranks]:
            batch = {name: torch.stack([row[name] for row in cut]) for name in cut[0]}
            losses.append(own.ce(net(batch["x"])[0], batch, "mean"))
        optimizer.zero_grad()
        sum(losses).backward()  # pyright: ignore
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        found.append(float(sum(losses).detach()) / ranks)  # pyright: ignore
    return found


def test_a_loop_of_ones_own_counts_its_steps() -> None:
    """On one rank and on two, which agree on buffers, and in bf16, where copies in full precision are updated."""
    two = run_ranks(steps, 2, "Loop", 2)
    assert two[0][-2]["seen"] == two[1][-2]["seen"] != 0.0
    for number, (*found, step, _) in [(1, steps("Loop", 4)), *((2, rank) for rank in two)]:
        assert step["step"] == len(found)
        assert [metrics["train/loss"] for metrics in found] == pytest.approx(plain_loop(number, len(found)), rel=1e-12)
    *found, _, _ = steps("Loop", 4, "bf16")
    assert [metrics["train/loss"] for metrics in found] == pytest.approx(plain_loop(1, 4), rel=1e-2)


def clipped(backends: Sequence[str]) -> list[list[dict[str, float]]]:
    return [steps("Clips", 3, backend=backend)[:3] for backend in backends]


def test_such_a_loop_clips_by_the_norm_of_all_ranks() -> None:
    for ranks, layouts in [(1, clipped(["fsdp"])), (2, run_ranks(clipped, 2, ["fsdp", "fsdp1", "ddp"])[1])]:
        for found in layouts:
            assert [step["train/loss"] for step in found] == pytest.approx(plain_loop(ranks, 3, CLIP), rel=1e-12)
            assert min(step["train/norm"] for step in found) > CLIP
            assert [step["train/after"] for step in found] == pytest.approx([CLIP] * 3, rel=1e-5)
            assert [step["train/unused"] for step in found] == [3 - ranks] * 3  # each rank's rows choose another shift


def looked(backends: Sequence[str]) -> list[list[dict[str, float]]]:
    return [steps("ClipsThenLooks", 3, backend=backend)[:3] for backend in backends]


def test_a_forward_between_the_norm_and_the_update_takes_no_gradient_away() -> None:
    for layouts in run_ranks(looked, 2, ["fsdp", "fsdp1", "ddp"]):
        for found in layouts:
            assert [step["train/loss"] for step in found] == pytest.approx(plain_loop(2, 3, CLIP), rel=1e-12)
            assert [step["train/unused"] for step in found] == [3] * 3
            assert [step["train/furthest"] for step in found] == [3] * 3


@pytest.mark.parametrize(
    ("name", "precision", "says"),
    [
        ("Idle", "fp64", "Idle.run_training neither called super().run_training() nor self.optimizer.step()"),
        (
            "NoGradient",
            "fp64",
            "called self.optimizer.step() while no parameter had a gradient",
        ),
        ("Grows", "fp64", "the buffer late was made after the model was built"),
        ("ClipsTwice", "fp64", "clip_grad_norm_ is called a second time before self.optimizer.step()"),
        ("ClipsBelowZero", "fp64", "clip_grad_norm_ is called with -1.0"),
        ("ClipsElsewhere", "fp64", "clip_grad_norm_ is called outside of run_training"),
        ("Empty", "fp64", "Empty.run_training returned a NoneType, not a dict of metrics"),
        ("Words", "fp64", "Words.run_training returned 'mood': a str, which is no number"),
    ],
)
def test_what_trains_nothing_or_returns_no_numbers_is_refused(name: str, precision: str, says: str) -> None:
    with pytest.raises(ShardtuneError) as error:
        steps(name, 1, precision)
    assert says in str(error.value)


def values(folder: Path, kind: str) -> dict[str, Any]:
    made: Mapping[str, Any] = own.recipe(str(folder), max_steps=3).to_dict()
    return {**made, "actor": {**made["actor"], "worker": f"{__file__}:{kind}"}}


class Beside(own.Task):
    """Evaluates with what its set-up for training makes."""

    def setup(self, context: Any = None) -> None:
        super().setup(context)
        self.limit = 0.5

    def run_eval(self) -> Any:
        return {"limit": self.limit}


class Misspelt(Beside):
    """Reads what another object lacks."""

    def run_eval(self) -> Any:
        return {"limit": vars(self)["recipe"].limit}


def test_what_setup_alone_makes_is_named_where_only_evaluation_needs_it(tmp_path: Path) -> None:
    recipe = own.recipe(str(tmp_path), max_steps=3)
    trained = Beside(recipe)
    trained.setup()
    assert evaluation_method(trained)() == {"eval/limit": 0.5}
    trained.release()
    other = Beside(recipe)
    other.setup_evaluation()
    with pytest.raises(AttributeError) as error:
        evaluation_method(other)()
    assert "self.limit in model_provider_func, which is called for both" in error.value.__notes__[0]
    other.release()
    misspelt = Misspelt(recipe)
    misspelt.setup_evaluation()
    with pytest.raises(AttributeError) as error:
        evaluation_method(misspelt)()
    assert "model_provider_func" not in "".join(getattr(error.value, "__notes__", []))
    misspelt.release()


def test_a_run_shows_and_keeps_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From the dry run to metrics.jsonl and `final/`."""
    assert dry_run(values(tmp_path, "Short")).keys() == {"train/loss", "time/step", "train/rank"}
    run = shardtune.train(values(tmp_path, "Short"))
    first = json.loads((run.dir / "metrics.jsonl").read_text().splitlines()[0])
    assert first.keys() == {"step", "train/loss", "time/step", "train/rank"}
    assert "step 1/3  loss " in capfd.readouterr().err
    final = json.loads((run.dir / "final/metrics.json").read_text())
    assert final.keys() == {"step", "epoch", "train/loss", "time/step", "train/rank", "eval/eval_accuracy", "eval/rank"}
    assert run.evaluate().keys() == {"eval/eval_accuracy", "eval/rank"}
