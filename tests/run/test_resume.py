"""A run that is stopped and continued is the run that was not: weights, optimizer, losses, rows, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import shardtune
from shardtune.errors import Interrupted
from shardtune.training.loggers import JsonLines
from shardtune.training.saver import Saver
from tests.support.chosen import slow_except
from tests.support.tiny_run import (
    Tiny,
    as_saved_before_checksums,
    assert_same_tensors,
    events,
    flip_bit,
    lines,
    make_tiny,
    recorded_rows,
    signal_after,
    train_on_ranks,
)

pytestmark = pytest.mark.lengthy

STEPS = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """With dropout, so that the random draws count."""
    return make_tiny(tmp_path_factory.mktemp("resume"), dropout=0.2)


@pytest.fixture(scope="module")
def whole(tiny: Tiny) -> list[list[int]]:
    """The rows of the uninterrupted run, `runs/whole`."""
    with recorded_rows() as rows:
        shardtune.train(tiny.recipe("whole"))
    return rows


def assert_same_run(tiny: Tiny, name: str, other: str = "whole") -> None:
    last = f"checkpoints/global_step_{STEPS}"
    assert_same_tensors(tiny.run(other) / last, tiny.run(name) / last)
    assert lines(tiny.run(name)) == lines(tiny.run(other))


def test_the_whole_run_is_two_epochs_of_all_rows(tiny: Tiny, whole: list[list[int]]) -> None:
    assert [len(rows) for rows in whole] == [6, 6, 6, 3] * 2
    assert sorted(chain(*whole[:4])) == sorted(chain(*whole[4:])) == list(range(21))
    assert whole[:4] != whole[4:]


# After the first step, in an epoch, at its end, at the other's beginning; bench/resume.py goes through all of them.
@pytest.mark.parametrize("step", slow_except([1, 4, 5], 4))
def test_stopped_and_continued(tiny: Tiny, whole: list[list[int]], step: int) -> None:
    backends = {"runner__logger__logger_backends": ["jsonl", "timings"]}
    recipe = tiny.recipe(f"stopped{step}", runner__save_interval=-1, **backends)
    with signal_after(step), recorded_rows() as before, pytest.raises(Interrupted, match=f"after step {step}"):
        shardtune.train(recipe)
    with recorded_rows() as after:
        shardtune.train(recipe)
    assert before[:step] + after[: STEPS - step] == whole
    happened = [(event["event"], event["step"], event["restart"]) for event in events(tiny.run(f"stopped{step}"))]
    first, second = [("save", step, 0), ("stop", step, 0)], [("save", STEPS, 1), ("end", STEPS, 1)]
    assert happened == [("start", 0, 0), *first, ("resume", step, 1), *second]
    assert not (tiny.run(f"stopped{step}") / "alive").exists()
    timings = [json.loads(line) for line in (tiny.run(f"stopped{step}") / "timings.jsonl").read_text().splitlines()]
    assert [(line["step"], line["restart"]) for line in timings] == [(n, int(n > step)) for n in range(1, STEPS + 1)]
    for seconds in (line["seconds"] for line in timings):
        parts = seconds["data"] + seconds["forward_backward"] + seconds["optimizer"]
        assert 0 < parts <= seconds["step"] + 1e-5
    assert_same_run(tiny, f"stopped{step}")


def test_without_the_optimizer_state_it_would_be_another_run(
    tiny: Tiny, whole: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also: a checkpoint of earlier versions, without checksums, is loaded with a line, and is not removed."""
    recipe = tiny.recipe("broken", runner__save_interval=-1)
    with signal_after(4), pytest.raises(Interrupted):
        shardtune.train(recipe)
    state_file = tiny.run("broken") / "checkpoints/global_step_4/worker.json"
    state = json.loads(state_file.read_text())
    changed = state_file.read_text().replace('"rows_consumed": 0', '"rows_consumed": 6')
    assert len(changed) == len(state_file.read_text())
    assert state["data"] == {"epoch": 1, "rows_consumed": 0}
    state_file.write_text(changed)
    as_saved_before_checksums(state_file.parent)
    (tiny.run("broken") / "checkpoints/run_id").unlink()
    capsys.readouterr()
    shardtune.train({**recipe, "runner": {**recipe["runner"], "keep_last": 1, "save_interval": 1}})
    told = capsys.readouterr().err
    assert "global_step_4 was saved by an earlier version and has no checksums" in told
    assert "global_step_4: saved by an earlier version, without the id of the run; never removed" in told
    left = sorted(path.name for path in state_file.parents[1].glob("global_step_*"))
    assert left == ["global_step_4", "global_step_7"], "of the steps that were done now, the last stays"
    with pytest.raises(AssertionError):
        assert_same_run(tiny, "broken")


def test_an_earlier_checkpoint_begins_a_run_of_its_own(tiny: Tiny, whole: list[list[int]]) -> None:
    source = tiny.run("whole") / "checkpoints/global_step_5"
    recipe = tiny.recipe("fork", runner__resume_dir=f"{source}/")
    with signal_after(6), pytest.raises(Interrupted):
        shardtune.train(recipe)
    shardtune.train(recipe)  # the same command goes on with its own checkpoint, not with the one it began from
    assert [line["step"] for line in lines(tiny.run("fork"))] == [6, 7, 8]
    assert_same_tensors(source.with_name("global_step_8"), tiny.run("fork") / "checkpoints/global_step_8")


def test_two_ranks_resume_bitwise_and_change_their_number_exactly(tiny: Tiny, tmp_path: Path) -> None:
    exact = make_tiny(tmp_path)  # without dropout, whose draws depend on the layout
    fp64 = {"actor__model__precision": "fp64"}
    with recorded_rows() as rows:
        shardtune.train(exact.recipe("one", **fp64))
    one = exact.run("one") / "checkpoints"
    dropout = [
        tiny.recipe("two", runner__nproc_per_node=2),
        tiny.recipe("two_resumed", runner__resume_dir=str(tiny.run("two") / "checkpoints/global_step_4")),
        tiny.recipe("two_resumed_5", runner__resume_dir=str(tiny.run("two") / "checkpoints/global_step_5")),
    ]
    elastic = [
        exact.recipe("two", runner__nproc_per_node=2, **fp64),
        exact.recipe("one_then_two", runner__resume_dir=str(one / "global_step_3"), **fp64),
    ]
    # The newest two are damaged, in files that different ranks read: both pass over them, and go on from step 6.
    damaged = shutil.copytree(exact.run("one"), exact.run("flipped"), symlinks=True) / "checkpoints"
    flip_bit(next((damaged / "global_step_8/model").iterdir()))
    flip_bit(damaged / "global_step_7/worker.json")
    shutil.rmtree(exact.run("flipped") / "final")
    seen = train_on_ranks(2, [*dropout, *elastic, exact.recipe("flipped", **fp64)])
    assert seen[5][:2] == rows[6:]
    assert seen[3][:STEPS] == rows
    assert seen[0][:STEPS][4:] == seen[1][:4]
    for name, step in (("two_resumed", 4), ("two_resumed_5", 5)):
        last = "checkpoints/global_step_8"
        assert_same_tensors(tiny.run("two") / last, tiny.run(name) / last)
        assert lines(tiny.run(name)) == lines(tiny.run("two"))[step:]
    with recorded_rows() as after:
        source = exact.run("two") / "checkpoints/global_step_3"
        shardtune.train(exact.recipe("two_then_one", runner__resume_dir=str(source), **fp64))
    assert seen[4][:5] == after[:5] == rows[3:]
    for name in ("two", "one_then_two", "two_then_one", "flipped"):
        for line in lines(exact.run(name)):
            expected = lines(exact.run("one"))[line["step"] - 1]
            assert line["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-10)
            assert line["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-10)


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_half_precision_keeps_its_masters_and_its_loss_scale(tiny: Tiny, precision: str) -> None:
    keys = {"actor__model__precision": precision, "runner__save_interval": -1}
    shardtune.train(tiny.recipe(precision, **keys))
    recipe = tiny.recipe(f"{precision}_stopped", **keys)
    with signal_after(3), pytest.raises(Interrupted):
        shardtune.train(recipe)
    shardtune.train(recipe)
    assert_same_run(tiny, f"{precision}_stopped", precision)


def test_saving_in_the_background_saves_the_same(tiny: Tiny, whole: list[list[int]]) -> None:
    shardtune.train(tiny.recipe("background", runner__async_save=True))
    for step in range(1, STEPS + 1):
        name = f"checkpoints/global_step_{step}"
        assert_same_tensors(tiny.run("whole") / name, tiny.run("background") / name)
    assert lines(tiny.run("background")) == lines(tiny.run("whole"))


def test_a_checkpoint_in_the_background_gets_its_name_without_waiting_for_the_next(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[tuple[int, int]] = []
    original = Saver.finish

    def finish(self: Saver) -> None:
        unfinished = self.unfinished
        original(self)
        if unfinished is not None:
            named.append((unfinished.step, self._worker.step))

    monkeypatch.setattr(Saver, "finish", finish)
    monkeypatch.setattr(Saver, "save", _slowly(Saver.save))
    shardtune.train(tiny.recipe("named", runner__async_save=True, runner__save_interval=3))
    assert named[0][0] == 3
    assert named[0][1] < 6, "the first checkpoint was named only when the second was due"


def _slowly(save):
    """Let the background finish before training goes on."""

    def slow(self: Saver, *args, **known) -> None:
        save(self, *args, **known)
        if self.unfinished is not None:
            for write in self.unfinished.writes:
                write.wait()

    return slow


def test_stopped_in_the_evaluation_it_is_evaluated_again_and_logged_once(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        "data__eval_data_paths": str(tiny.folder / "eval.jsonl"),
        "runner__val_check_interval": 2,
        "runner__eval_before_training": True,
        "runner__early_stop": {"enabled": True, "monitor": "eval/loss", "patience": 50},
        "runner__best": {"monitor": "eval/loss"},
        "runner__save_interval": -1,
        "actor__eval_micro_batch_size": 1,
    }
    shardtune.train(tiny.recipe("evaluated", **keys))
    recipe = tiny.recipe("evaluated_stopped", **keys)
    for step in (0, 2, 4, 8):
        with signal_in_evaluation(step, monkeypatch), pytest.raises(Interrupted):
            shardtune.train(recipe)
    assert [line["step"] for line in lines(tiny.run("evaluated_stopped"))] == list(
        range(8)
    )  # 8 is still to be evaluated
    shardtune.train(recipe)
    assert_same_run(tiny, "evaluated_stopped", "evaluated")
    whole, stopped = (read_state(tiny.run(name) / "checkpoints/latest") for name in ("evaluated", "evaluated_stopped"))
    assert stopped["early"] == whole["early"]
    best = [(tiny.run(name) / "checkpoints/best").resolve().name for name in ("evaluated", "evaluated_stopped")]
    assert best[0] == best[1]


def read_state(pointer: Path) -> dict:
    return json.loads((pointer.parent / pointer.read_text().strip() / "state.json").read_text())["state"]


def signal_in_evaluation(step: int, monkeypatch: pytest.MonkeyPatch):
    """SIGTERM after the third micro-batch of the evaluation at a step."""
    import contextlib

    from shardtune.training.worker.adapter_worker import SFTWorker

    original = SFTWorker.get_eval_model_output

    @contextlib.contextmanager
    def patched():
        done = 0

        def output(self, batch):
            nonlocal done
            done += self.step == step
            if self.step == step and done == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(self, batch)

        with monkeypatch.context() as patch:
            patch.setattr(SFTWorker, "get_eval_model_output", output)
            yield

    return patched()


def _train_until_the_third_line(recipe: dict[str, Any]) -> None:
    """Go on with the evaluation after step 2, log steps 2 and 3, and be killed."""
    original = JsonLines.log

    def log(self: JsonLines, step: int, metrics: Mapping[str, float]) -> None:
        original(self, step, metrics)
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    JsonLines.log = log
    shardtune.train(recipe)


def test_killed_after_an_evaluation_that_was_done_again_its_step_is_logged_once(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        "data__eval_data_paths": str(tiny.folder / "eval.jsonl"),
        "runner__val_check_interval": 2,
        "runner__save_interval": -1,
        "actor__eval_micro_batch_size": 1,
    }
    recipe = tiny.recipe("evaluated_killed", **keys)
    with signal_in_evaluation(2, monkeypatch), pytest.raises(Interrupted):
        shardtune.train(recipe)
    process = get_context("spawn").Process(target=_train_until_the_third_line, args=(recipe,))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert [line["step"] for line in lines(tiny.run("evaluated_killed"))] == [1, 2, 3]
    shardtune.train(recipe)
    found = lines(tiny.run("evaluated_killed"))
    assert [line["step"] for line in found] == list(range(1, 9))
    assert ["eval/loss" in line for line in found] == [False, True] * 4
