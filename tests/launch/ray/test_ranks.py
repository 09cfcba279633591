"""`runner.launcher: ray`: the same numbers, every line with its rank, the first real error, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import yaml

import shardtune
from shardtune.errors import Interrupted, ParallelError, ShardtuneError
from shardtune.launch.local import RankFailed
from shardtune.launch.ray import cluster as ray_cluster
from shardtune.launch.signals import NOT_REPORTED
from tests.support.tiny_run import Tiny, lines, make_tiny

pytest.importorskip("ray", reason="Ray is not installed")

PLUGIN = """
import os, time
from pathlib import Path
from shardtune.training.worker.base import FSDPSftWorker

original, how, mark = FSDPSftWorker.run_training, {how!r}, Path({mark!r})

def run_training(self):
    if self.ranks.rank == 1 and self.step == 3 and how == "kill, then error" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)
    if self.ranks.rank == 1 and self.step == 5 and "error" in how:
        raise RuntimeError("on purpose")
    if how == "slow":
        time.sleep(0.3)
    return original(self)

if "RANK" in os.environ:  # not in the launcher, which imports it too
    FSDPSftWorker.run_training = run_training
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster for all runs of this process, which each of them would else start: Ray takes seconds for that."""
    import ray

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    environment = dict(os.environ)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
    for number, handler in before.items():
        signal.signal(number, handler)
    yield
    ray.shutdown()
    os.environ.clear()
    os.environ.update(environment)


def recipe(tiny: Tiny, name: str, how: str = "", **changes: Any) -> dict[str, Any]:
    """Two workers of Ray; one of them fails as `how` names it."""
    plugin = tiny.folder / f"{name}.py"
    plugin.write_text(PLUGIN.format(how=how, mark=str(tiny.folder / f"{name}.mark")))
    keys = {"runner__launcher": "ray", "runner__num_workers": 2, "runner__save_interval": 2, **changes}
    return tiny.recipe(name, plugins=[str(plugin)], **keys)


def started(tiny: Tiny, name: str, how: str = "", **changes: Any) -> subprocess.Popen[str]:
    """The real command, with a cluster of its own."""
    file = tiny.folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(recipe(tiny, name, how, **changes)))
    return subprocess.Popen(
        [sys.executable, "-m", "shardtune", "train", str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_step(tiny: Tiny, name: str, step: int, process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait until that step is logged; returns all processes of the run, Ray's among them."""
    file, until = tiny.run(name) / "metrics.jsonl", time.monotonic() + 120
    while not file.exists() or len(file.read_text().splitlines()) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    return psutil.Process(process.pid).children(recursive=True)


def left_of(processes: list[psutil.Process], seconds: float = 15.0) -> list[str]:
    """Those of the processes that still live after some seconds; ports end with them."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    left = []
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                left.append(" ".join(process.cmdline())[:200])
    return left


@pytest.mark.slow
def test_the_command_gives_the_numbers_of_local_ranks_and_ends_all_it_started(tiny: Tiny) -> None:
    process = started(tiny, "alone")
    processes = wait_for_step(tiny, "alone", 1, process)
    assert any("raylet" in child.name() for child in processes)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    said = (out + err).splitlines()
    assert any(line.startswith("Ray: 2 workers, 2 on ") for line in said)
    assert any(line.startswith("[rank 0] step 8/8") for line in said)
    assert left_of(processes) == []
    shardtune.train(tiny.recipe("local", runner__nproc_per_node=2, runner__save_interval=2))
    assert lines(tiny.run("alone")) == lines(tiny.run("local"))
    assert json.loads((tiny.run("alone") / "manifest.json").read_text())["world_size"] == 2


@pytest.mark.lengthy
def test_sigterm_saves(tiny: Tiny) -> None:
    """After steps with the numbers of local ranks, and nothing is left running."""
    process = started(tiny, "stopped", "slow", runner__save_interval=-1)
    processes = wait_for_step(tiny, "stopped", 2, process)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err + out
    assert "Traceback" not in err
    assert left_of(processes) == []
    said = (out + err).splitlines()
    assert any(line.startswith("Ray: 2 workers, 2 on ") for line in said)
    assert any(line.startswith("[rank 0] step ") for line in said)
    steps = lines(tiny.run("stopped"))
    assert (tiny.run("stopped") / "checkpoints/latest").read_text() == f"global_step_{len(steps)}\n"
    shardtune.train(tiny.recipe("here", runner__nproc_per_node=2, runner__save_interval=-1))
    assert steps == lines(tiny.run("here"))[: len(steps)]
    assert json.loads((tiny.run("stopped") / "manifest.json").read_text())["world_size"] == 2


@pytest.mark.slow
@pytest.mark.own_start
def test_kill_9_leaves_no_rank(tiny: Tiny) -> None:
    process = started(tiny, "ended", "slow", runner__save_interval=-1)
    processes = wait_for_step(tiny, "ended", 1, process)
    ranks = [child for child in processes if "shardtune" in child.cmdline() and child.parent() != process]
    process.kill()
    process.communicate()
    assert len(ranks) == 2
    assert left_of(ranks, 10) == []
    # Ray's own agents look only now and then, up to a minute and a half, whether their node is still there.


@pytest.mark.slow
def test_the_first_real_error_is_shown(tiny: Tiny, cluster: None) -> None:
    """`test_nodes.py` has the restart after a loss."""
    with pytest.raises((RankFailed, ShardtuneError)) as failed:
        shardtune.train(recipe(tiny, "erring", "error"))
    the_error_is_shown(failed.value)


def the_error_is_shown(error: Exception) -> None:
    assert "on purpose" in str(error)
    assert "rank 1" in str(error)
    assert "rank 0" not in str(error), "what followed from the error is not the error"


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_an_error_is_not(
    tiny: Tiny, cluster: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((RankFailed, ShardtuneError)) as failed:
        shardtune.train(recipe(tiny, "failing", "kill, then error", runner__max_restarts=1))
    out, err = capfd.readouterr()
    assert "rank 1 was ended by SIGKILL" in out + err
    assert "restart 1 of 1, from the last checkpoint, on 2 workers" in out + err
    assert "continuing after step 2" in out + err
    assert [line["step"] for line in lines(tiny.run("failing"))][:4] == [1, 2, 3, 4]
    the_error_is_shown(failed.value)


@pytest.mark.slow
def test_no_room_is_told_with_what_there_is(tiny: Tiny, cluster: None) -> None:
    keys = {"runner__num_workers": 3, "runner__ray": {"wait_seconds": 1}}
    with pytest.raises(ParallelError, match=r"no room for 3 workers(?s:.*)CPU 2(?s:.*)room for 2"):
        shardtune.train(recipe(tiny, "crowded", **keys))
    assert not tiny.run("crowded").exists()
    keys["runner__ray"] |= {"resources": {"tpu": 1}}
    with pytest.raises(ParallelError, match=r"there is 1 host \([0-9.]+: CPU 2 tpu 0\)"):
        shardtune.train(recipe(tiny, "crowded", **keys))


@pytest.mark.own_start
def test_a_rank_ends_with_the_process_of_ray_that_started_its_actor(tmp_path: Path) -> None:
    """Without that the launcher, which starts the ranks again, cannot end it."""
    code = (
        "import subprocess, sys, time\n"
        "from shardtune.launch.ray.actor import RankHolder\n"
        "holder = RankHolder(60.0)\n"
        "holder._process = subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(holder._process.pid) + '\\n')\n"
        "time.sleep(60)\n"
    )
    parent = (
        "import subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-c', {code!r}]); time.sleep(60)"
    )  # fmt: skip
    raylet = subprocess.Popen([sys.executable, "-c", parent])
    file, until = tmp_path / "pid", time.monotonic() + 60
    while not (file.exists() and file.read_text().endswith("\n")):
        assert time.monotonic() < until
        time.sleep(0.05)
    rank = psutil.Process(int(file.read_text()))
    time.sleep(0.5)
    assert rank.is_running()
    raylet.kill()
    raylet.wait()
    until = time.monotonic() + 20
    while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the rank lives on"
        time.sleep(0.05)


@pytest.mark.slow
def test_evaluation_runs_on_ray_too(tiny: Tiny, cluster: None, capfd: pytest.CaptureFixture[str]) -> None:
    made = tiny.recipe("judged", runner__max_steps=1, data__eval_data_paths=str(tiny.folder / "eval.jsonl"))
    run = shardtune.train(made)
    here = run.evaluate()
    capfd.readouterr()
    from shardtune.run.evaluation import evaluate

    evaluate(run.dir, "runner.launcher=ray", "runner.num_workers=1")
    told = capfd.readouterr().out
    there = json.loads(told[told.index("{") :])
    assert there["eval/loss"] == pytest.approx(here["eval/loss"], rel=1e-5)


def test_an_evaluation_that_is_stopped_has_trained_nothing(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardtune.launch.ray import ranks
    from shardtune.run.evaluation import evaluate

    monkeypatch.setattr(ranks, "connected", lambda runner: nullcontext())
    monkeypatch.setattr(ranks, "run_ranks_on_ray", lambda *given, **known: os.kill(os.getpid(), signal.SIGTERM))
    file = tiny.folder / "stopped.yaml"
    file.write_text(yaml.safe_dump(recipe(tiny, "stopped", data__eval_data_paths=str(tiny.folder / "eval.jsonl"))))
    with pytest.raises(Interrupted, match=NOT_REPORTED):
        evaluate(file)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_cluster_of_this_machine_has_a_second_chance_to_start_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    import ray

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    begun: list[dict[str, Any]] = []

    def init(**arguments: Any) -> None:
        begun.append(arguments)
        if len(begun) <= failures:
            raise Exception("The current node timed out during startup. This could happen because …")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    if failures == 1:
        assert ray_cluster.connect(None, cores=2, where="here")
    else:
        with pytest.raises(ParallelError, match="alone could be started: The current node timed out") as error:
            ray_cluster.connect(None, cores=2, where="here")
        assert "ray status" not in str(error.value)  # it is for a cluster that runs already
        assert f"read its logs in {tmp_path}" in str(error.value)
    assert [call["address"] for call in begun] == ["local", "local"]
    assert begun[0]["num_cpus"] == 2


def test_without_ray_the_extra_is_named(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ParallelError, match=r"Ray is not installed(?s:.*)pip install 'shardtune\[ray\]'"):
        shardtune.train(recipe(tiny, "without"))


def test_ray_is_imported_only_when_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, shardtune, shardtune.run.api, shardtune.cli.commands; print('ray' in sys.modules)")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_objects_in_memory_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ShardtuneError, match=r"objects in memory(?s:.*)runner.launcher = ray"):
        shardtune.train(recipe(tiny, "objects"), train_data=[{"prompt": "a", "completion": "b"}])


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:10001", "somewhere"])
def test_a_cluster_that_is_not_there(tiny: Tiny, address: str) -> None:
    import ray

    ray.shutdown()
    began = time.monotonic()
    with pytest.raises(ParallelError, match=rf"the Ray cluster cannot be used(?s:.*)runner.ray.address = {address}"):
        shardtune.train(recipe(tiny, "nowhere", runner__ray={"address": address}))
    assert time.monotonic() - began < 10


def test_where_a_cluster_answers_but_takes_nobody_the_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def refuse(**known: object) -> NoReturn:
        raise ConnectionError("Failed to connect to Ray cluster")

    ray.shutdown()
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with pytest.raises(ParallelError, match="where the head has a token, set RAY_AUTH_MODE=token"):
            shardtune.init("ray", address=address)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        with pytest.raises(ParallelError, match=r"begins one$"):
            shardtune.init("ray", address=address)


@pytest.mark.parametrize("source", ["RAY_ADDRESS=", "the cluster of the last ray start, "])
def test_a_dead_cluster_is_named_where_ray_looks_for_the_address(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Ray itself tries to reach it for minutes, without a message; an engine's cluster is checked alike."""
    import ray

    ray.shutdown()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if source == "RAY_ADDRESS=":
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    else:
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray/ray_current_cluster").write_text("127.0.0.1:1\n")
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        monkeypatch.setattr(psutil, "process_iter", lambda attributes: [])  # another cluster of this machine is found
    began = time.monotonic()
    with pytest.raises(ParallelError, match=rf"{source}127.0.0.1:1 does not answer"):
        shardtune.train(recipe(tiny, "nowhere", runner__ray={"address": "auto"}))
    with pytest.raises(ParallelError, match=r"127.0.0.1:1 does not answer(?s:.*)shardtune.init"):
        shardtune.init("ray", address="127.0.0.1:1")
    assert time.monotonic() - began < 10
