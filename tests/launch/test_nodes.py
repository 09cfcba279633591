"""Several hosts: torchrun with its rendezvous across them, and a Ray cluster with one node on each.

A host is killed, or cut off in the middle of a step: the job ends or goes on as configured, within the stated time, and
loses no step that was saved.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import shardtune
from shardtune.launch.first_host import LOST_SECONDS
from shardtune.run.preflight import OWN_STORE
from tests.support.dist.hosts import Host, hosts, lines_of, why_not
from tests.support.tiny_run import Tiny, lines, make_tiny

SKIP = why_not()
pytestmark = [pytest.mark.skipif(SKIP is not None, reason=f"several hosts on one machine: {SKIP}")]

LOST_AFTER = 5
SLOW = """
import time
from pathlib import Path
from shardtune.training.worker.base import FSDPSftWorker

original = FSDPSftWorker.run_training

def run_training(self):
    if not Path({go!r}).exists():
        time.sleep({seconds})
    return original(self)

FSDPSftWorker.run_training = run_training
"""
"""A plugin: steps take their time until a file says go."""
STEPS = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    made = make_tiny(tmp_path_factory.mktemp("nodes"))
    shardtune.train(made.recipe("whole"))
    return made


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


@pytest.fixture
def three() -> Iterator[list[Host]]:
    with hosts(3) as made:
        yield made


class Job:
    """A recipe of slow steps, a save after every second of them, and what its commands said."""

    def __init__(self, tiny: Tiny, name: str, **changes: Any) -> None:
        self.tiny, self.name = tiny, name
        self.folder = tiny.folder / name
        self.folder.mkdir()
        self.go = self.folder / "go"
        plugin = self.folder / "slow.py"
        plugin.write_text(SLOW.format(go=str(self.go), seconds=0.4))
        keys = {"runner__save_interval": 2, "runner__lost_after": LOST_AFTER, **changes}
        self.recipe = self.folder / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump(tiny.recipe(name, plugins=[str(plugin)], **keys)))
        self.started: list[tuple[subprocess.Popen[str], Path]] = []

    def start(self, host: Host, *command: str, **environment: str) -> subprocess.Popen[str]:
        log = self.folder / f"{len(self.started)}-{host.name}.log"
        with log.open("w") as file:
            process = host.start(command, environment, stdout=file, stderr=subprocess.STDOUT)
        self.started.append((process, log))
        return process

    def torchrun(
        self,
        made: list[Host],
        nodes: str,
        *options: str,
        module: str = "torch.distributed.run",
        **environment: str,
    ) -> list[subprocess.Popen[str]]:
        """The same command on every host, as a cluster's users type it."""
        return [
            self.start(
                host,
                *(sys.executable, "-m", module, "--nnodes", nodes, "--nproc-per-node", "1"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{made[0].address}:29400", "--rdzv-id", self.name),
                *("--local-addr", host.address, "--rdzv-conf", "last_call_timeout=2", *options),
                *("-m", "shardtune", "train", str(self.recipe)),
                **environment,
            )
            for host in made
        ]

    def said(self) -> str:
        return "\n".join(lines_of(*started) for started in self.started)

    def wait_for(self, condition: Callable[[], bool], *processes: subprocess.Popen[str], seconds: float = 90) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert all(process.poll() is None for process in processes), self.said()
            assert time.monotonic() < until, f"it did not come to that\n{self.said()}"
            time.sleep(0.05)

    def end(self, process: subprocess.Popen[str], seconds: float = 90) -> int:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended after {seconds} s\n{self.said()}") from None

    def steps(self) -> list[int]:
        file = self.tiny.run(self.name) / "metrics.jsonl"
        return [int(line["step"]) for line in lines(self.tiny.run(self.name))] if file.exists() else []

    def saved(self) -> int:
        file = self.tiny.run(self.name) / "checkpoints/latest"
        return int(file.read_text().strip().rpartition("_")[2]) if file.exists() else 0

    def check_whole(self) -> None:
        """Each step is there once, and is what one process makes of it."""
        assert self.steps() == list(range(1, STEPS + 1)), self.said()
        there, here = lines(self.tiny.run("whole")), lines(self.tiny.run(self.name))
        for key in ("train/loss", "train/tokens", "train/learning_rate"):
            assert [line[key] for line in here] == pytest.approx([line[key] for line in there], rel=1e-5)
        assert (self.tiny.run(self.name) / "final/model.safetensors").exists()


@pytest.mark.slow  # on one host: test_elastic.py
def test_torchrun_goes_on_with_the_hosts_that_are_left(tiny: Tiny, two: list[Host]) -> None:
    job = Job(tiny, "killed")
    here, there = job.torchrun(two, "1:2", "--max-restarts", "1")
    job.wait_for(lambda: job.saved() >= 2, here, there)
    assert "ranks     2 on cpu" in job.said()
    two[1].kill()
    job.go.touch()
    assert job.end(here) == 0, job.said()
    assert "continuing after step" in job.said()
    job.check_whole()
    assert two[0].processes() == []
    assert two[0].listening() == []


@pytest.mark.slow
def test_under_torchrun_a_host_that_is_cut_off_ends_the_job_and_nothing_saved_is_lost(
    tiny: Tiny, two: list[Host]
) -> None:
    job = Job(tiny, "cut")
    here, there = job.torchrun(two, "2")
    job.wait_for(lambda: job.saved() >= 2, here, there)
    two[1].cut_off()
    began = time.monotonic()
    assert job.end(here, 2 * LOST_AFTER + 15) == 1, job.said()
    assert "host-b (rank 1) is lost: nothing was heard of it for 5 s" in job.said()
    print(f"cut off: the job ended after {time.monotonic() - began:.1f} s")
    job.wait_for(lambda: len(rank_processes(two[1])) == 0, seconds=2 * LOST_AFTER + 15)  # nobody trains on alone
    two[1].kill()
    two[1].plug_in()
    saved = job.saved()
    assert saved >= max(job.steps()) - 2
    job.go.touch()
    again = job.torchrun(two, "2")
    assert [job.end(process) for process in again] == [0, 0], job.said()
    assert f"continuing after step {saved}" in job.said()
    job.check_whole()


@pytest.mark.slow
def test_torchrun_goes_on_with_two_of_three_hosts(tiny: Tiny, three: list[Host]) -> None:
    job = Job(tiny, "three")
    options = ("--max-restarts", "1", "--rdzv-conf", "last_call_timeout=10")
    *left, lost = job.torchrun(three, "2:3", *options, **{OWN_STORE: "1"})
    job.wait_for(lambda: "ranks     3 on cpu" in job.said() and job.saved() >= 2, *left, lost, seconds=180)
    three[2].kill()
    job.go.touch()
    assert [job.end(process, 180) for process in left] == [0, 0], job.said()
    assert "ranks     2 on cpu" in job.said()
    assert "continuing after step" in job.said()
    job.check_whole()
    assert [host.processes() for host in three] == [[], [], []]


@pytest.mark.slow
def test_without_the_first_host_the_other_agent_ends_and_the_command_continues_elsewhere(
    tiny: Tiny, two: list[Host]
) -> None:
    job, module = Job(tiny, "first-lost"), "shardtune.launch.torchrun"
    here, there = job.torchrun(two, "1:2", "--max-restarts", "1", module=module, **{OWN_STORE: "1"})
    job.wait_for(lambda: job.saved() >= 2, here, there)
    two[0].lose_power()
    began = time.monotonic()
    assert job.end(there, 2 * LOST_AFTER + LOST_SECONDS + 45) == 1, job.said()
    print(f"the first host lost power: the other agent ended after {time.monotonic() - began:.1f} s")
    assert f"error: the first host is lost: no connection to {two[0].address}:29400" in job.said()
    assert two[1].processes() == []
    job.go.touch()
    (again,) = job.torchrun(two[1:], "1", module=module)
    assert job.end(again) == 0, job.said()
    assert "continuing after step" in job.said()
    job.check_whole()


def rank_processes(host: Host) -> list[int]:
    """Processes that train, agents of torchrun aside."""

    def is_rank(pid: int) -> bool:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return b"shardtune" in words and b"torch.distributed.run" not in words

    return [pid for pid in host.processes() if is_rank(pid)]


RAY = {
    "RAY_AUTH_MODE": "token",  # of this cluster alone
    "RAY_AUTH_TOKEN": uuid.uuid4().hex,
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.fixture
def ray_cluster(two: list[Host], tmp_path: Path) -> Iterator[list[Host]]:
    """A Ray cluster with one node on each host, of two cores each."""
    folder = tempfile.TemporaryDirectory(prefix="ray-")  # names of sockets have to be short
    common = ("--disable-usage-stats", "--object-store-memory=80000000", "--num-cpus=2", "--block")
    ray = (sys.executable, "-m", "ray.scripts.scripts", "start")
    for host in two:
        role = ("--head", "--port=6379", "--include-dashboard=false") if host is two[0] else (f"--address={HEAD}",)
        where = (f"--node-ip-address={host.address}", f"--temp-dir={folder.name}/{host.name}")
        log = tmp_path / f"ray-{host.name}.log"
        with log.open("w") as file:
            process = host.start((*ray, *role, *where, *common), RAY, stdout=file, stderr=subprocess.STDOUT)
        until = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, lines_of(process, log)
            assert time.monotonic() < until, lines_of(process, log)
            time.sleep(0.1)
    yield two
    for host in two:
        host.kill()
    folder.cleanup()


HEAD = "10.213.7.1:6379"


@pytest.mark.slow
def test_ray_goes_on_with_the_hosts_that_are_left(tiny: Tiny, ray_cluster: list[Host]) -> None:
    job = Job(
        tiny,
        "ray",
        runner__launcher="ray",
        runner__num_workers=2,
        runner__max_restarts=1,
        runner__min_workers=1,
        runner__ray={"address": HEAD, "placement": "strict_spread"},
    )
    here, there = ray_cluster
    driver = job.start(here, sys.executable, "-m", "shardtune", "train", str(job.recipe), **RAY)
    job.wait_for(lambda: job.saved() >= 2, driver)
    assert "1 on host-a (10.213.7.1), 1 on host-b (10.213.7.2)" in job.said()
    there.cut_off()
    began = time.monotonic()
    job.wait_for(lambda: "restart 1 of 1" in job.said(), driver, seconds=LOST_AFTER + 30)
    print(f"cut off: started again after {time.monotonic() - began:.1f} s")
    job.wait_for(lambda: len(rank_processes(there)) == 0, driver, seconds=LOST_AFTER + 15)  # nobody trains on alone
    job.go.touch()
    assert job.end(driver) == 0, job.said()
    job.check_whole()
    assert rank_processes(here) == []
