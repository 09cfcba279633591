"""Ranks that are lost: as many as are left start again from the last checkpoint, as often as the recipe says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

import shardtune
from shardtune.errors import ConfigError, Interrupted
from shardtune.launch.elastic import Restarts, run_elastic
from shardtune.launch.local import LAUNCH_ID, RESTARTS, RankFailed, RankLost
from shardtune.launch.signals import StopSignal
from tests.support.tiny_run import Tiny, events, lines, make_tiny


class Start:
    """Loses one rank per start until there is nothing left to lose."""

    def __init__(self, losses: int, error: type[BaseException] = RankLost) -> None:
        self.losses, self.error = losses, error
        self.workers: list[int] = []
        self.environments: list[Mapping[str, str]] = []

    def __call__(self, workers: int, environment: Mapping[str, str]) -> None:
        self.workers.append(workers)
        self.environments.append(environment)
        if len(self.workers) <= self.losses:
            raise RankLost("rank 1 was ended by SIGKILL", [1]) if self.error is RankLost else self.error("x")


def run(start: Start, restarts: Restarts, *, multiple_of: int = 1, stop: StopSignal | None = None) -> list[str]:
    said: list[str] = []
    run_elastic(
        start,
        restarts,
        left=lambda numbers, survivors: next((number for number in numbers if number <= survivors), 0),
        fits=lambda workers: workers % multiple_of == 0,
        stop=stop or StopSignal(),
        report=said.append,
        run_dir=Path("no run"),
    )
    return said


def test_each_loss_leaves_one_fewer() -> None:
    start = Start(losses=2)
    said = run(start, Restarts(most=3, workers=4, fewest=1))
    assert start.workers == [4, 3, 2]
    assert [environment[RESTARTS] for environment in start.environments] == ["0", "1", "2"]
    assert len({environment[LAUNCH_ID] for environment in start.environments}) == 1
    assert said[1].startswith("rank 1 was ended by SIGKILL; restart 2 of 3, from the last checkpoint, on 2 workers")


def test_only_numbers_that_the_layout_allows_are_started() -> None:
    start = Start(losses=1)
    run(start, Restarts(most=1, workers=8, fewest=2), multiple_of=4)
    assert start.workers == [8, 4]


@pytest.mark.parametrize(
    ("restarts", "says"),
    [
        (Restarts(0, 4, 4), "^rank 1 was ended by SIGKILL$"),
        (Restarts(2, 4, 1), r"runner.max_restarts \(2\) is used up"),
        (Restarts(9, 4, 3), r"fewer than runner.min_ranks \(3\) are left"),
    ],
)
def test_it_ends_when_it_happens_too_often_or_too_few_are_left(restarts: Restarts, says: str) -> None:
    with pytest.raises(RankLost, match=says):
        run(Start(losses=9), restarts)


@pytest.mark.parametrize("error", [RankFailed, ConfigError, Interrupted])
def test_what_would_only_happen_again_is_not_tried_again(error: type[BaseException]) -> None:
    start = Start(losses=1, error=error)
    with pytest.raises(error):
        run(start, Restarts(most=3, workers=2, fewest=1))
    assert start.workers == [2]


def test_no_restart_once_a_stop_was_asked_for() -> None:
    stop = StopSignal()

    class Stopped(Start):
        def __call__(self, workers: int, environment: Mapping[str, str]) -> None:
            stop.requested = True
            super().__call__(workers, environment)

    start = Stopped(losses=1)
    with pytest.raises(Interrupted):
        run(start, Restarts(most=3, workers=2, fewest=1), stop=stop)
    assert start.workers == [2]


PLUGIN = """
import os
from shardtune.training.worker.base import FSDPSftWorker

original = FSDPSftWorker.run_training

def run_training(self):
    if self.ranks.rank == 1 and self.step == 3:
        os.kill(os.getpid(), 9)
    return original(self)

if "RANK" in os.environ:  # not in the launcher, which imports it too
    FSDPSftWorker.run_training = run_training
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("elastic"))


@pytest.mark.lengthy
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(tiny: Tiny, capfd: pytest.CaptureFixture[str]) -> None:
    """Two ranks, one is killed in step 4: one goes on after step 2. The older run in the directory moves aside once."""
    plugin = tiny.folder / "killed.py"
    plugin.write_text(PLUGIN)
    shardtune.train(tiny.recipe("lost", runner__max_steps=1, runner__max_epochs=-1))
    shardtune.train(
        tiny.recipe(
            "lost",
            plugins=[str(plugin)],
            runner__save_interval=2,
            runner__overwrite=True,
            runner__nproc_per_node=2,
            runner__max_restarts=1,
            runner__min_workers=1,
            runner__logger__rank_logs=True,
        )
    )
    said = capfd.readouterr().err
    assert "rank 1 was ended by SIGKILL (out of memory?)" in said
    assert "restart 1 of 1, from the last checkpoint, on 1 worker" in said
    assert [line["step"] for line in lines(tiny.run("lost"))] == list(range(1, 9))
    shardtune.train(tiny.recipe("whole"))
    there, here = lines(tiny.run("whole")), lines(tiny.run("lost"))
    assert [line["train/loss"] for line in here] == pytest.approx([line["train/loss"] for line in there], rel=1e-5)
    happened = [(event["event"], event["restart"], event["ranks"]) for event in events(tiny.run("lost"))]
    first, second = [("start", 0, 2), ("save", 0, 2)], [("resume", 1, 1), *[("save", 1, 1)] * 3, ("end", 1, 1)]
    assert happened == [*first, ("lost", 0, 2), ("restart", 0, 1), *second]
    assert events(tiny.run("lost"))[2]["lost_ranks"] == [1]
    logs = {file.name: file.read_text() for file in (tiny.run("lost") / "logs").iterdir()}
    assert logs.keys() == {"rank_0.log", "rank_1.log"}
    assert "step 8: saved" in logs["rank_0.log"]
    assert "step 8: saved" in said, "besides the terminal"
    assert logs["rank_0.log"].count(": process ") == 2, "a line for each start"
    moved = [path for path in tiny.runs.iterdir() if path.name.startswith("lost.old-")]
    assert len(moved) == 1
    assert len(lines(moved[0])) == 1
    assert "RANK" not in os.environ


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"runner__max_restarts": 1}, "has no effect on a single process"),
        ({"runner__nproc_per_node": 2, "runner__min_workers": 1}, "no effect with runner.max_restarts: 0"),
        (
            {"runner__nproc_per_node": 2, "runner__max_restarts": 1, "runner__min_workers": 3},
            "more than the 2 ranks that are started",
        ),
        ({"runner__launcher": "ray"}, "set runner.num_ranks"),
        ({"runner__num_workers": 2}, "runner.num_workers has no effect with runner.launcher: local"),
        ({"runner__ray": {"placement": "spread"}}, "runner.ray.placement has no effect with runner.launcher: local"),
        (
            {"runner__launcher": "ray", "runner__num_workers": 2, "runner__nproc_per_node": 2},
            "runner.nproc_per_node (2) has no effect",
        ),
    ],
)
def test_keys_that_would_do_nothing_are_refused(tiny: Tiny, tmp_path: Path, keys: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        shardtune.train(tiny.recipe("refused", **keys))
    assert says in str(refused.value)
