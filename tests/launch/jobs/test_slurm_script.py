"""The job script for Slurm, run by bash with stand-ins for Slurm's programs; `test_slurm.py` runs it under Slurm."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardtune.checkpoint.atomic import write_json
from shardtune.errors import ConfigError
from shardtune.launch.jobs import slurm_script
from shardtune.launch.jobs.commands import launch_commands
from shardtune.run.directory import MANIFEST, finish_run

RECIPE = {
    "actor": {"model": {"model_path": "model"}},
    "data": {"train_data_paths": "train.jsonl"},
    "runner": {"logger": {"log_path": "runs", "experiment_name": "mine"}},
}
PROGRAMS = {
    "srun": '[[ $CALLS ]] && echo "srun $*" >> "$CALLS"; eval "$SRUN"',
    "scancel": 'echo "scancel $*" >> "$CALLS"',
    "scontrol": 'case "$*" in "show job "*) echo "JobState=$STATE PreemptTime=$PREEMPT_TIME";; '
    '*) echo "scontrol $*" >> "$CALLS"; (($(grep -c "^scontrol requeue" "$CALLS") > ${REFUSED:-0}));; esac',
    "sleep": '[[ $1 = 30 ]] || exec /bin/sleep "$@"',
}
SAVE = "mkdir -p runs/mine/checkpoints; echo global_step_8 > runs/mine/checkpoints/latest; "
FINISH = """mkdir -p runs/mine; echo '{\n "finished": {\n  "step": 8\n }\n}' > runs/mine/manifest.json; """
WARN = "kill -USR1 $PPID; sleep 0.3; "
CANCEL = "kill -TERM $PPID; sleep 0.3; "


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    for name, text in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    return tmp_path


def script(*overrides: str, nodes: int = 2, **options: Any) -> str:
    return launch_commands("recipe.yaml", overrides, nodes, 1, ("slurm",), **options)


def run(here: Path, srun: str, *, text: str = "", **environment: str) -> tuple[int, str, str]:
    """Run a script with what `srun` does; returns exit code, error output and the calls of Slurm's programs."""
    (here / "calls").write_text("")
    slurm = {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "a", "SRUN": srun, "CALLS": str(here / "calls")}
    path = f"{here / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-s"],
        input=text or script(),
        env={**slurm, "PATH": path, **environment},
        text=True,
        capture_output=True,
    )
    return done.returncode, done.stderr, (here / "calls").read_text()


REQUEUE = "scontrol requeue 123\n"


@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_run_that_saved_before_its_time_is_up_is_requeued_whatever_torchrun_makes_of_it(
    here: Path, code: int
) -> None:
    _, _, calls = run(here, f"{WARN}{SAVE}exit {code}")
    assert "scancel --signal=TERM 123\n" in calls
    assert calls.endswith(REQUEUE)


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("before", "srun", "code", "requeued"),
    [
        ("", f"{WARN}exit 1", 1, False),  # nothing was saved: a requeue would repeat that
        (SAVE, f"{WARN}{SAVE}exit 1", 1, False),
        ("", "exit 3", 3, False),
        ("", f"{SAVE}exit 3", 3, False),  # an error, after a save
        ("", f"{WARN}{SAVE}{CANCEL}exit 1", 1, False),
        ("", f"{SAVE}{CANCEL}exit 1", 1, False),
        ("", f"{SAVE}{FINISH}exit 1", 0, False),  # a lost node leaves a failed task
        ("", f"{WARN}{SAVE}{FINISH}exit 0", 0, False),
        (FINISH, "exit 0", 0, False),
        (FINISH, "exit 2", 2, False),  # of an earlier job
        (FINISH, f"{WARN}{SAVE}exit 1", 0, True),  # the earlier job's, continued with more epochs
    ],
)
def test_how_a_job_ends(here: Path, before: str, srun: str, code: int, requeued: bool) -> None:
    subprocess.run(["bash", "-c", before], check=True)
    ended, errors, calls = run(here, srun)
    assert (ended, calls.endswith(REQUEUE)) == (code, requeued), errors
    assert ("not requeued: no new checkpoint in runs/mine" in errors) == (
        srun == f"{WARN}exit 1" or bool(before == SAVE)
    )


def test_the_script_reads_what_a_run_writes(here: Path) -> None:
    manifest = here / "runs/mine" / MANIFEST
    manifest.parent.mkdir(parents=True)
    write_json(manifest, {"packages": {}, "launch": "slurm-123"})
    assert run(here, "exit 1")[0] == 1
    begun = manifest.read_text()
    finish_run(manifest.parent, {"step": 8, "metrics": {"eval/loss": 1.0}})
    finished = manifest.rename(here / "finished")
    manifest.write_text(begun)
    assert run(here, f"cp {finished} {manifest}; exit 1")[0] == 0


def test_a_preempted_job_is_requeued(here: Path) -> None:
    _, _, calls = run(here, "exit 1", PREEMPT_TIME="2026-01-01T00:00:00")
    assert calls.endswith(REQUEUE)
    assert REQUEUE not in run(here, "exit 1", PREEMPT_TIME="None")[2]


def test_a_requeued_job_continues_its_own_run_and_cores_are_passed_on(here: Path) -> None:
    told = 'echo "$SHARDTUNE_LAUNCH_ID $SHARDTUNE_RESTARTS $OMP_NUM_THREADS" >> "$CALLS"'
    text = launch_commands("recipe.yaml", [], 2, 64, ("slurm",))
    _, _, calls = run(here, told, text=text)
    assert calls.endswith("\nslurm-123 0 1\n")  # at least one thread for each of 64 ranks
    assert "--cpus-per-task" not in calls
    _, _, calls = run(here, told, text=text, SLURM_RESTART_COUNT="2", SLURM_CPUS_PER_TASK="16")
    assert calls.endswith("\nslurm-123 2 1\n")
    assert "srun --cpus-per-task=16 " in calls


def test_a_node_to_spare_keeps_the_job(here: Path) -> None:
    spare = script(nodes=3, fewest=2, restarts=1)
    assert "#SBATCH --no-kill\n" in spare
    assert "#SBATCH --nodes=3\n" in spare  # with 2-3 Slurm begins with two
    assert "\nsrun --no-kill " in spare
    assert "--no-kill" not in script(nodes=3)
    python = here / "bin/python"  # python -m shardtune.launch.torchrun
    python.write_text("#!/bin/bash\nexit 3\n")
    python.chmod(0o755)
    on_node = 'while [[ $1 != bash ]]; do shift; done; "$@"'
    with socket.create_server(("127.0.0.1", 0)) as script_node:
        port = str(script_node.getsockname()[1])
        environment = {"SLURM_SRUN_COMM_HOST": "127.0.0.1", "SLURM_SRUN_COMM_PORT": port}
        code, _, calls = run(here, on_node, text=spare, STATE="RUNNING", **environment)
        assert (code, REQUEUE in calls) == (3, False)
    for state, requeued in (("RUNNING", True), ("CANCELLED", False)):
        code, _, calls = run(here, on_node, text=spare, STATE=state, **environment)
        assert (code, REQUEUE in calls) == (3, requeued), "nothing else ends a job whose first node is gone"
    _, _, calls = run(here, on_node, text=spare, STATE="RUNNING", REFUSED="2", **environment)
    assert calls.count(REQUEUE) == 3, "the controller may be out of reach for a while"


def test_each_task_of_an_array_has_its_own_run(here: Path) -> None:
    text = script("runner.seed=$SLURM_ARRAY_TASK_ID", nodes=1, array="0-3%2")
    assert "#SBATCH --array=0-3%2\n" in text
    assert "#SBATCH --output=%x-%A_%a.log\n" in text
    save = SAVE.replace("mine", "mine-3")
    task = {"SLURM_ARRAY_JOB_ID": "123", "SLURM_ARRAY_TASK_ID": "3"}
    _, _, calls = run(here, f"{WARN}{save}exit 1", text=text, **task)
    assert "runner.seed=3 runner.logger.experiment_name=mine-3\n" in calls
    assert "scancel --signal=TERM 123_3\n" in calls, "123 is one task's job, and all tasks"
    assert calls.endswith("scontrol requeue 123_3\n")
    named = script("runner.logger.experiment_name=a b-$SLURM_ARRAY_TASK_ID", nodes=1, array="1,5")
    _, _, calls = run(here, "", text=named, SLURM_ARRAY_JOB_ID="123", SLURM_ARRAY_TASK_ID="5")
    assert "recipe.yaml runner.logger.experiment_name=a b-5\n" in calls
    assert "RUN='runs/a b-'\"$SLURM_ARRAY_TASK_ID\"" in named
    for array, launchers in (("all", ("slurm",)), ("1,3-0", ("slurm",)), ("0-3", ("torchrun", "slurm"))):
        with pytest.raises(ConfigError, match="--array"):
            launch_commands("recipe.yaml", [], 1, 1, launchers, array=array)


@pytest.mark.parametrize(
    ("device", "listed", "wanted"),
    [("cpu", "gpu:8", False), ("cuda", "(null)", True), ("auto", "gpu:8", True), ("auto", "(null)", False),
     ("auto", None, True)],
)  # fmt: skip
def test_gpus_are_requested_only_where_there_are_any(
    here: Path, monkeypatch: pytest.MonkeyPatch, device: str, listed: str | None, wanted: bool
) -> None:
    """Without Slurm on this machine they are: sbatch refuses the option where no node has a GPU."""
    if listed is not None:
        (here / "bin/sinfo").write_text(f"#!/bin/sh\necho '{listed}'\n")
        (here / "bin/sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here / 'bin'}:/usr/bin:/bin" if listed else str(here / "bin"))
    assert ("#SBATCH --gpus-per-node=1\n" in script(f"runner.device={device}")) == wanted


def test_the_script_has_the_lines_of_a_cluster(here: Path) -> None:
    text = script()
    assert text.startswith("#!/bin/bash\n")
    for line in ("--requeue", "--open-mode=append", f"--signal=B:USR1@{slurm_script.WARNING_SECONDS}", "--nodes=2"):
        assert f"#SBATCH {line}\n" in text
    for line in ("--time=", "--account=", "--partition=", "--cpus-per-task="):
        assert f"\n##SBATCH {line}" in text
    options, _, commands = text.partition("\nHEAD=")
    assert "#SBATCH" not in commands, "sbatch reads no option after the first command"
    assert all(line.startswith("#") or not line for line in options.splitlines())
