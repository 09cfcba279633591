"""A replayed step has the rows, the loss and the gradient that the run had, from the nearest checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shardtune
from shardtune.batch import TOKENS
from shardtune.cli.replay import replay as replay_command
from shardtune.errors import CheckpointError, ConfigError, ModelError
from shardtune.run.replay.measure import group_of
from shardtune.run.replay.replay import Replay, replay
from shardtune.training.worker.base import FSDPSftWorker
from tests.support.tiny_run import Tiny, lines, make_tiny, recorded_rows, rows, train_on_ranks, write_rows

HEALTHY = Path(__file__).parents[2] / "support" / "healthy_adapters.py"
WORKER = """
import torch
from torch.utils.data import DataLoader
from shardtune import FSDPSftWorker

class Own(FSDPSftWorker):
    def model_provider_func(self):
        return torch.nn.Linear(3, 1)

    def build_dataloader(self, data_paths, eval_dataset=False):
        torch.manual_seed(1)
        rows = [{"x": torch.randn(3), "y": torch.randn(1)} for _ in range(12)]
        return DataLoader(rows, batch_size=self.cfg.actor.micro_batch_size, shuffle=True), {}

    def get_train_model_output(self, batch):
        return (self.model(batch["x"].double()) - batch["y"]).square().mean()

    def get_eval_model_output(self, batch):
        return 0
"""
ADAPTER = """
import numpy as np
import torch
from shardtune import Adapter, LossSum, Sample

class Line(Adapter):
    def build(self):
        return torch.nn.Linear(4, 2)

    def encode(self, row):
        return Sample(fields={name: np.asarray(row[name], np.float64) for name in ("x", "y", "seen")})

    def weights(self, sample):
        return {"value": float(sample.fields["seen"].sum())}

    def loss(self, model, batch):
        noisy = batch["x"] + batch.randn_like("noise", batch["x"])
        errors = (model(noisy) - batch["y"]).square() * batch["seen"]
        return {"value": LossSum(errors.sum(), float(batch["seen"].sum()))}
"""
NUMBERS = [
    {
        "x": [n / 10, 0.2, -n / 10, 1.0],
        "y": [1.0, n % 3],
        "seen": [1.0, 1.0],
        "left": [n, 1, 0, 2],
        "right": [n, 2, 1, 0],
        "tokens": [1 + n % 9, 3, 1 + n % 5, 2],
    }
    for n in range(12)
]
NOT_OF_THE_STEP = ("train/learning_rate", "train/skipped_steps", "train/rollbacks")
ESCAPE = {"prompt": "say \x1b[31mred", "completion": "\x1b]0;title\x07red"}


@dataclass(frozen=True)
class Trained:
    """The tiny inputs, and of each run the rows of its steps by their numbers in the data."""

    tiny: Tiny
    rows: dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """With dropout, two sources, one of them twice in an epoch, and checkpoints of steps 3 and 6 of 8."""
    tiny = make_tiny(tmp_path_factory.mktemp("replay"), dropout=0.2)
    other = write_rows(tiny.folder / "other.jsonl", [ESCAPE, *rows(2, start=50)])
    sources = [str(tiny.folder / "train.jsonl"), {"path": str(other), "weight": 2.0, "name": "other"}]
    settings = {
        "actor__model__precision": "fp64",
        "actor__micro_batch_size": 2,
        "data__train_data_paths": sources,
        "runner__save_interval": 3,
        "runner__max_steps": 8,
    }
    with recorded_rows() as one:
        shardtune.train(tiny.recipe("one", **settings))
    return Trained(tiny, {"one": one, "two": train_on_ranks(2, [tiny.recipe("two", **settings)])[0]})


def without_clock(found: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in found.items() if name.startswith("train/")}


def assert_as_recorded(found: Replay) -> None:
    """The metrics that the run has logged, to rounding."""
    assert found.measured is not None
    recorded = without_clock(dict(found.recorded))
    recorded = {name: value for name, value in recorded.items() if name not in NOT_OF_THE_STEP}
    assert recorded.keys() == found.measured.metrics.keys()
    assert found.measured.metrics == pytest.approx(recorded, rel=1e-12, abs=1e-13)


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.stat().st_mtime_ns, file.stat().st_size) for file in folder.rglob("*")}


@pytest.mark.lengthy
@pytest.mark.parametrize("run", ["one", "two"])
def test_rows_are_those_of_the_run_and_no_model_is_built(
    trained: Trained, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FSDPSftWorker, "_build", None)
    for step in (1, 4, 5, 8):
        found = replay(trained.tiny.run(run), step, only_rows=True)
        assert [line.number for line in found.rows] == trained.rows[run][step - 1]
        assert found.measured is None
        assert not found.notes
    line = next(line for line in found.rows if line.file.endswith("train.jsonl"))
    row = json.loads(Path(line.file).read_text().splitlines()[line.row - 1])
    assert line.text.startswith(row["prompt"].strip())
    assert line.trained == line.weights[TOKENS] > 0


@pytest.mark.parametrize(("run", "step"), [("one", 6), ("one", 2), ("two", 6), ("two", 4)])
def test_loss_norm_and_metrics_are_the_recorded_ones(trained: Trained, run: str, step: int) -> None:
    """On one process, dropout included, whatever the number of ranks."""
    folder = trained.tiny.run(run)
    before = files(folder)
    found = replay(folder, step)
    assert files(folder) == before
    assert_as_recorded(found)
    assert found.measured is not None
    assert found.ranks == (2 if run == "two" else 1)
    assert found.start is not None
    assert found.start.step == (3 if step > 3 else 0)
    done = [note for note in found.notes if "trained again" in note]
    assert bool(done) == (step != 4)
    assert all(" by 0 at most" in note or "e-1" in note for note in done)
    squares = sum(norm**2 for norm in found.measured.groups.values())
    assert math.sqrt(squares) == pytest.approx(found.recorded["train/grad_norm"], rel=1e-12)
    total = sum(line.losses[TOKENS] for line in found.rows)
    weight = sum(line.weights[TOKENS] for line in found.rows)
    assert total / weight == pytest.approx(found.recorded["train/loss"], rel=1e-12)


def test_the_worst_rows_come_with_their_worst_tokens(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained.tiny.run("one")
    number = next(
        step for step, taken in enumerate(trained.rows["one"], 1) if 21 in taken and len(taken) == 6
    )  # ESCAPE
    replay_command(run, number, as_json=True, worst=20)
    found = json.loads(capsys.readouterr().out)
    losses = [row["loss"] for row in found["worst"]]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == len(found["rows"]) == 6
    for row in found["worst"]:
        tokens = [token["loss"] for token in row["tokens"]]
        assert tokens == sorted(tokens, reverse=True)
        assert max(tokens) >= row["loss"]
    assert found["replayed"]["train/loss"] == pytest.approx(found["recorded"]["train/loss"], rel=1e-12)
    replay_command(run, number, worst=20)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "⟦\\x1b]0;title\\x07red" in shown
    assert "model.layers.1" in shown


def test_a_step_that_was_passed_over_is_told_from_the_one_after_it(trained: Trained, tmp_path: Path) -> None:
    """The position after each step is in metrics.jsonl."""
    run = tmp_path / "skipped"
    shutil.copytree(trained.tiny.run("one"), run)
    known = {line["step"]: line for line in lines(run)}
    for step in range(5, 8):
        known[step] |= {"epoch": known[step + 1]["epoch"], "train/skipped_steps": 1.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(known[step]) + "\n" for step in range(1, 8)))
    found = replay(run, 5, only_rows=True)
    taken = trained.rows["one"]
    assert [line.number for line in found.rows] == taken[5]
    assert [[line.number for line in passed] for passed in found.passed] == [taken[4]]
    assert [line.number for line in replay(run, 6, only_rows=True).rows] == taken[6]


def test_the_step_after_the_last_is_not_called_trained(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained.tiny.run("two")
    for step, told in ((8, "trained on 2 ranks"), (9, "the one after its last, as on 2 ranks")):
        replay_command(run, step, only_rows=True)
        assert f"step {step} of {run}, {told}" in " ".join(capsys.readouterr().out.split())
        replay_command(run, step, only_rows=True, as_json=True)
        assert json.loads(capsys.readouterr().out)["trained"] == (step == 8)


def test_what_cannot_be_replayed_is_refused(trained: Trained, tmp_path: Path) -> None:
    run = trained.tiny.run("one")
    with pytest.raises(ConfigError, match="there is no step 0"):
        replay(run, 0)
    with pytest.raises(ConfigError, match="the run has 8 steps"):
        replay(run, 10)
    with pytest.raises(CheckpointError, match="not from before step 6"):
        replay(run, 6, checkpoint="6")
    changed = tmp_path / "changed"
    shutil.copytree(run, changed)
    file = write_rows(tmp_path / "train.jsonl", rows(20))
    config = (changed / "config.yaml").read_text().replace(str(trained.tiny.folder / "train.jsonl"), str(file))
    (changed / "config.yaml").write_text(config)
    with pytest.raises(CheckpointError, match="the training data is not what it was"):
        replay(changed, 6, only_rows=True)


def replayed(trained: Trained, adapter: str, step: int = 3) -> Replay:
    """A step of a run with an adapter, that is as it was recorded."""
    name = adapter.rpartition(":")[2]
    file = write_rows(trained.tiny.folder / f"{name}.jsonl", NUMBERS)
    recipe = trained.tiny.recipe(name, data__train_data_paths=str(file), runner__max_steps=3)
    recipe["actor"]["model"] = {"adapter": adapter, "precision": "fp64"}
    shardtune.train(recipe)
    found = replay(trained.tiny.run(name), step)
    assert_as_recorded(found)
    assert len(found.rows) == 6
    return found


def test_a_model_of_a_users_own_has_the_losses_of_rows_with_the_noise_of_the_step(
    trained: Trained, tmp_path: Path
) -> None:
    file = tmp_path / "line.py"
    file.write_text(ADAPTER)
    found = replayed(trained, f"{file}:Line")
    assert [note for note in found.notes if "from that row alone" in note]
    assert not [note for note in found.notes if "one by one" in note]
    assert found.worst[0].line.loss == max(line.loss for line in found.rows if line.loss is not None)
    term = next(iter(found.rows[0].weights))
    total = sum(line.losses[term] for line in found.rows) / sum(line.weights[term] for line in found.rows)
    assert total == pytest.approx(found.recorded["train/loss"], rel=1e-12)


def test_where_rows_have_no_loss_of_their_own_it_is_said(trained: Trained) -> None:
    found = replayed(trained, f"{HEALTHY}:Contrast")
    assert found.rows[0].loss is None
    assert "compares all rows of a step" in " ".join(found.notes)
    found = replayed(trained, f"{HEALTHY}:Denoiser")  # with dropout, which rows one by one are computed without
    assert {note.split(",")[0] for note in found.notes if "one by one" in note} == {"of value", "of sign"}


def test_a_language_model_whose_loss_has_a_name_of_its_own(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its targets stand on the first screen, and its rows have their losses."""
    found = replayed(trained, f"{HEALTHY}:Packed")
    assert "12 rows, 48 tokens (36 trained)" in capsys.readouterr().err
    total = sum(line.losses["loss"] for line in found.rows) / sum(line.weights["loss"] for line in found.rows)
    assert total == pytest.approx(found.recorded["train/loss"], rel=1e-12)


def test_a_loader_of_a_users_own(trained: Trained, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(WORKER)
    recipe = trained.tiny.recipe("own", actor__worker=f"{file}:Own", actor__micro_batch_size=2, runner__max_steps=4)
    recipe["actor"]["model"] = {"precision": "fp64"}
    recipe["runner"]["save_interval"] = 3
    shardtune.train(recipe)
    found = replay(trained.tiny.run("own"), 4)
    assert_as_recorded(found)
    assert found.measured is not None
    assert not found.rows
    assert list(found.batches) == ["x float32 [2, 3], y float32 [2, 1]"] * 3
    losses = [one["loss"] for one in found.measured.batch_losses]
    assert sum(losses) / 3 == pytest.approx(found.recorded["train/loss"], rel=1e-12)


def test_a_batch_at_fault_of_a_users_own_loader(trained: Trained, tmp_path: Path) -> None:
    """Its rows have no numbers; the batch is known by its place and its loss."""
    file = tmp_path / "own.py"
    file.write_text(WORKER.replace("        return DataLoader", "        rows[7]['y'] /= 0\n        return DataLoader"))
    recipe = trained.tiny.recipe("bad batch", actor__worker=f"{file}:Own", actor__micro_batch_size=2)
    recipe["actor"]["model"] = {"precision": "fp64"}
    recipe["runner"]["on_nonfinite"] = "stop"
    with pytest.raises(ModelError) as error:
        shardtune.train(recipe)
    step = int(str(error.value).partition("--step ")[2].split()[0])
    found = replay(trained.tiny.run("bad batch"), step)
    assert found.measured is not None
    assert "not finite" in found.measured.problem
    assert not found.rows
    losses = [one["loss"] for one in found.measured.batch_losses]
    assert [math.isfinite(loss) for loss in losses].count(False) == 1
    replay_command(trained.tiny.run("bad batch"), step)
    with pytest.raises(ConfigError, match="no row 8"):
        replay_command(trained.tiny.run("bad batch"), step, row=["8"], quarantine=tmp_path / "quarantine.jsonl")
    with pytest.raises(ModelError, match="not finite"):  # in the next epoch
        shardtune.train(recipe)
    assert [line["step"] for line in lines(trained.tiny.run("bad batch"))] == [1]


def test_groups_of_parameters() -> None:
    names = ("model.layers.3.mlp.up_proj.weight", "model.embed_tokens.weight", "blocks.0.1.bias", "scale")
    assert [group_of(name) for name in names] == ["model.layers.3", "model.embed_tokens", "blocks.0", "scale"]


@pytest.mark.parametrize("action", ["skip", "rollback", "stop"])
def test_rows_at_fault_are_named_and_steps_after_them_are_the_runs(
    trained: Trained, tmp_path: Path, action: str
) -> None:
    """The loss of one row is too large for fp64, so that its step updates nothing."""
    file, given = tmp_path / "line.py", [dict(row) for row in NUMBERS * 3]
    file.write_text(ADAPTER)
    given[7]["y"] = [1e300, 1.0]
    data = write_rows(tmp_path / "given.jsonl", given)
    recipe = trained.tiny.recipe(action, data__train_data_paths=str(data), runner__max_steps=4, runner__max_epochs=9)
    recipe["actor"]["model"] = {"adapter": f"{file}:Line", "precision": "fp64"}
    recipe["runner"] |= {"on_nonfinite": action, "save_interval": 2}
    run = trained.tiny.run(action)
    if action == "stop":
        with pytest.raises(ModelError) as error:
            shardtune.train(recipe)
        step = int(str(error.value).partition("--step ")[2].split()[0])
        found = replay(run, step)
        assert found.measured is not None
        assert "not finite" in found.measured.problem
        assert found.worst[0].line.number == 7
        assert [line.number for line in found.rows if not math.isfinite(line.loss or 0.0)] == [7]
        return
    shardtune.train(recipe)
    found = [replay(run, step) for step in range(1, 5)]
    for one in found:
        assert_as_recorded(one)
        assert 7 not in [line.number for line in one.rows]
    assert any(7 in [line.number for line in passed] for one in found for passed in one.passed)


@pytest.fixture(scope="module")
def continued(trained: Trained) -> Path:
    """A run with dropout of 3 steps, then of 6 and of 7 with another horizon and other micro-batches each time."""
    settings = {"actor__model__precision": "fp64", "runner__save_interval": 2}
    recipe = trained.tiny.recipe("continued", **settings, actor__micro_batch_size=2, runner__max_steps=3)
    shardtune.train(recipe)
    for size, steps in ((3, 6), (4, 7)):
        recipe["actor"]["micro_batch_size"] = size
        recipe["runner"]["max_steps"] = steps
        shardtune.train(recipe)
    return trained.tiny.run("continued")


@pytest.mark.parametrize("step", [2, 3, 5])
def test_a_step_has_the_settings_of_its_time(continued: Path, step: int) -> None:
    """The learning rate of the horizon then, the micro-batches then, and what dropout draws in them."""
    found = replay(continued, step)
    assert_as_recorded(found)
    assert not [note for note in found.notes if "went on" in note]


def test_where_the_settings_of_a_step_are_lost_it_is_said(continued: Path, tmp_path: Path) -> None:
    run = tmp_path / "lost"
    shutil.copytree(continued, run)
    for step in (2, 3):
        shutil.rmtree(run / "checkpoints" / f"global_step_{step}")
    assert "no checkpoint is left of steps 1 to 3" in " ".join(replay(run, 3).notes)
    notes = " ".join(replay(run, 4).notes)
    assert "the steps from 1 to 3 were trained otherwise than here" in notes
