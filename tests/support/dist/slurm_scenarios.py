"""What happens to jobs of Slurm, each with the script that `shardtune launch --print --by slurm` prints.

Every scenario checks its outcome and returns a line for the table of `bench/clusters.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

import shardtune
from shardtune.launch.jobs.commands import launch_commands
from tests.support.dist.hosts import Host
from tests.support.dist.slurm import KILL_SECONDS, NODE_LOST_SECONDS, Slurm
from tests.support.tiny_run import Tiny, assert_same_tensors, lines

STEPS = 8
LOST_AFTER = 5
WAIT = 240.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
SLOW = """
import time
from pathlib import Path
from shardtune.training.worker.base import FSDPSftWorker

original = FSDPSftWorker.run_training

def run_training(self):
    if self.step >= 2 and not Path({go!r}).exists():
        time.sleep({seconds})
    return original(self)

FSDPSftWorker.run_training = run_training
if {hang!r}:
    time.sleep(600)
"""
"""A plugin: from the third on steps take their time, until a file exists."""


@dataclass(frozen=True)
class Outcome:
    """A line of the table.

    Attributes:
        event: what happened, and the settings that matter.
        times: measured seconds.
        end: of job and run.
    """

    event: str
    times: str
    end: str


class Job:
    """A recipe with slow steps, its job script, and the job.

    Args:
        cluster: to run on.
        tiny: inputs.
        name: of the run.
        seconds: of a step until `go` is touched.
        hang: the ranks never begin to train.
        keys: of the recipe.
    """

    def __init__(
        self, cluster: Slurm, tiny: Tiny, name: str, *, seconds: float = 3.0, hang: bool = False, **keys: Any
    ) -> None:
        self.cluster, self.tiny, self.name = cluster, tiny, name
        self.folder = tiny.folder / name
        self.folder.mkdir()
        self.go = self.folder / "go"
        plugin = self.folder / "slow.py"
        plugin.write_text(SLOW.format(go=str(self.go), seconds=seconds, hang=hang))
        keys = {"runner__save_interval": 2, "runner__lost_after": LOST_AFTER, "runner__device": "cpu", **keys}
        self.recipe = self.folder / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump(tiny.recipe(name, plugins=[str(plugin)], **keys)))
        self.numbers: list[int] = []

    def submit(self, *options: str, nodes: int = 2, overrides: tuple[str, ...] = (), **launch: Any) -> None:
        """Print the script, as it is, and submit it with options of `sbatch`."""
        script = self.folder / "job.sh"
        script.write_text(launch_commands(str(self.recipe), overrides, nodes, 1, ("slurm",), **launch))
        self.numbers.append(self.cluster.submit(script, *options))

    @classmethod
    def begun(cls, cluster: Slurm, tiny: Tiny, name: str, **launch: Any) -> Job:
        """A submitted job that has saved a checkpoint."""
        job = cls(cluster, tiny, name)
        job.submit(**launch)
        job.until(lambda: job.saved() >= 2)
        return job

    @property
    def number(self) -> int:
        return self.numbers[-1]

    def node(self, place: int) -> Host:
        """One of its nodes; the first runs the script."""
        names = self.cluster.run("scontrol", "show", "hostnames", self.cluster.job(self.number, "NodeList")).split()
        return next(node for node in self.cluster.nodes if node.name == names[place])

    def state(self) -> str:
        return self.cluster.job(self.number)

    def restarts(self) -> int:
        return int(self.cluster.job(self.number, "Restarts"))

    def saved(self) -> int:
        file = self.tiny.run(self.name) / "checkpoints/latest"
        return int(file.read_text().strip().rpartition("_")[2]) if file.exists() else 0

    def log(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("*.log")))

    def until(self, condition: Callable[[], bool], seconds: float = WAIT) -> float:
        """Wait; returns the seconds."""

        def met() -> bool:
            state = self.state()  # before the condition, which may be that the job has ended
            if condition():
                return True
            assert state not in ENDED, f"the job {state}"
            return False

        try:
            return self.cluster.wait_for(met, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def until_restarted(self) -> float:
        return self.until(lambda: self.restarts() > 0)

    def until_running(self) -> float:
        return self.until(lambda: self.state() == "RUNNING")

    def until_ended(self, wanted: str = "COMPLETED") -> float:
        self.go.touch()
        return self.until(lambda: self.state() == wanted)

    def complete(self, saved: int | None = None) -> None:
        """Wait until the job is completed: it has continued (after step `saved`), and is bitwise the whole run."""
        self.until_ended()
        assert f"continuing after step {saved or ''}" in self.log(), self.log()
        self.check_bitwise()

    def check_bitwise(self, whole: str = "whole", run: str | None = None) -> None:
        """The run is that of two ranks that nothing happened to, bit for bit."""
        here, there = self.tiny.run(run or self.name), self.tiny.run(whole)
        assert lines(here) == lines(there)
        assert_same_tensors(here / f"checkpoints/global_step_{STEPS}", there / f"checkpoints/global_step_{STEPS}")

    def check_close(self) -> None:
        """Each step is there once, with the numbers of two ranks."""
        here, there = lines(self.tiny.run(self.name)), lines(self.tiny.run("whole"))
        assert [line["step"] for line in here] == list(range(1, STEPS + 1))
        losses = [line["train/loss"] for line in there]
        assert [line["train/loss"] for line in here] == pytest.approx(losses, rel=1e-5)


def train_whole(tiny: Tiny) -> None:
    """The runs that nothing happens to: two ranks, and one rank for each task of the array."""
    keys = {"runner__save_interval": 2, "runner__device": "cpu"}
    shardtune.train(tiny.recipe("whole", runner__nproc_per_node=2, **keys))
    for seed in range(2):
        shardtune.train(tiny.recipe(f"whole-{seed}", runner__seed=seed, **keys))


def time_limit(cluster: Slurm, tiny: Tiny) -> Outcome:
    """The time is up in the middle of a run, with `overwrite: true`, which would begin every job anew."""
    job = Job(cluster, tiny, "limit", seconds=16.0, runner__overwrite=True)
    job.submit("--time=3", "--signal=B:USR1@75")
    job.until_restarted()
    saved = job.saved()
    assert saved > 0
    again = job.until_running()
    job.complete(saved)
    assert "step 1/8" in job.log(), "the log of the first start is gone"
    return Outcome(
        "time limit of 180 s, `--signal=B:USR1@75`, 2 nodes, `overwrite: true`",
        f"requeued after step {saved}, begins again after {again:.0f} s",
        "COMPLETED; bitwise the run without a limit",
    )


def array(cluster: Slurm, tiny: Tiny) -> Outcome:
    """Of two tasks, each with its own seed and run, the last is warned, whose number is that of the array too."""
    job = Job(cluster, tiny, "array")
    job.submit(nodes=1, array="0-1", overrides=("runner.seed=$SLURM_ARRAY_TASK_ID",))
    runs = [tiny.run(f"array-{task}") for task in range(2)]
    job.until(lambda: all((run / "checkpoints/latest").exists() for run in runs))
    tasks = [f"{job.number}_{task}" for task in range(2)]
    cluster.run("scancel", "--batch", "--signal=USR1", tasks[1])
    seconds = job.until(lambda: cluster.job(tasks[1], "Restarts") == "1")
    assert cluster.job(tasks[0]) in ("RUNNING", "COMPLETED"), job.log()
    assert cluster.job(tasks[0], "Restarts") == "0", job.log()
    job.go.touch()
    job.until(lambda: all(cluster.job(task) not in ("PENDING", "RUNNING", "COMPLETING") for task in tasks))
    assert [cluster.job(task) for task in tasks] == ["COMPLETED"] * 2, job.log()
    for task in range(2):
        job.check_bitwise(f"whole-{task}", f"array-{task}")
    return Outcome(
        "array of 2 tasks, USR1 to the last",
        f"saved and requeued after {seconds:.0f} s, the other one trained on",
        "both COMPLETED; bitwise the runs of their seeds",
    )


def dead_node(cluster: Slurm, tiny: Tiny) -> Outcome:
    """A node loses power, no node is to spare: Slurm requeues the job, which continues when a node is back."""
    job = Job.begun(cluster, tiny, "dead")
    node = job.node(1)
    node.lose_power()
    noticed = job.until_restarted()
    cluster.begin_node(node)
    again = job.until_running()
    job.complete()
    return Outcome(
        f"a node of 2 dies (`SlurmdTimeout={NODE_LOST_SECONDS}`)",
        f"requeued by Slurm after {noticed:.0f} s, begins again {again:.0f} s later",
        "COMPLETED; bitwise the run without a loss",
    )


def dead_node_with_spare(cluster: Slurm, tiny: Tiny) -> Outcome:
    """A node of three loses power: the same job continues on two."""
    job = Job.begun(cluster, tiny, "spare", nodes=3, fewest=2, restarts=2)
    job.node(2).lose_power()
    again = job.until(lambda: "ranks     2 on cpu" in job.log())
    job.until_ended()
    assert job.restarts() == 0
    assert "continuing after step" in job.log()
    job.check_close()
    return Outcome(
        f"a node of 3 dies, `--min-nodes 2` (`runner.lost_after` {LOST_AFTER} s)",
        f"2 nodes train again after {again:.0f} s, without a requeue",
        "COMPLETED; the numbers of two ranks",
    )


def dead_first_node(cluster: Slurm, tiny: Tiny) -> Outcome:
    """The first node loses power: Slurm would keep the job without the script that it runs; another requeues it."""
    job = Job.begun(cluster, tiny, "first", nodes=2, fewest=1, restarts=2)
    job.node(0).lose_power()
    noticed = job.until_restarted()
    again = job.until_running()
    job.complete()
    return Outcome(
        f"the first node of 2 dies, `--min-nodes 1` (`runner.lost_after` {LOST_AFTER} s)",
        f"requeued by the other after {noticed:.0f} s, begins again {again:.0f} s later",
        "COMPLETED; bitwise the run without a loss",
    )


def preempted(cluster: Slurm, tiny: Tiny) -> Outcome:
    """A job of higher priority takes the nodes."""
    job = Job.begun(cluster, tiny, "preempted")
    urgent = job.folder / "urgent.sh"
    urgent.write_text("#!/bin/bash\n#SBATCH --nodes=3 --exclusive --partition=urgent\nsleep 1\n")
    cluster.submit(urgent)
    gone = job.until_restarted()
    job.complete(job.saved())
    return Outcome(
        "preempted (`PreemptMode=REQUEUE`, `GraceTime=30`)",
        f"saved and requeued after {gone:.0f} s",
        "COMPLETED; bitwise the run without preemption",
    )


def cancelled(cluster: Slurm, tiny: Tiny) -> Outcome:
    """`scancel` saves and does not requeue; the next job continues."""
    job = Job.begun(cluster, tiny, "cancelled")
    cluster.run("scancel", str(job.number))
    ended = job.until(lambda: job.state() == "CANCELLED")
    saved = job.saved()
    assert job.restarts() == 0
    job.submit()
    job.complete(saved)
    return Outcome(
        f"`scancel`, then `sbatch` again (`KillWait={KILL_SECONDS}`)",
        f"saved and ended after {ended:.0f} s",
        "CANCELLED, then COMPLETED; bitwise the run without it",
    )


def no_progress(cluster: Slurm, tiny: Tiny) -> Outcome:
    """The time is up before training begins: a requeue would only repeat that."""
    job = Job(cluster, tiny, "stuck", hang=True)
    job.submit()
    job.until_running()
    time.sleep(10)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job.number))
    ended = job.until_ended("FAILED")
    assert "not requeued: no new checkpoint in" in job.log()
    return Outcome(
        "USR1 before the first step", f"ended after {ended:.0f} s", "FAILED with the reason in the log; not requeued"
    )


SCENARIOS = (
    time_limit,
    array,
    dead_node,
    dead_node_with_spare,
    dead_first_node,
    preempted,
    cancelled,
    no_progress,
)
NODES = 3

