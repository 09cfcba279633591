"""A run without progress ends by itself and names the rank that differs; the same command continues it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import shardtune
from shardtune.batch import Batch
from shardtune.config import load_recipe
from shardtune.launch.local import REPORT_DIR, RanksStuck, ReportedError, _reports
from shardtune.launch.progress import PROGRESS, START
from shardtune.launch.signals import StopSignal
from shardtune.launch.torchrun import _outcome, final_code
from shardtune.launch.watchdog import processes, watchdog
from shardtune.launch.watchdog.stacks import Place, place_in, place_of
from shardtune.launch.watchdog.verdict import StandReport, describe, judge
from shardtune.parallel.ranks import join_ranks
from shardtune.training.worker import base
from shardtune.training.worker.adapter_worker import SFTWorker
from shardtune.training.worker.base import FSDPSftWorker
from tests.support.tiny_run import Tiny, assert_same_tensors, lines, make_tiny

PLUGIN = str(Path(__file__).parents[2] / "support" / "stuck_ways.py")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("stuck"))


def stands(rank: int, **known: object) -> StandReport:
    fields = {"host": "a", "seconds": 600.0, "phase": "a training step", "step": 7, "beats": 3, "place": "is at x.py:1"}
    return StandReport(rank=rank, **{**fields, **known})  # type: ignore[arg-type]


def waits(rank: int, name: str = "all_reduce", **known: object) -> StandReport:
    return stands(rank, collective=name, place=f"waits in the collective {name}", **known)


@pytest.mark.parametrize(
    ("reports", "silent", "ranks", "reason"),
    [
        ([waits(0)], [1], (1,), ""),
        ([waits(0), stands(1), waits(2)], [], (1,), "does not come to the collective"),
        ([stands(0), stands(1, beats=2)], [], (1,), "is behind"),
        ([stands(0), stands(1)], [], (), ""),
        ([waits(0), waits(1, "barrier", in_users=True)], [], (1,), "your own code"),
        ([waits(0), waits(1, "barrier"), waits(2)], [], (1,), "another collective than the others"),
        ([waits(0), waits(1, "barrier", beats=4)], [], (), ""),
        ([waits(0), waits(1, in_users=True), waits(2, in_users=True)], [], (0,), "has not called the collective"),
        ([waits(0, rounds=2, begun=3), waits(1, rounds=3, begun=2)], [], (1,), "left out a training step"),
        ([waits(0, rounds=2, begun=3, in_users=True), waits(1, rounds=3, begun=2)], [], (1,), "left out"),
        ([waits(0, rounds=4, begun=3), waits(1, rounds=4, begun=2)], [], (), ""),  # a worker that means to
        ([waits(0, rounds=3, begun=3), waits(1, rounds=3, begun=4)], [], (), ""),
        ([waits(0, begun=1), waits(1, begun=1, micro_batch=1), waits(2, begun=1)], [], (1,), "another position"),
        ([waits(0, issued=5), waits(1, issued=4)], [], (), ""),
        ([waits(0, issued=5), waits(1, issued=4), waits(2, issued=5)], [], (1,), "number of collectives"),
        ([waits(0), waits(1)], [], (), ""),
    ],
)
def test_the_rank_that_differs(reports: list[StandReport], silent: list[int], ranks: tuple[int, ...], reason: str):
    found = judge({report.rank: report for report in reports}, silent)
    assert found.ranks == ranks
    assert reason in found.reason


def test_of_two_ranks_that_have_parted_neither_is_blamed():
    reports = {
        0: waits(0, begun=8, rounds=7, micro_batch=1, micro_batches=2, issued=5),
        1: waits(1, begun=7, rounds=7, issued=6, phase="saving a checkpoint"),
    }
    text = describe(judge(reports, []), reports, {}, num_ranks=2)
    assert "after step 7: the ranks have parted" in text
    assert "rank 0 in step 8, micro-batch 1 of 2, in a training step, after 5 collectives, waits in" in text
    assert "rank 1 after step 7, in saving a checkpoint, after 6 collectives, waits in" in text
    assert "no rank differs" in describe(
        judge({0: waits(0), 1: waits(1)}, []), {0: waits(0), 1: waits(1)}, {}, num_ranks=2
    )


def test_a_thousand_ranks_are_one_message():
    reports = {rank: StandReport.from_json(waits(rank).to_json()) for rank in range(1000)}
    reports[437] = stands(437, host="b")
    text = describe(judge(reports, []), reports, {}, num_ranks=1000)
    assert len(text.splitlines()) < 7
    assert "rank 437 does not come to the collective" in text
    assert "rank 437 on b is at x.py:1" in text


def test_where_a_thread_stands(tmp_path: Path):
    lock = compile("found = place_of(sys._getframe())", "/lib/filelock/_api.py", "exec")
    exec(lock, known := {"place_of": place_of, "sys": sys})
    assert known["found"].for_lock
    assert not place_of(sys._getframe()).for_lock
    assert str(place_of(sys._getframe())).startswith(f"is at {__file__}:")
    written = (
        f'Thread 0x1 (most recent call first):\n  File "{threading.__file__}", line 5 in wait\n\n'
        f'Current thread 0x2 (most recent call first):\n  File "{os.__file__}", line 1 in x\n'
        '  File "my.py", line 8 in f'
    )
    assert place_in(written) == "at my.py:8, in f"


def test_a_functional_collective_is_named_through_the_dispatch_of_torch():
    known: dict = {"found": lambda: place_of(sys._getframe(1))}
    for file, name, called in (  # from the innermost outwards, as `full_tensor` of a DTensor waits
        ("/lib/torch/_ops.py", "redispatch", "found"),
        ("/lib/my/modes.py", "__torch_function__", "redispatch"),
        ("/lib/torch/_ops.py", "__call__", "__torch_function__"),
        ("/lib/torch/distributed/_functional_collectives.py", "wait_tensor", "__call__"),
        ("/lib/torch/distributed/tensor/_redistribute.py", "forward", "wait_tensor"),
        ("/lib/torch/autograd/function.py", "apply", "forward"),
        ("/lib/torch/distributed/tensor/_api.py", "full_tensor", "apply"),
    ):
        exec(compile(f"def {name}(): return {called}()", file, "exec"), known)
    assert known["full_tensor"]().collective == "full_tensor"
    assert not known["redispatch"]().collective


def test_exit_codes_of_ranks_become_one():
    assert final_code([75, 75]) == 75
    assert final_code([75, 0]) == 75
    assert final_code([0, 0]) == 0
    assert final_code([1, 2]) == 2
    assert final_code([76, -9]) == 76
    assert final_code([75, 1]) == 75  # it lost the rank that was stopped
    assert final_code([-10, 1]) == 75  # the signal came before the rank could listen
    assert final_code([75, None]) == final_code([75, -9]) == 1  # killed before it had saved
    assert final_code([1, 1]) == final_code([-9, 1]) == 1
    assert final_code([]) == 1
    assert _outcome({0: 75, 1: 1}, first=1) == (1, "")  # rank 0 was stopped because rank 1 had failed
    assert _outcome({0: 75, 1: 1}, first=0) == (75, "")
    assert _outcome({0: 2, 1: -15}, first=1) == (2, "")


@pytest.mark.lengthy
@pytest.mark.parametrize("stopped", [False, True])
def test_one_rank_that_is_stuck_raises(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, stopped: bool):
    """After the recipe's seconds; sooner once it is to stop, although the main thread never comes to a poll."""
    loss, name = SFTWorker.get_train_model_output, f"alone-{stopped}"

    def stuck(self: SFTWorker, batch: Batch) -> object:
        if self.step == 2:
            if stopped:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1000)
        return loss(self, batch)

    monkeypatch.setattr(watchdog, "STOP_SECONDS", 0.5)
    recipe = tiny.recipe(name, runner__watchdog_seconds=60 if stopped else 1)
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(SFTWorker, "get_train_model_output", stuck)
        with pytest.raises(RanksStuck) as raised:
            shardtune.train(recipe)
    assert time.monotonic() - began < 40
    told = str(raised.value)
    assert "in a training step, after step 2" in told
    assert "in test_one_rank_that_is_stuck_raises.<locals>.stuck: time.sleep(1000)" in told
    assert "global_step_2: the same command continues" in told
    assert "time.sleep(1000)" in (tiny.run(name) / "stuck" / "rank_0.txt").read_text()
    assert PROGRESS.phase is START
    shardtune.train(recipe)
    assert [line["step"] for line in lines(tiny.run(name))] == list(range(1, 9))


def test_a_start_that_hangs_raises_one_that_works_does_not(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    def computes(self: FSDPSftWorker, *_: object, **__: object) -> None:
        child = subprocess.Popen([sys.executable, "-Ec", "while True: pass"])
        time.sleep(2.5)  # the child works
        child.kill()
        child.wait()
        raise ArithmeticError("it has come through")

    def hangs(self: FSDPSftWorker, *_: object, **__: object) -> None:
        time.sleep(1000)

    recipe = tiny.recipe("start", runner__watchdog_seconds=0.2)
    with monkeypatch.context() as patch:
        # Ranks that other tests keep are of this process's tree, and threads of their closed groups use a little.
        patch.setattr(processes, "BUSY", 0.5)
        patch.setattr(FSDPSftWorker, "_build", hangs)
        with pytest.raises(RanksStuck) as raised:
            shardtune.train(recipe)
    told = str(raised.value)
    assert "no progress for 1 s in the start" in told
    assert "<locals>.hangs: time.sleep(1000)" in told
    assert "there is no checkpoint yet: the same command starts again" in told
    monkeypatch.setattr(FSDPSftWorker, "_build", computes)
    with pytest.raises(ArithmeticError):
        shardtune.train(recipe)


def test_a_rank_that_hangs_at_the_start_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Wherever the others are; one that waits for them in a collective does not."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(REPORT_DIR, str(tmp_path))
    monkeypatch.setattr(watchdog, "_leave", lambda: sys.exit(76))
    PROGRESS.start()
    started = watchdog.Watchdog(0, tmp_path / "stuck", StopSignal(), goes_on=lambda: "it starts again")
    with pytest.raises(SystemExit):
        started._stuck_alone(START, 3600.0)
    (report,) = _reports(tmp_path)
    assert (report.rank, report.stuck) == (1, True)
    assert "3600 s in the start: rank 1 neither computes nor reads nor writes\n  rank 1 is at" in report.message
    monkeypatch.setattr(watchdog, "place_of_main_thread", lambda: Place("x.py:1", collective="all_reduce"))
    assert not started._stuck_alone(START, 3600.0)


def test_the_time_limit_of_collectives_is_the_recipes(tiny: Tiny, monkeypatch: pytest.MonkeyPatch):
    joined = []

    def join(device: str, actor: object, timeout: float) -> object:
        joined.append(timeout)
        return join_ranks("cpu", load_recipe(tiny.recipe()).actor, timeout)

    monkeypatch.setattr(base, "join_ranks", join)
    SFTWorker(load_recipe(tiny.recipe(runner__collective_timeout=77)))
    assert joined == [77]


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "way",
    [
        "stopped",
        "leaves",
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("holds_the_interpreter", "skips_a_step")),
    ],
)
def test_of_two_ranks_the_one_that_is_stuck_is_named(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, way: str):
    recipe = tiny.recipe(way, plugins=[PLUGIN], runner__nproc_per_node=2, runner__watchdog_seconds=4)
    with monkeypatch.context() as patch:
        patch.setenv("TEST_STUCK", way)
        with pytest.raises(ReportedError if way == "leaves" else RanksStuck) as raised:
            shardtune.train(recipe)
    told = str(raised.value)
    expected = {
        "stopped": "rank 1 is stopped by a signal (state T",
        "holds_the_interpreter": "in holds_the_interpreter",
        "skips_a_step": "rank 1 has left out a training step",
        "leaves": "sys.exit(3) was called",
    }
    assert expected[way] in told
    assert ("waits in the collective" in told) == (way != "leaves")
    if way == "skips_a_step":
        shardtune.train(tiny.recipe("whole", runner__nproc_per_node=2))
        shardtune.train(recipe)
        last = "checkpoints/global_step_8"
        assert_same_tensors(tiny.run("whole") / last, tiny.run(way) / last)
