"""The job script for Slurm: the run saves before the time is up, is requeued, and continues.

The exit code of `srun` does not state how a run ended: a node that was lost on the way leaves a failed task behind,
though the others have finished. The run directory states it: `manifest.json` contains "finished" once
all is written, and `checkpoints/latest` changes with every complete checkpoint.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtune.config import Recipe
from shardtune.config.overrides import with_keys
from shardtune.errors import ConfigError

TASK = "$SLURM_ARRAY_TASK_ID"
"""The number of a task of an array, in overrides."""
NAME_KEY = "runner.logger.experiment_name"
WARNING_SECONDS = 120
JOB_ID = '"$SLURM_JOB_ID"'
ARRAY_JOB = """\
# The number of one task's job is that of the whole array too, which would be signalled and requeued with it.
export JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"""
JOB_PORT = "$((29400 + SLURM_JOB_ID % 3000))"
"""Jobs on one node have different rendezvous ports, below those that systems give to outgoing connections."""
SINFO_SECONDS = 5.0
SCRIPT = """\
#!/bin/bash
# Slurm: save as job.sh (the line above is its first), then: sbatch job.sh
# Before the time is up the run saves, the same job is requeued, and the run continues. Where the cluster requires one
# of the options with ##, remove a #; options after sbatch have precedence: sbatch --time=8:00:00 job.sh
{options}

# The environment of every node, unless sbatch is called in it:
# module load cuda && source .venv/bin/activate
{environment}
RUN={run_dir}   # the run directory that the recipe names
{job}
# A requeued job continues its own run, whatever runner.overwrite and runner.resume_dir are.
export SHARDTUNE_LAUNCH_ID=slurm-$SLURM_JOB_ID SHARDTUNE_RESTARTS=${{SLURM_RESTART_COUNT:-0}}

finished() {{ grep -s -A 99 '"finished"' "$RUN/manifest.json"; }}
saved() {{ cat "$RUN/checkpoints/latest" 2> /dev/null; }}
preempted() {{ scontrol show job "$JOB" | grep -q 'PreemptTime=[0-9]'; }}
finished_before=$(finished) saved_before=$(saved) warned='' cancelled=''
trap 'warned=yes; scancel --signal=TERM "$JOB"' USR1   # the time is nearly up: the ranks save and end
trap 'cancelled=yes' TERM   # by scancel, which ends the ranks too
{node}
srun {srun} \\
  {torchrun} \\
  -m shardtune {command} &
until wait $!; code=$?; ! kill -0 $! 2> /dev/null; do :; done   # a signal ends wait before srun has ended

# The exit code of srun does not show how the run ended, where a node was lost; its directory does.
if [[ $(finished) && $(finished) != "$finished_before" ]]; then exit 0; fi
if [[ ! $cancelled ]]; then
  if preempted || [[ $warned && $(saved) != "$saved_before" ]]; then exec scontrol requeue "$JOB"; fi
  if [[ $warned ]]; then echo "not requeued: no new checkpoint in $RUN; more --time, or an earlier --signal" >&2; fi
fi
exit $code"""
NODE = """
# With --no-kill Slurm keeps the job without the node of this script, where nothing ends it: another node requeues it.
NODE='trap : TERM; "$@"; code=$?
  alive() { timeout 10 bash -c "< /dev/tcp/$SLURM_SRUN_COMM_HOST/$SLURM_SRUN_COMM_PORT"; }
  state() { scontrol show job "$JOB" | grep -o "JobState=[A-Z]*"; }
  if ((code)) && ! alive; then   # again while the controller does not answer
    while s=$(state); [[ ${s:-JobState=RUNNING} = JobState=RUNNING ]] && ! scontrol requeue "$JOB"; do
      sleep 30
    done
  fi
  exit $code'
"""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """What differs between job scripts.

    Attributes:
        nodes: hosts.
        per_node: ranks on each.
        fewest: hosts needed to continue after one was lost.
        array: the numbers of the tasks of a job array, as `sbatch --array` takes them; None: one job.
    """

    nodes: int
    per_node: int
    fewest: int
    array: str | None = None

    @property
    def spare(self) -> bool:
        """Whether the job continues after a node was lost."""
        return self.fewest < self.nodes


def check_array(array: str) -> None:
    """Refuse what is not numbers of tasks, as `sbatch --array` takes them.

    Raises:
        ConfigError: it is not.
    """
    right = re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", array)
    if right is None or any(int(low) > int(high) for low, high in re.findall(r"(\d+)-(\d+)", array)):
        raise ConfigError(
            f"{array} names no tasks", where="--array", remedy="numbers as for sbatch: 0-7, 1,3,5 or 0-7%2"
        )


def task_overrides(overrides: Sequence[str], name: str) -> list[str]:
    """Overrides of the tasks of an array, each with a run directory of its own.

    Args:
        overrides: of the command; may contain `$SLURM_ARRAY_TASK_ID`.
        name: the recipe's `runner.logger.experiment_name`.
    """
    named = any(word.startswith(f"{NAME_KEY}=") and TASK in word for word in overrides)
    return [*overrides] if named else with_keys(overrides, [f"{NAME_KEY}={name}-{TASK}"])


def first_task(words: Sequence[str], array: str) -> list[str]:
    """The words with the number of the first task."""
    first = re.match(r"\d+", array)
    assert first is not None
    return [word.replace(TASK, first[0]) for word in words]


def slurm_script(
    recipe: Recipe, job: SlurmJob, *, environment: Sequence[str], torchrun: Sequence[str], command: Sequence[str]
) -> str:
    """The text of a job script.

    Args:
        recipe: of the run.
        job: what differs between scripts.
        environment: lines that set variables.
        torchrun: lines of the command before `-m shardtune`.
        command: the words after `-m shardtune`.
    """
    logger = recipe.runner.logger
    log_path = Path(_override(command, "runner.logger.log_path") or logger.log_path)
    if log_path.is_relative_to(Path.cwd()):  # as in the recipe: the job's directory is that of sbatch
        log_path = log_path.relative_to(Path.cwd())
    name = _override(command, NAME_KEY) or str(logger.experiment_name)
    return SCRIPT.format(
        options="\n".join(_options(recipe, job)),
        environment="\n".join([*_head(job), *environment]),
        run_dir=_quoted(str(log_path / name)),
        job=ARRAY_JOB if job.array else "export JOB=$SLURM_JOB_ID",
        srun=" ".join(_srun(job)),
        node=NODE if job.spare else "",
        torchrun=" \\\n  ".join(['bash -c "$NODE" node', *torchrun] if job.spare else torchrun),
        command=" ".join(_quoted(word) for word in command),
    )


def _override(command: Sequence[str], key: str) -> str | None:
    """The value that the command gives a key, which may contain the number of a task."""
    values = [word.partition("=")[2] for word in command if word.startswith(f"{key}=") and TASK in word]
    return values[-1] if values else None


def _options(recipe: Recipe, job: SlurmJob) -> list[str]:
    name = str(recipe.runner.logger.experiment_name)
    used = [
        f"--job-name={shlex.quote(name)}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        *_gpus(recipe, job),
        f"--signal=B:USR1@{WARNING_SECONDS}",
        "--requeue",
        "--open-mode=append",
        f"--output=%x-{'%A_%a' if job.array else '%j'}.log",
        *([f"--array={job.array}"] if job.array else []),
        *(["--no-kill"] if job.spare else []),
    ]
    further = ["--time=1-00:00:00", "--account=ACCOUNT", "--partition=PARTITION", "--cpus-per-task=CORES"]
    return [*(f"#SBATCH {option}" for option in used), *(f"##SBATCH {option}" for option in further)]


def _gpus(recipe: Recipe, job: SlurmJob) -> list[str]:
    """The option for GPUs; with `runner.device: auto` none where Slurm lists nodes, and none of them has a GPU."""
    device = recipe.runner.device
    if device == "cpu" or (device == "auto" and _no_gpus()):
        return []
    return [f"--gpus-per-node={job.per_node}"]


def _no_gpus() -> bool:
    """Whether the Slurm of this machine lists nodes of which none has a GPU."""
    try:
        listed = subprocess.run(
            ["sinfo", "--noheader", "--format=%G"], capture_output=True, text=True, timeout=SINFO_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return bool(listed.stdout.strip()) and "gpu" not in listed.stdout


def _srun(job: SlurmJob) -> list[str]:
    # srun does not take this option over from sbatch.
    words = ['${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}', "--kill-on-bad-exit=0"]
    return ["--no-kill", *words] if job.spare else words


def _head(job: SlurmJob) -> list[str]:
    return ['HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'] if job.nodes > 1 else []


def _quoted(word: str) -> str:
    """A word as text for the shell, in which the number of the task is replaced."""
    return f'"{TASK}"'.join(shlex.quote(part) if part else "" for part in word.split(TASK)) or "''"
