"""Files for containers: their structure; `bench/container_files.py` validates them with the published schemas."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from shardtune.config import load_recipe
from shardtune.launch.jobs.commands import launch_commands
from shardtune.launch.jobs.container_files import MARK, RAY_VERSION, STUCK_SECONDS, VOLUME, liveness_check
from shardtune.launch.torchrun import TORCHRUN
from tests.support.doc_blocks import ROOT

RECIPE = {
    "actor": {"model": {"model_path": "model"}},
    "data": {"train_data_paths": "train.jsonl"},
    "runner": {"logger": {"experiment_name": "My run_2", "logger_backends": ["jsonl", "prometheus"]}},
}
GPU = "nvidia.com/gpu"


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A file as it is printed in the recipe's directory."""
    (tmp_path / "my recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    monkeypatch.chdir(tmp_path)

    def show(kind: str, *overrides: str, nodes: int = 2, restarts: int = 0) -> str:
        return launch_commands("my recipe.yaml", overrides, nodes, 4, [kind], restarts=restarts)

    return show


def containers(pod: dict[str, Any]) -> dict[str, Any]:
    """The one container of a pod, after a look at what all pods have."""
    (container,) = pod["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"shared": VOLUME, "shm": "/dev/shm"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes.keys() == mounted.keys()
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert "claimName" in volumes["shared"]["persistentVolumeClaim"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["workingDir"] == VOLUME
    assert pod["terminationGracePeriodSeconds"] > 600, "longer than torchrun waits for a save"
    return container


def torchrun(script: str) -> Any:
    """The options of the torchrun command in a script, and what it starts."""
    subprocess.run(["bash", "-n", "-c", script], check=True)
    joined = script.replace("\\\n", " ").replace(shlex.join(TORCHRUN), "torchrun")
    line = next(line for line in joined.splitlines() if re.match(r"(exec )?torchrun ", line))
    taken = get_args_parser().parse_args(shlex.split(line.removeprefix("exec "))[1:])
    assert taken.training_script_args[:2] == ["train", "my recipe.yaml"]
    return taken


@pytest.mark.lengthy
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_jobset_meets_under_the_name_of_its_first_pod(show: Callable[..., str], device: str, nodes: int) -> None:
    found = yaml.safe_load(show("jobset", f"runner.device={device}", nodes=nodes))
    assert (found["apiVersion"], found["kind"], found["metadata"]["name"]) == (
        *("jobset.x-k8s.io/v1alpha2", "JobSet", "my-run-2"),
    )
    spec = found["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (nodes, nodes, "Indexed")
    assert spec["network"]["enableDNSHostnames"] is True
    # A preempted pod: the Job fails for this reason, and the JobSet starts again without counting it.
    # So with exit code 75, stopped after saving; a mistake in the input (2) is recognised by the Job's message.
    preempted, codes = job["podFailurePolicy"]["rules"]
    assert preempted == {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    named = {"containerName": job["template"]["spec"]["containers"][0]["name"], "operator": "In", "values": [2, 75]}
    assert codes == {"action": "FailJob", "onExitCodes": named}
    rules = spec["failurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
    assert all(rule["onJobFailureReasons"] == ["PodFailurePolicy"] for rule in rules)
    (pattern,) = rules[0]["onJobFailureMessagePatterns"]
    message = "Container ranks for pod a/b failed with exit code {} matching FailJob rule at index 1"
    assert re.search(pattern, message.format(2))
    assert not re.search(pattern, message.format(75))
    assert spec["failurePolicy"]["maxRestarts"] > 0
    assert job["backoffLimit"] == 0
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    container = containers(pod)
    assert container["resources"]["limits"].get(GPU) == (None if device == "cpu" else "4")
    assert container["command"][:2] == ["bash", "-c"]
    taken = torchrun(container["command"][2])
    assert taken.nproc_per_node == "4"
    if nodes == 1:
        assert taken.standalone
    else:
        assert taken.nnodes == "3"
        host, port = taken.rdzv_endpoint.split(":")
        name, _, service = host.partition(".")
        assert (name, service) == (f"my-run-2-{replicated['name']}-0-0", "my-run-2")
        assert container["ports"] == [{"containerPort": int(port)}]
    assert re.search(r"^exec python -m shardtune.launch.torchrun ", container["command"][2], re.MULTILINE), (
        "bash would keep SIGTERM for itself"
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rayjob_has_its_ranks_on_workers_and_begins_again(show: Callable[..., str], device: str) -> None:
    found = yaml.safe_load(show("kuberay", f"runner.device={device}", restarts=2))
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayJob")
    spec = found["spec"]
    assert (spec["backoffLimit"], spec["shutdownAfterJobFinishes"]) == (2, True)
    shell, option, script = shlex.split(spec["entrypoint"])
    assert (shell, option) == ("bash", "-c")
    given = shlex.split(script.partition("exec ")[2])
    assert given[:3] == ["shardtune", "train", "my recipe.yaml"]
    runner = load_recipe(given[2], given[3:], files_must_exist=False).runner
    assert (runner.launcher, runner.workers, runner.ray.address, runner.max_restarts) == ("ray", 8, "auto", 2)
    cluster = spec["rayClusterSpec"]
    assert cluster["rayVersion"] == RAY_VERSION
    assert f"\nray=={RAY_VERSION}\n" in (ROOT / "constraints.txt").read_text()
    head = cluster["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0"}
    assert GPU not in containers(head["template"]["spec"])["resources"]["limits"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 2
    worker = containers(workers["template"]["spec"])
    assert worker["resources"]["limits"].get(GPU) == (None if device == "cpu" else "4")
    assert "livenessProbe" in worker


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_skypilots_task(show: Callable[..., str], device: str) -> None:
    found = yaml.safe_load(show("skypilot", f"runner.device={device}"))
    assert (found["name"], found["num_nodes"]) == ("my-run-2", 2)
    assert found["resources"].get("accelerators") == (None if device == "cpu" else "H100:4")
    assert found["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert VOLUME in found["volumes"]
    assert all(isinstance(value, str) for value in found["envs"].values())
    taken = torchrun(found["run"])
    assert (taken.nnodes, taken.nproc_per_node, taken.rdzv_endpoint) == ("2", "4", "$HEAD:29400")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_image_has_the_pinned_versions(show: Callable[..., str], device: str) -> None:
    joined = show("docker", f"runner.device={device}").replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    assert lines[0].startswith("FROM python:3.")
    installs = [line for line in lines if "pip install" in line]
    assert installs[-1].endswith("-c constraints.txt '.[ray,prometheus]'")
    assert any("download.pytorch.org/whl/cpu" in line for line in installs) == (device == "cpu")
    assert ("NVIDIA_VISIBLE_DEVICES" in joined) == ("--gpus all" in joined) == (device == "cuda")
    for line in lines:
        if line.startswith("COPY "):
            assert all((ROOT / name).exists() for name in line.split()[1:-1])


@pytest.mark.parametrize("kind", ["docker", "kuberay", "jobset", "skypilot"])
def test_paths_are_those_on_the_volume(show: Callable[..., str], tmp_path: Path, kind: str) -> None:
    """The working directory is the volume; what lies elsewhere is named, as a container does not see it."""
    shown = show(kind)
    assert launch_commands(str(tmp_path / "my recipe.yaml"), (), 2, 4, [kind]) == shown
    assert "outside of the working directory" not in shown
    assert "outside of the working directory" not in show(kind, f"runner.logger.log_path={VOLUME}/runs")
    (tmp_path.parent / "elsewhere.yaml").write_text((tmp_path / "my recipe.yaml").read_text())
    shown = launch_commands("../elsewhere.yaml", (), 2, 4, [kind])
    assert "# FILL IN: the recipe ../elsewhere.yaml is outside of the working directory" in shown
    assert "# FILL IN: the run directory /elsewhere/My run_2 is" in show(kind, "runner.logger.log_path=/elsewhere")


def test_the_probe_fails_for_a_run_of_this_start_that_has_stopped_moving(
    tmp_path: Path, show: Callable[..., str]
) -> None:
    script = liveness_check(str(tmp_path)).replace(MARK, str(tmp_path / "started"))
    started, alive = tmp_path / "started", tmp_path / "alive"

    def healthy() -> bool:
        return subprocess.run(["bash", "-c", script], stderr=subprocess.DEVNULL).returncode == 0

    now = started.touch() or started.stat().st_mtime
    assert healthy(), "no step yet"
    alive.touch()
    os.utime(started, (now - 9 * STUCK_SECONDS, now - 9 * STUCK_SECONDS))
    assert healthy()
    os.utime(alive, (now - STUCK_SECONDS - 60, now - STUCK_SECONDS - 60))
    assert not healthy()
    os.utime(started, (now - 60, now - 60))
    assert healthy(), "the file is of an earlier start"
    printed = yaml.safe_load(show("jobset"))["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    probe = containers(printed)["livenessProbe"]["exec"]["command"]
    assert probe[2].strip() == liveness_check(f"{VOLUME}/runs/My run_2")
    assert containers(printed)["lifecycle"]["postStart"]["exec"]["command"] == ["touch", MARK]
