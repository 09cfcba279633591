"""Runs with `data.quarantine`: the rows are in no step, on any number of ranks, across epochs and a resume."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import shardtune
from shardtune.cli.replay import replay as replay_command
from shardtune.errors import CheckpointError, ConfigError, DataError, Interrupted
from shardtune.run.dry_run import dry_run
from shardtune.run.replay.replay import replay
from tests.support.tiny_run import (
    Tiny,
    assert_same_tensors,
    lines,
    make_tiny,
    recorded_rows,
    rows,
    signal_after,
    train_on_ranks,
    write_rows,
)

GONE = (0, 4, 11)
"""Rows that are left out, of 21."""
LAST = "checkpoints/global_step_6"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("quarantined"))


@pytest.fixture(scope="module")
def file(tiny: Tiny) -> Path:
    """Written by the command, from the rows of steps of a run."""
    shardtune.train(tiny.recipe("plain", **SETTINGS))
    found = tiny.folder / "quarantine.jsonl"
    for step in range(1, 5):
        listed = replay(tiny.run("plain"), step, only_rows=True).rows
        chosen = [str(line.row) for line in listed if line.number in GONE]
        if chosen:
            replay_command(tiny.run("plain"), step, only_rows=True, row=chosen, quarantine=found, as_json=True)
    return found


SETTINGS = {
    "actor__model__precision": "fp64",
    "runner__max_epochs": 2,
    "runner__save_interval": 2,
    "actor__optim__lr_scheduler": "constant",
}


def told(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())["data"]


def test_rows_are_in_no_step_and_counted(tiny: Tiny, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On two ranks as on one, and interrupted as not: 18 rows are three steps of an epoch."""
    settings = {**SETTINGS, "data__quarantine": str(file)}
    with recorded_rows() as whole:
        shardtune.train(tiny.recipe("whole", **settings))
    screen = capsys.readouterr().err
    assert "train.jsonl: 3 of 21 rows left out by data.quarantine: row 1" in screen
    assert "3 rows are left out by data.quarantine" in screen
    assert "18 rows" in screen
    assert [len(step) for step in whole] == [6] * 6
    others = sorted(set(range(21)) - set(GONE))
    assert sorted(chain(*whole[:3])) == sorted(chain(*whole[3:])) == others
    dropped = [json.loads(line) for line in (tiny.run("whole") / "dropped_rows.jsonl").read_text().splitlines()]
    assert [(row["row"], row["cause"]) for row in dropped] == [(number + 1, "quarantined") for number in GONE]
    assert all("of plain" in row["reason"] for row in dropped)
    outcome = told(tiny.run("whole"))["outcomes"]["train"][0]
    assert (outcome["rows"], outcome["kept"], outcome["quarantined"]) == (21, 18, 3)
    assert told(tiny.run("whole"))["rows_per_epoch"] == 18

    stopped = tiny.recipe("stopped", **settings)
    with recorded_rows(), signal_after(4), pytest.raises(Interrupted):
        shardtune.train(stopped)
    with recorded_rows() as rest:
        shardtune.train(stopped)
    assert rest[:2] == whole[4:]
    assert_same_tensors(tiny.run("whole") / LAST, tiny.run("stopped") / LAST)
    assert lines(tiny.run("stopped")) == lines(tiny.run("whole"))

    (two,) = train_on_ranks(2, [tiny.recipe("two", **settings)])
    assert two[:6] == whole[:6]
    for one, other in zip(lines(tiny.run("whole")), lines(tiny.run("two")), strict=True):
        assert other == pytest.approx(one, rel=1e-10)
    found = replay(tiny.run("two"), 4)
    assert found.measured is not None
    assert found.measured.metrics["train/grad_norm"] == pytest.approx(found.recorded["train/grad_norm"], rel=1e-12)


def test_in_the_order_of_the_files_it_is_training_without_these_rows(tiny: Tiny, file: Path) -> None:
    """Bit for bit: only how far an epoch is differs, in which the left out rows have their places."""
    given = [row for number, row in enumerate(rows(21)) if number not in GONE]
    without = write_rows(tiny.folder / "without.jsonl", given)
    settings = {**SETTINGS, "data__shuffle": False, "runner__save_interval": -1}
    shardtune.train(tiny.recipe("left out", **settings, data__quarantine=str(file)))
    shardtune.train(tiny.recipe("without", **settings, data__train_data_paths=str(without)))
    assert_same_tensors(tiny.run("left out") / LAST, tiny.run("without") / LAST)
    one, other = lines(tiny.run("left out")), lines(tiny.run("without"))
    assert [{**line, "epoch": 0} for line in one] == [{**line, "epoch": 0} for line in other]


def test_rows_that_are_left_out_later_change_no_step_before(tiny: Tiny, file: Path) -> None:
    """Refused like changed data; where it is allowed, each other row of the epoch still comes once."""
    changed = tiny.recipe("later", **SETTINGS, runner__max_steps=2)
    with recorded_rows() as before:
        shardtune.train(changed)
    changed["runner"]["max_steps"] = -1
    changed["data"]["quarantine"] = str(file)
    with pytest.raises(CheckpointError, match=r"data\.quarantine: null -> .*quarantine\.jsonl"):
        shardtune.train(changed)
    changed["runner"]["allow_changes"] = ["data.quarantine", "runner.max_steps"]
    with recorded_rows() as after:
        shardtune.train(changed)
    done = set(chain(*before[:2]))
    rest = set(range(21)) - done - set(GONE)
    taken = list(chain(*after[: -(-len(rest) // 6)]))
    assert sorted(taken) == sorted(rest)
    for step, given in enumerate([*before, *after], 1):  # from checkpoints with other rows, too
        listed = replay(tiny.run("later"), step, only_rows=True)
        assert [line.number for line in listed.rows] == given

    more = tiny.folder / "more.jsonl"
    more.write_text(file.read_text())
    recipe = tiny.recipe("more", **SETTINGS, data__quarantine=str(more), runner__max_steps=2)
    shardtune.train(recipe)
    more.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    recipe["runner"]["max_steps"] = 3
    with pytest.raises(CheckpointError) as error:
        shardtune.train(recipe)
    assert "data.quarantine: 3 rows left out -> 2 rows left out" in str(error.value)
    assert "runner.allow_changes=[data.quarantine]" in str(error.value)
    with pytest.raises(CheckpointError, match="the training data is not what it was"):
        replay(tiny.run("more"), 2, only_rows=True)
    recipe["runner"]["max_steps"] = 2
    with pytest.raises(CheckpointError, match=r"data\.quarantine: .*more\.jsonl has changed"):
        shardtune.train(recipe)


def test_a_quarantine_that_would_have_no_effect_is_refused(tiny: Tiny, tmp_path: Path, file: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.quarantine: there is no"):
        dry_run(tiny.recipe("none", data__quarantine=str(tmp_path / "none.jsonl")))
    torn = tmp_path / "torn.jsonl"
    torn.write_text("{")
    with pytest.raises(DataError, match="names no row"):
        dry_run(tiny.recipe("torn", data__quarantine=str(torn)))
    own = tmp_path / "own.py"
    own.write_text(
        "from shardtune.training.worker.adapter_worker import SFTWorker\n"
        "class Own(SFTWorker):\n"
        "    def build_dataloader(self, data_paths, eval_dataset=False):\n"
        "        return [{'x': 1}], {}\n"
    )
    with pytest.raises(ConfigError, match="build_dataloader returns batches of its own"):
        dry_run(tiny.recipe("own", data__quarantine=str(file), actor__worker=f"{own}:Own"))


def test_rows_are_added_once_and_by_name(tiny: Tiny, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, before = tiny.run("plain"), file.read_text()
    row = next(line.row for line in replay(run, 1, only_rows=True).rows if line.number not in GONE)
    with pytest.raises(ConfigError, match="has no row 99"):
        replay_command(run, 1, only_rows=True, row=["99"], quarantine=file)
    with pytest.raises(ConfigError, match="one is missing"):
        replay_command(run, 1, only_rows=True, row=["1"])
    other = tiny.folder / "other.jsonl"
    other.write_text(before.rstrip("\n"))
    for added in ("1 added", "0 added, 1 known"):
        replay_command(run, 1, only_rows=True, row=[f"train.jsonl:{row}"], quarantine=other, reason="odd")
        shown = capsys.readouterr().out
        assert f"{other}: {added}" in shown
        assert f"data.quarantine={other}" in shown
        assert "runner.allow_changes=[data.quarantine]" in shown
    assert other.read_text().startswith(before)
    last = json.loads(other.read_text().splitlines()[-1])
    assert (last["file"], last["row"], last["reason"]) == ("train.jsonl", row, "odd")
    assert len(last["hash"]) == 16
