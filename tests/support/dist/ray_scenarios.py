"""What happens to runs on a Ray cluster of hosts in network namespaces; lines for the table of `bench/clusters.py`."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardtune.launch.jobs.commands import launch_commands
from tests.support.dist.hosts import Host, hosts, lines_of, why_not
from tests.support.dist.slurm_scenarios import LOST_AFTER, SLOW, STEPS, Outcome
from tests.support.tiny_run import Tiny, assert_same_tensors, lines

STOP_SECONDS = 60
"""How long `ray job stop` waits before it kills (RAY_JOB_STOP_WAIT_TIME_S; Ray's default is 3)."""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
    "PYTHONDONTWRITEBYTECODE": "",
}


def why_no_ray() -> str | None:
    """Why this machine cannot take jobs of Ray; None where it can."""
    if any(importlib.util.find_spec(name) is None for name in ("ray", "aiohttp_cors", "opencensus")):
        return "ray[default] is not installed"
    return why_not()


class RayCluster:
    """A cluster of some hosts, used as the printed commands use it.

    Attributes:
        hosts: the head first.
    """

    def __init__(self, made: Sequence[Host], folder: Path) -> None:
        self.hosts = list(made)
        self._folder = folder
        self._environment = {
            **ENVIRONMENT,
            "HOME": str(folder),  # of the token
            "PYTHONPATH": ":".join(path for path in sys.path if path),
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        }

    def begin(self) -> None:
        """Create the token and start Ray on each host."""
        self.run("get-auth-token", "--generate")
        common = ("--disable-usage-stats", "--object-store-memory=80000000", "--num-cpus=2", "--block")
        for host in self.hosts:
            head = ("--head", "--port=6379")
            role = head if host is self.hosts[0] else (f"--address={self.hosts[0].address}:6379",)
            where = (f"--node-ip-address={host.address}", f"--temp-dir={self._folder}/{host.name}")
            log = self._folder / f"{host.name}.log"
            with log.open("w") as file:
                command = ("ray", "start", *role, *where, *common)
                process = host.start(command, self._environment, stdout=file, stderr=subprocess.STDOUT)
            until = time.monotonic() + 90
            while "Ray runtime started" not in log.read_text():
                assert process.poll() is None, lines_of(process, log)
                assert time.monotonic() < until, lines_of(process, log)
                time.sleep(0.2)

    def run(self, *words: str, fails: bool = False) -> str:
        """What a command of `ray` writes, typed on the head."""
        command = ("ray", *words)
        process = self.hosts[0].start(command, self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = process.communicate(timeout=240)
        assert fails or process.returncode == 0, f"{' '.join(command)} ended with {process.returncode}: {said}"
        return said

    def version(self) -> str:
        return self.run("--version").strip().replace(", version", "")

    def restore(self) -> None:
        """Connect the hosts that were cut off: for the next scenario."""
        for host in self.hosts:
            host.plug_in()

    def train(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """`shardtune train` on the head."""
        given = {**self._environment, "RAY_ADDRESS": f"{self.hosts[0].address}:6379", **environment}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return self.hosts[0].start(("shardtune", "train", *words), given, **output)

    @property
    def jobs(self) -> str:
        return "--address=http://127.0.0.1:8265"

    def status(self, job: str) -> str:
        said = self.run("job", "status", self.jobs, job, fails=True)
        found = re.search(r"\b(pending|running|succeeded|failed|stopped)\b", said, re.IGNORECASE)
        assert found, said
        return found[1].upper()


@contextmanager
def ray_cluster(number: int) -> Iterator[RayCluster]:
    """A Ray cluster with one node of two cores on each host, for a while."""
    with hosts(number) as made, tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        cluster = RayCluster(made, Path(folder))
        cluster.begin()
        yield cluster
        for host in made:
            host.kill()


def _recipe(tiny: Tiny, name: str, seconds: float, **changes: Any) -> tuple[Path, Path]:
    """A recipe whose steps are slow until a file exists; returns recipe and file."""
    folder = tiny.folder / name
    folder.mkdir()
    go, plugin, recipe = folder / "go", folder / "slow.py", folder / "recipe.yaml"
    plugin.write_text(SLOW.format(go=str(go), seconds=seconds, hang=False))
    ray = {"address": "auto", "placement": "strict_spread"}
    keys = {"runner__launcher": "ray", "runner__num_ranks": 2, "runner__ray": ray, **changes}
    keys = {"runner__save_interval": 2, "runner__device": "cpu", **keys}
    recipe.write_text(yaml.safe_dump(tiny.recipe(name, plugins=[str(plugin)], **keys)))
    return recipe, go


def job_submit(cluster: RayCluster, tiny: Tiny) -> Outcome:
    """`ray job submit` on two hosts with a token; `ray job stop` saves, and the next job continues."""
    recipe, go = _recipe(tiny, "submitted", 3.0)
    printed = launch_commands(str(recipe), [], 2, 1, ("ray",))
    _, *job = shlex.split(next(line for line in printed.splitlines() if line.startswith("ray job submit")))
    options, run = job[: job.index("--")], job[job.index("--") :]
    submit = (*options, "--no-wait", "--submission-id")
    cluster.run(*submit, "first", *run)
    latest = tiny.run("submitted") / "checkpoints/latest"
    _wait(lambda: latest.exists(), cluster, "first")
    began = time.monotonic()
    cluster.run("job", "stop", cluster.jobs, "first", fails=True)
    _wait(lambda: cluster.status("first") in ("STOPPED", "FAILED", "SUCCEEDED"), cluster, "first")
    stopped = time.monotonic() - began
    saved = int(latest.read_text().rpartition("_")[2])
    logged = lines(tiny.run("submitted"))
    assert saved == logged[-1]["step"] < STEPS, cluster.run("job", "logs", cluster.jobs, "first")
    go.touch()
    began = time.monotonic()
    cluster.run(*submit, "second", *run)
    _wait(lambda: cluster.status("second") in ("STOPPED", "FAILED", "SUCCEEDED"), cluster, "second")
    ended = time.monotonic() - began
    said = cluster.run("job", "logs", cluster.jobs, "second")
    assert cluster.status("second") == "SUCCEEDED", said
    assert f"continuing after step {saved}" in said
    whole = tiny.run("whole")
    assert lines(tiny.run("submitted")) == lines(whole)
    last = f"checkpoints/global_step_{STEPS}"
    assert_same_tensors(tiny.run("submitted") / last, whole / last)
    return Outcome(
        f"Ray: `ray job submit` with a token, 2 hosts; `ray job stop` (`RAY_JOB_STOP_WAIT_TIME_S={STOP_SECONDS}`)",
        f"saved and stopped after {stopped:.0f} s; the next job took {ended:.0f} s",
        "SUCCEEDED; bitwise the run that was not stopped",
    )


def _wait(condition: Any, cluster: RayCluster, job: str, seconds: float = 240) -> None:
    until = time.monotonic() + seconds
    while not condition():
        said = cluster.run("job", "logs", cluster.jobs, job, fails=True) if time.monotonic() > until else ""
        assert time.monotonic() < until, said
        time.sleep(0.5)


def dead_address(cluster: RayCluster, tiny: Tiny) -> Outcome:
    """`address: auto` with a RAY_ADDRESS at which nothing listens."""
    recipe, _ = _recipe(tiny, "nowhere", 0.0)
    began = time.monotonic()
    process = cluster.train(str(recipe), RAY_ADDRESS=f"{cluster.hosts[0].address}:1")
    said, _ = process.communicate(timeout=240)
    seconds = time.monotonic() - began
    assert process.returncode == 2, said
    assert f"RAY_ADDRESS={cluster.hosts[0].address}:1 does not answer" in said
    return Outcome("Ray: `address: auto`, nothing listens at RAY_ADDRESS", f"a message after {seconds:.0f} s", "code 2")


def host_lost(cluster: RayCluster, tiny: Tiny) -> Outcome:
    """The cable of one of two hosts is pulled; the other continues alone."""
    recipe, go = _recipe(tiny, "lost", 1.0, runner__lost_after=LOST_AFTER)
    process = cluster.train(str(recipe), "runner.max_restarts=1", "runner.min_ranks=1")
    latest = tiny.run("lost") / "checkpoints/latest"
    _wait(lambda: latest.exists() or process.poll() is not None, cluster, "none")
    cluster.hosts[1].cut_off()
    began, said = time.monotonic(), ""
    assert process.stdout is not None
    while "restart 1 of 1" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    again = time.monotonic() - began
    go.touch()
    rest, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said + rest
    here, there = lines(tiny.run("lost")), lines(tiny.run("whole"))
    assert [line["step"] for line in here] == list(range(1, STEPS + 1))
    losses = [line["train/loss"] for line in there]
    assert [line["train/loss"] for line in here] == pytest.approx(losses, rel=1e-5)
    return Outcome(
        f"Ray: a host of 2 is cut off, `min_ranks: 1` (`lost_after` {LOST_AFTER} s)",
        f"the other starts again after {again:.0f} s",
        "code 0; the numbers of two ranks",
    )


SCENARIOS = (job_submit, dead_address, host_lost)
