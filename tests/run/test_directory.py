"""What a command does with a run directory that is there already."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import shardtune
from shardtune.checkpoint import atomic
from shardtune.checkpoint.store import CheckpointStore
from shardtune.errors import CheckpointError, ConfigError, Interrupted
from shardtune.launch.local import LAUNCH_ID, REPORT_DIR, RESTARTS
from shardtune.run.directory import plan_run, tidy
from tests.support.tiny_run import Tiny, lines, make_tiny, recorded_rows, rows, signal_after, write_rows


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """With `runs/done`: finished after four steps, which are its checkpoints."""
    tiny = make_tiny(tmp_path_factory.mktemp("runs"))
    shardtune.train(tiny.recipe("done", **DONE))
    return tiny


DONE: dict[str, Any] = {"runner__max_epochs": 1}


@pytest.fixture
def tiny(finished: Tiny, tmp_path: Path) -> Tiny:
    """A copy of it to spoil; paths in recipes are those of the original."""
    shutil.copytree(finished.runs, tmp_path / "runs", symlinks=True)
    copy = CopiedTiny(finished.folder)
    object.__setattr__(copy, "copied_runs", tmp_path / "runs")
    config = tmp_path / "runs/done/config.yaml"
    config.write_text(config.read_text().replace(str(finished.runs), str(tmp_path / "runs")))
    return copy


class CopiedTiny(Tiny):
    copied_runs: Path

    @property
    def runs(self) -> Path:
        return self.copied_runs


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_finished_run_says_so_and_does_nothing(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(tiny.run("done"))
    for resume_dir in ("auto", str(tiny.run("done")), f"{tiny.run('done')}/"):
        with recorded_rows() as seen:
            run = shardtune.train(tiny.recipe("done", runner__resume_dir=resume_dir, **DONE))
        assert seen == []
        assert run.dir == tiny.run("done")
    assert (
        f"{tiny.run('done')} is finished; its result is {tiny.run('done') / 'final'}. To train on, raise"
        in capsys.readouterr().err
    )
    assert tree(tiny.run("done")) == before


def test_allowed_changes_of_a_finished_run_have_no_effect_and_early_stopping_may_go_on(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    shardtune.train(tiny.recipe("done", actor__optim__lr=0.5, runner__allow_changes=["actor.optim"], **DONE))
    assert "/final, on which these changes have no effect. To train on" in capsys.readouterr().err
    watched = {
        "data__eval_data_paths": str(tiny.folder / "eval.jsonl"),
        "runner__eval_interval": 1,
        "runner__max_epochs": 1,
        "runner__early_stop": {"enabled": True, "patience": 1, "mode": "max"},
    }
    shardtune.train(tiny.recipe("early", **watched))
    assert [line["step"] for line in lines(tiny.run("early"))] == [1, 2]
    shardtune.train(tiny.recipe("early", **watched))
    assert "(or, for early stopping, runner.early_stop.patience)" in capsys.readouterr().err
    more = ["runner.early_stop.patience=2", "runner.allow_changes=[runner.early_stop]"]
    shardtune.train(tiny.recipe("early", **watched), *more)
    assert [line["step"] for line in lines(tiny.run("early"))] == [1, 2, 3]


def test_more_epochs_go_on_and_announce_the_new_horizon(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    with recorded_rows() as seen:
        shardtune.train(tiny.recipe("done", runner__max_epochs=2))
    assert len(seen[:4]) == 4
    told = capsys.readouterr().err
    assert "runner.max_epochs: 1 -> 2" in told
    assert "horizon moves from 4 to 8 steps" in told
    assert [line["step"] for line in lines(tiny.run("done"))] == list(range(1, 9))
    assert json.loads((tiny.run("done") / "final/metrics.json").read_text())["step"] == 8


def test_more_epochs_without_a_checkpoint_do_not_begin_again(tiny: Tiny) -> None:
    shutil.rmtree(tiny.run("done") / "checkpoints")
    before = tree(tiny.run("done"))
    with pytest.raises(CheckpointError, match="no checkpoint is left from which it could train on"):
        shardtune.train(tiny.recipe("done", runner__max_epochs=2))
    assert tree(tiny.run("done")) == before
    shardtune.train(tiny.recipe("done", **DONE))  # its result is still there


def test_more_steps_go_on_too_and_fewer_are_refused(tiny: Tiny) -> None:
    shardtune.train(tiny.recipe("steps", runner__max_steps=2))
    shardtune.train(tiny.recipe("steps", runner__max_steps=3))
    assert [line["step"] for line in lines(tiny.run("steps"))] == [1, 2, 3]
    with pytest.raises(CheckpointError, match=r"runner.max_steps: 3 -> 1"):
        shardtune.train(tiny.recipe("steps", runner__max_steps=1))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"actor__optim__lr": 0.1}, ["actor.optim.lr: 0.001 -> 0.1", "allow_changes=[actor.optim.lr]"]),
        ({"runner__seed": 1, "data__max_length": 64}, ["runner.seed: 42 -> 1", "data.max_length: 96 -> 64"]),
        ({"actor__model__precision": "bf16"}, ["actor.model.precision: fp32 -> bf16"]),
        (
            {"actor__model__precision": "pure_bf16", "runner__allow_changes": ["actor.model.precision"]},
            ["fp32 -> pure_bf16: the run's checkpoints hold weights of 32 bits", "begin with the weights of this run"],
        ),
    ],
)
def test_another_recipe_is_refused_with_both_values_and_the_ways_on(tiny: Tiny, changes: dict, told: list[str]) -> None:
    before = tree(tiny.run("done"))
    with pytest.raises(CheckpointError) as refused:
        shardtune.train(tiny.recipe("done", runner__max_epochs=2, **changes))
    for text in (*told, "experiment_name", "runner.overwrite"):
        assert text in str(refused.value)
    assert tree(tiny.run("done")) == before


def test_what_is_free_to_change_is_free(tiny: Tiny) -> None:
    free = {
        "actor__micro_batch_size": 1,
        "actor__max_tokens_per_micro_batch": 200,
        "runner__save_interval": "epoch",
        "runner__keep_last": 1,
        "runner__logger__log_interval": 2,
        "runner__async_save": True,
        "data__num_workers": 1,
    }
    shardtune.train(tiny.recipe("done", runner__max_epochs=2, **free))
    assert [line["step"] for line in lines(tiny.run("done"))] == [1, 2, 3, 4, 6, 8]
    assert [path.name for path in (tiny.run("done") / "checkpoints").glob("global*")] == ["global_step_8"]


def test_an_allowed_change_is_made(tiny: Tiny) -> None:
    shardtune.train(
        tiny.recipe(
            "done",
            runner__max_epochs=2,
            runner__allow_changes=["actor.optim"],
            actor__optim__lr=0.5,
            actor__optim__lr_scheduler="constant",
        )
    )
    assert lines(tiny.run("done"))[-1]["train/learning_rate"] == 0.5
    assert lines(tiny.run("done"))[3]["train/learning_rate"] != 0.5


def test_the_schedule_ends_with_the_run_where_steps_are_cut_otherwise(tiny: Tiny, capsys: Any) -> None:
    """Five steps of 6 rows end at row 6 of the second epoch, whose other 15 rows are five steps of 3."""
    allowed = {"runner__allow_changes": ["actor.global_batch_size"], "actor__global_batch_size": 3}
    shardtune.train(tiny.recipe("cut", runner__max_steps=5))
    shardtune.train(tiny.recipe("cut", runner__max_steps=7, **allowed))
    shardtune.train(tiny.recipe("cut", **allowed))
    assert "horizon moves from 7 to 10 steps" in capsys.readouterr().err
    logged = lines(tiny.run("cut"))
    assert [line["step"] for line in logged] == list(range(1, 11))
    rates = [1e-3 * 0.5 * (1 + math.cos(math.pi * step / 10)) for step in (7, 8, 9)]
    assert [line["train/learning_rate"] for line in logged[7:]] == pytest.approx(rates, rel=1e-12)


def test_a_recipe_of_a_run_that_was_copied_names_its_former_place(tiny: Tiny, tmp_path: Path, capsys: Any) -> None:
    copy = shutil.copytree(tiny.run("done"), tmp_path / "elsewhere/copied")
    shardtune.train(copy / "config.yaml")
    told = capsys.readouterr().err
    assert f"config.yaml names the run directory {tiny.run('done')}, so this command goes on with a run there" in told
    there = f"runner.logger.log_path={copy.parent} runner.logger.experiment_name=copied"
    assert there in told
    shardtune.train(copy / "config.yaml", *there.split())
    shardtune.train(tiny.run("done") / "config.yaml")
    assert "names the run directory" not in capsys.readouterr().err


def test_a_project_that_was_moved_goes_on_where_it_lies_now(tmp_path: Path) -> None:
    first = make_tiny(tmp_path / "here")
    shardtune.train(first.recipe("moved", runner__max_steps=2))
    second = Tiny((tmp_path / "here").rename(tmp_path / "there"))
    recipe = second.recipe("moved", runner__max_steps=3)
    assert shardtune.train(recipe).metrics["step"] == 3
    rows_file = second.folder / "train.jsonl"
    rows_file.write_text("\n".join(reversed(rows_file.read_text().splitlines())) + "\n")
    with pytest.raises(CheckpointError, match="training data is not"):
        shardtune.train(second.recipe("moved", runner__max_steps=4))


def test_overwrite_moves_the_old_run_aside(tiny: Tiny) -> None:
    shardtune.train(tiny.recipe("done", runner__overwrite=True, actor__optim__lr=0.1, **DONE))
    aside = [path for path in tiny.runs.iterdir() if path.name.startswith("done.old-")]
    assert len(aside) == 1
    assert (aside[0] / "checkpoints/global_step_4").is_dir()
    assert [line["step"] for line in lines(tiny.run("done"))] == [1, 2, 3, 4]


def test_overwriting_a_link_keeps_it_and_says_where_the_old_run_is(tiny: Tiny, tmp_path: Path, capsys: Any) -> None:
    tiny.run("done").rename(tmp_path / "disk")
    tiny.run("done").symlink_to(tmp_path / "disk")
    shardtune.train(tiny.recipe("done", runner__overwrite=True, runner__max_steps=1))
    (aside,) = tmp_path.glob("disk.old-*")
    assert (aside / "checkpoints/global_step_4").is_dir()
    assert tiny.run("done").is_symlink()
    assert (tmp_path / "disk/checkpoints/global_step_1").is_dir()
    assert f"{tiny.run('done')}: the old run is now {aside}" in capsys.readouterr().err


def test_overwriting_moves_nothing_that_the_recipe_reads(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tiny.run("done"))
    for keys, says in (
        ({"actor__model__model_path": str(tiny.run("done") / "final")}, "model_path lies in it.*final"),
        ({"data__train_data_paths": [str(tmp_path / "link/samples/*.jsonl")]}, "train_data_paths lies in it.*samples"),
        ({"data__eval_data_paths": {"all": {"path": str(tiny.run("done"))}}}, "eval_data_paths is that directory"),
    ):
        with pytest.raises(ConfigError, match=f"moved aside, and .*{says}(?s:.*)overwrite: true(?s:.*)experiment_name"):
            plan_run(_loaded(tiny.recipe("done", runner__overwrite=True, **keys), files_must_exist=False))
    assert tiny.run("done").is_dir()


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_run_begins_among_its_own_data_or_in_its_model(tiny: Tiny, tmp_path: Path, overwrite: bool) -> None:
    shutil.copytree(tiny.folder / "model", tmp_path / "runs/new")
    file = write_rows(tmp_path / "runs/new/train.jsonl", rows(8))
    for keys, says in (
        ({"actor__model__model_path": str(tmp_path / "runs/new")}, "model_path is that directory"),
        ({"data__train_data_paths": str(file)}, "train_data_paths lies in it.*train.jsonl"),
    ):
        before = tree(tmp_path)
        with pytest.raises(ConfigError, match=f"holds no run, and .*{says}(?s:.*)another.*experiment_name"):
            shardtune.train(tiny.recipe("new", runner__overwrite=overwrite, **keys))
        assert tree(tmp_path) == before
    assert plan_run(_loaded(tiny.recipe("new"))).resume_from is None


def test_the_directory_of_all_runs_is_no_run(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"the directory of all runs(?s:.*)experiment_name: \.\n"):
        plan_run(_loaded(tiny.recipe(".")))


def test_null_refuses_a_directory_that_holds_a_run(tiny: Tiny) -> None:
    with pytest.raises(CheckpointError, match=r"already holds a run(?s:.*)experiment_name(?s:.*)overwrite=true"):
        shardtune.train(tiny.recipe("done", runner__resume_dir=None, **DONE))
    with pytest.raises(CheckpointError, match="already holds a run"):
        shardtune.train(tiny.recipe("other", runner__resume_dir=None, **DONE)) and shardtune.train(
            tiny.recipe("done", runner__resume_dir=str(tiny.run("other")), **DONE)
        )


def test_an_earlier_checkpoint_of_the_same_run(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    """Logs are cut back, and the same command then goes on from what it has saved itself."""
    recipe = tiny.recipe(
        "done", runner__resume_dir=f"{tiny.run('done')}/checkpoints/global_step_1/", runner__max_epochs=2
    )
    with signal_after(2), pytest.raises(Interrupted):
        shardtune.train(recipe)
    assert "going back to" in capsys.readouterr().err
    assert [line["step"] for line in lines(tiny.run("done"))] == [1, 2]
    checkpoints = tiny.run("done") / "checkpoints"
    assert sorted(path.name for path in checkpoints.glob("global*")) == ["global_step_1", "global_step_2"]
    with recorded_rows() as seen:
        shardtune.train(recipe)
    assert [len(step) for step in seen[:6]] == [6, 3, 6, 6, 6, 3]
    assert [line["step"] for line in lines(tiny.run("done"))] == list(range(1, 9))


def test_killed_before_its_first_checkpoint_it_begins_again_and_logs_each_step_once(tiny: Tiny) -> None:
    recipe = tiny.recipe(
        "young", runner__save_interval=-1, runner__logger__logger_backends=["jsonl", "tensorboard"], **DONE
    )
    pid = os.fork()
    if pid == 0:  # a copy of this process is quicker than a new one
        from shardtune.training.loggers import JsonLines

        original = JsonLines.log

        def log(self: JsonLines, step: int, metrics: Any) -> None:
            original(self, step, metrics)
            if step == 3:
                os.kill(os.getpid(), 9)

        JsonLines.log = log
        shardtune.train(recipe)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 9
    assert [line["step"] for line in lines(tiny.run("young"))] == [1, 2, 3]
    assert plan_run(_loaded(recipe)).resume_from is None
    shardtune.train(recipe)
    assert [line["step"] for line in lines(tiny.run("young"))] == [1, 2, 3, 4]


def _loaded(recipe: dict, **options: Any) -> Any:
    from shardtune.config import load_recipe

    return load_recipe(recipe, **options)


def test_changed_rows_are_refused_by_file_also_from_a_checkpoint_without_its_run(tiny: Tiny, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", rows(21))
    keys = {"data__train_data_paths": str(file)}
    shardtune.train(tiny.recipe("rows", **keys, **DONE))
    alone = shutil.copytree(tiny.run("rows") / "checkpoints/global_step_2", tmp_path / "alone")
    write_rows(file, rows(21, start=5))
    for name, resume_dir in (("rows", "auto"), ("more", str(alone))):
        with pytest.raises(CheckpointError, match=r"rows.jsonl.*other content(?s:.*)allow_changes"):
            shardtune.train(tiny.recipe(name, runner__max_epochs=2, runner__resume_dir=resume_dir, **keys))
    assert not tiny.run("more").exists()
    shardtune.train(tiny.recipe("rows", runner__max_epochs=2, runner__allow_changes=["data"], **keys))


def test_a_torn_checkpoint_is_passed_over_with_a_message(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    torn = next((tiny.run("done") / "checkpoints/global_step_4/model").glob("*.safetensors"))
    torn.write_bytes(torn.read_bytes()[:-8])
    with recorded_rows() as seen:
        shardtune.train(tiny.recipe("done", runner__max_epochs=2))
    told = capsys.readouterr().err
    assert "passed over the checkpoint global_step_4" in told
    assert "torn" in told
    assert len(seen[0]) == 3, "step 4 is done again"
    assert [line["step"] for line in lines(tiny.run("done"))] == list(range(1, 9))


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_two_runs_in_one_directory_are_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtune.run.directory.LOCK_WAIT_SECONDS", 0.3)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HOLD,
            str(tiny.run("done") / ".lock"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        for keys in ({}, {"runner__overwrite": True}):
            with pytest.raises(CheckpointError, match="another process is training in"):
                shardtune.train(tiny.recipe("done", runner__max_epochs=2, **keys))
    finally:
        holder.kill()
        holder.wait()
    assert (tiny.run("done") / "checkpoints/global_step_4").is_dir()


def test_a_restart_waits_for_a_rank_that_was_cut_off(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains on until it notices, and holds the lock until then."""
    monkeypatch.setattr("shardtune.run.directory.LOCK_WAIT_SECONDS", 0.1)
    monkeypatch.setenv(RESTARTS, "1")
    monkeypatch.setenv(LAUNCH_ID, "of this launch")
    monkeypatch.setenv(REPORT_DIR, str(tiny.folder))
    command = [sys.executable, "-c", HOLD, str(tiny.run("done") / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        release = threading.Timer(2.0, holder.kill)
        release.start()
        try:
            shardtune.train(tiny.recipe("done"))
        finally:
            release.join()


def test_a_disk_too_small_for_a_second_checkpoint_has_a_line(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    monkeypatch.setattr(CheckpointStore, "require_space", lambda self, needed: found.append(needed))
    shardtune.train(tiny.recipe("first", runner__save_interval=1, runner__keep_last=1))
    assert "a later save would end the run" not in capsys.readouterr().err
    usage = shutil.disk_usage(tiny.folder)._replace(free=found[0])
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: usage)
    shardtune.train(tiny.recipe("second", runner__save_interval=1, runner__keep_last=1))
    assert re.search(r"disk: 2 checkpoints of about .* are free in .*second: a later save", capsys.readouterr().err)


def test_a_disk_too_small_is_found_before_training(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tiny.folder)._replace(free=10_000)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: usage)
    with (
        recorded_rows() as seen,
        pytest.raises(CheckpointError, match=r"not enough room on the disk: .* needed, 10 kB free"),
    ):
        shardtune.train(tiny.recipe("small"))
    assert seen == []
    assert not tiny.run("small").exists()


def test_an_unknown_monitor_is_refused_before_training(tiny: Tiny) -> None:
    keys = {"data__eval_data_paths": {"math": str(tiny.folder / "eval.jsonl")}, "runner__val_check_interval": 1}
    with (
        recorded_rows() as seen,
        pytest.raises(ConfigError, match=r"eval/loss(?s:.*)eval/math/loss.*eval/math/token_acc"),
    ):
        shardtune.train(tiny.recipe("watched", runner__early_stop={"enabled": True}, **keys))
    assert seen == []
    assert not tiny.run("watched").exists()


def test_retention_keeps_the_best_which_can_be_continued(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {
        "data__eval_data_paths": str(tiny.folder / "eval.jsonl"),
        "runner__val_check_interval": 1,
        "runner__keep_last": 1,
        # Of a rate that only falls in the end, the first is the largest.
        "runner__best": {"monitor": "train/learning_rate", "mode": "max"},
    }
    shardtune.train(tiny.recipe("best", **keys))
    checkpoints = tiny.run("best") / "checkpoints"
    assert sorted(path.name for path in checkpoints.glob("global*")) == ["global_step_1", "global_step_8"]
    assert (checkpoints / "best").resolve().name == "global_step_1"
    best, keys = keys, {key: value for key, value in keys.items() if "data" in key}
    fork = tiny.recipe(
        "from_best", runner__resume_dir=f"{checkpoints}/best", runner__allow_changes=["runner.best"], **keys
    )
    with recorded_rows() as seen:
        shardtune.train(fork)
    assert len(seen[:7]) == 7
    assert [line["step"] for line in lines(tiny.run("from_best"))] == list(range(2, 9))
    shutil.rmtree(checkpoints / "global_step_1")
    capsys.readouterr()
    shardtune.train(tiny.recipe("best", runner__max_epochs=3, **best))
    told = f"runner.best begins anew: its best checkpoint so far, of step 1, is not in {checkpoints}"
    assert told in capsys.readouterr().err


def test_early_stopping_saves_and_its_count_survives_a_stop(tiny: Tiny) -> None:
    keys = {
        "data__eval_data_paths": str(tiny.folder / "eval.jsonl"),
        "runner__val_check_interval": 1,
        "runner__save_interval": -1,
        "runner__early_stop": {"enabled": True, "monitor": "eval/loss", "patience": 3, "min_delta": 1e9},
    }
    recipe = tiny.recipe("early", **keys)
    with signal_after(3), pytest.raises(Interrupted):
        shardtune.train(recipe)
    shardtune.train(recipe)
    assert [line["step"] for line in lines(tiny.run("early"))] == [1, 2, 3, 4]  # the first is the best; three follow
    assert (tiny.run("early") / "checkpoints/latest").read_text() == "global_step_4\n"
    assert (tiny.run("early") / "final/model.safetensors").exists()
    with recorded_rows() as seen:
        shardtune.train(recipe)
    assert seen == []


def test_a_line_has_the_metrics_of_training_and_evaluation(tiny: Tiny) -> None:
    keys = {"data__eval_data_paths": str(tiny.folder / "eval.jsonl"), "runner__val_check_interval": 3}
    shardtune.train(tiny.recipe("lines", runner__logger__log_interval=2, runner__eval_before_training=True, **keys))
    found = lines(tiny.run("lines"))
    assert [line["step"] for line in found] == [0, 2, 3, 4, 6, 8]
    assert ["eval/loss" in line for line in found] == [True, False, True, False, True, True]
    assert ["train/loss" in line for line in found] == [False, True, True, True, True, True]
    assert found[-1]["epoch"] == 2.0


def test_what_a_killed_process_left_is_cleared(tiny: Tiny) -> None:
    run_dir = tiny.run("done")
    (run_dir / ".final.tmp-0123abcd").mkdir()
    (run_dir / ".manifest.json.0123abcd").write_text("{")
    (run_dir / "final").rename(run_dir / ".final.old-0123abcd")  # killed between the two renames of publishing
    (run_dir / "checkpoints/.global_step_9.tmp-0123abcd").mkdir()
    tidy(run_dir)
    assert (run_dir / "final/config.json").exists()
    assert list(run_dir.glob(".*")) == []
    assert list((run_dir / "checkpoints").glob(".*")) == []


def test_killed_between_manifest_and_recipe_a_continued_run_is_not_taken_for_finished(tiny: Tiny) -> None:
    """`begin_run` drops "finished" before it writes the recipe with more epochs."""
    manifest = tiny.run("done") / "manifest.json"
    known = json.loads(manifest.read_text())
    assert known.pop("finished")["step"] == 4
    manifest.write_text(json.dumps(known))
    plan = plan_run(_loaded(tiny.recipe("done", runner__max_epochs=2)))
    assert not plan.finished
    assert plan.resume_from is not None


def test_runs_cannot_be_made_below_a_file_or_where_nothing_can_be_written(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = {"log_path": str(tiny.folder / "train.jsonl"), "experiment_name": "x"}
    with pytest.raises(CheckpointError, match=r"cannot be written: .*train.jsonl is not a directory"):
        shardtune.train(tiny.recipe(runner__logger=below, **DONE))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CheckpointError, match="is read-only"):
        shardtune.train(tiny.recipe("nowhere", **DONE))
    assert not tiny.run("nowhere").exists()
