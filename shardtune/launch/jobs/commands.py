"""The commands and files that start a recipe on several hosts, as text to copy."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardtune.config import Recipe, load_recipe
from shardtune.config.overrides import with_keys
from shardtune.config.paths import ALL_KEYS
from shardtune.config.rank_layout import Layout
from shardtune.config.typed_paths import TYPED
from shardtune.errors import ConfigError
from shardtune.launch.jobs.container_files import VOLUME, Job, dockerfile, job_set, ray_job, sky_task
from shardtune.launch.jobs.slurm_script import (
    JOB_ID,
    JOB_PORT,
    SlurmJob,
    check_array,
    first_task,
    slurm_script,
    task_overrides,
)
from shardtune.launch.rank_logs import LOGS
from shardtune.launch.torchrun import JOIN_SECONDS, PORT, TORCHRUN

STOP_SECONDS = 600
"""How long ranks may take to save after a stop signal."""
CONTAINER_FILES = {"docker": dockerfile, "kuberay": ray_job, "jobset": job_set, "skypilot": sky_task}
LAUNCHERS = ("torchrun", "slurm", "ray", *CONTAINER_FILES)
COMMANDS = ("torchrun", "ray")
"""Those that are a few lines to type; the others are files."""
OTHERS = tuple(name for name in LAUNCHERS if name not in COMMANDS)


@dataclass(frozen=True, slots=True)
class Hosts:
    """How ranks are spread.

    Attributes:
        nodes: hosts.
        per_node: ranks on each.
        fewest: hosts needed to continue.
        restarts: how often ranks are restarted after a host was lost.
    """

    nodes: int
    per_node: int
    fewest: int
    restarts: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


def launch_commands(
    recipe: str,
    overrides: Sequence[str],
    nodes: int,
    per_node: int | None,
    launchers: Sequence[str] = LAUNCHERS,
    *,
    fewest: int | None = None,
    restarts: int = 0,
    array: str | None = None,
) -> str:
    """The commands for each host; nothing is run.

    Args:
        recipe: the file.
        overrides: `key=value` on top of it.
        nodes: hosts.
        per_node: ranks on each; None: as in the recipe.
        launchers: the ones to show, of `LAUNCHERS`.
        fewest: hosts needed to continue after one was lost; None: all of them.
        restarts: how often the ranks are restarted.
        array: the numbers of the tasks of a job array of Slurm; `$SLURM_ARRAY_TASK_ID` in overrides is the task's.

    Raises:
        ConfigError: the recipe cannot be used, or has no layout for this number of ranks.
    """
    if array is None:
        loaded = load_recipe(recipe, overrides, files_must_exist=False)
    else:
        loaded, overrides = _of_tasks(recipe, overrides, array, launchers)
    hosts = Hosts(nodes, per_node or _per_node(loaded, nodes), fewest or nodes, restarts)
    _check_fewest(hosts)
    layout = Layout.of(loaded.actor, hosts.ranks)
    command = ["train", recipe, *overrides]
    shown = {"torchrun": _torchrun, "slurm": partial(_slurm, array=array), "ray": _ray}
    files = {name: partial(_container_file, write) for name, write in CONTAINER_FILES.items()}
    parts = [{**shown, **files}[name](loaded, hosts, command) for name in launchers]
    several, ranks = hosts.nodes > 1, f"{hosts.ranks} rank{'s' if hosts.ranks > 1 else ''}"
    head = [
        f"# {ranks}: {hosts.nodes} host{'s' if several else ''} x {hosts.per_node}; layout: {layout}",
        *(["# every host needs the same environment, recipe and data, and the run directory on a disk they share"]
          if several else []),
        *(_outside(loaded, recipe) if set(launchers) & set(CONTAINER_FILES) else []),
    ]  # fmt: skip
    if tuple(launchers) == COMMANDS:
        parts.append(f"# --by {' | '.join(OTHERS)} prints a file for that system; --by all prints everything")
    if tuple(launchers) == ("slurm",):  # to be redirected into a file, whose first line has to be the script's
        return "\n".join([*parts, *head])
    return "\n\n".join(["\n".join(head), *parts])


def _of_tasks(
    recipe: str, overrides: Sequence[str], array: str, launchers: Sequence[str]
) -> tuple[Recipe, Sequence[str]]:
    """The recipe of a job array without the tasks' names of runs, and the overrides of each task."""
    if tuple(launchers) != ("slurm",):
        raise ConfigError("only Slurm has job arrays", where="--array", remedy="add --by slurm")
    check_array(array)
    loaded = load_recipe(recipe, first_task(overrides, array), files_must_exist=False)
    of_task = task_overrides(overrides, str(loaded.runner.logger.experiment_name))
    load_recipe(recipe, first_task(of_task, array), files_must_exist=False)
    return loaded, of_task


def _per_node(recipe: Recipe, nodes: int) -> int:
    workers = recipe.runner.workers
    if recipe.runner.launcher == "ray" and workers % nodes:
        raise ConfigError(
            f"runner.num_ranks ({workers}) cannot be divided among {nodes} hosts",
            where="--nodes",
            remedy="give --nproc-per-node",
        )
    return workers // nodes if recipe.runner.launcher == "ray" else workers


def _check_fewest(hosts: Hosts) -> None:
    if hosts.fewest > hosts.nodes or (hosts.fewest < hosts.nodes and not hosts.restarts):
        raise ConfigError(
            f"--min-nodes {hosts.fewest} of --nodes {hosts.nodes}, with --max-restarts {hosts.restarts}",
            where="shardtune launch",
            remedy="give fewer hosts to go on with than to begin with, and --max-restarts of 1 or more",
        )


def _torchrun(recipe: Recipe, hosts: Hosts, command: list[str]) -> str:
    if hosts.nodes == 1:
        words = [*TORCHRUN, "--standalone", *_shape(hosts)[1:]]
        return (
            f"# torchrun\n{_environment(hosts)}{shlex.join(words)} \\\n  {_logs(recipe)} \\\n"
            f"  -m shardtune {shlex.join(command)}"
        )
    return (
        "# torchrun: the same on every host, HEAD being the first one's name or address\n"
        f"HEAD=first-host\n{_environment(hosts)}{shlex.join([*TORCHRUN, *_shape(hosts)])} \\\n"
        f'  {_meeting(recipe)} \\\n  {_logs(recipe)} \\\n  -m shardtune {shlex.join(command)}'
    )  # fmt: skip


def _shape(hosts: Hosts) -> list[str]:
    """The options for the number of ranks and of restarts."""
    nodes = str(hosts.nodes) if hosts.fewest == hosts.nodes else f"{hosts.fewest}:{hosts.nodes}"
    again = [f"--max-restarts={hosts.restarts}"] if hosts.restarts else []
    return [f"--nnodes={nodes}", f"--nproc-per-node={hosts.per_node}", *again]


def _meeting(recipe: Recipe, name: str | None = None, port: int | str = PORT) -> str:
    name = name or shlex.quote(str(recipe.runner.logger.experiment_name))
    port = recipe.runner.master_port or port
    waits = f"--rdzv-conf=join_timeout={JOIN_SECONDS},read_timeout={JOIN_SECONDS}"
    return f'--rdzv-backend=c10d --rdzv-endpoint="$HEAD:{port}" --rdzv-id={name} {waits}'


def _logs(recipe: Recipe) -> str:
    """Options by which torchrun keeps the output of each rank and passes it on."""
    logger = recipe.runner.logger
    folder = Path(logger.log_path) / str(logger.experiment_name) / LOGS
    return f"--log-dir={shlex.quote(os.path.relpath(folder))} --tee=3"


def _environment(hosts: Hosts) -> str:
    """The environment variables to set before the command, as text to copy."""
    n = hosts.per_node
    cores = f"$(( $(nproc) > {n} ? $(nproc) / {n} : 1 ))" if n > 1 else "$(nproc)"
    lines = [f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={STOP_SECONDS}   # seconds to save in after SIGTERM; 30 otherwise"]
    lines += [f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{cores}}}"']
    if hosts.nodes > 1 and hosts.restarts:
        lines.append("export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # ranks that start again meet anew")
    if hosts.nodes > 1:
        lines.append("# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0   # if hosts have several networks")
    return "".join(f"{line}\n" for line in lines)


def _slurm(recipe: Recipe, hosts: Hosts, command: list[str], array: str | None) -> str:
    job = SlurmJob(hosts.nodes, hosts.per_node, hosts.fewest, array)
    if hosts.nodes == 1:
        torchrun = [shlex.join([*TORCHRUN, "--standalone", *_shape(hosts)[1:]])]
    else:
        torchrun = [shlex.join([*TORCHRUN, *_shape(hosts)]), _meeting(recipe, JOB_ID, JOB_PORT)]
    return slurm_script(recipe, job, environment=_environment(hosts).splitlines(), torchrun=torchrun, command=command)


def _on_volume(path: str | Path) -> Path | None:
    """A path as seen from the working directory, which is the volume in a container; None outside of it."""
    path, here = Path(os.path.abspath(path)), Path.cwd()
    return next((one.relative_to(here) for one in (path, path.resolve()) if one.is_relative_to(here)), None)


def _outside(recipe: Recipe, file: str) -> list[str]:
    """Remarks on files that a container does not see."""
    logger = recipe.runner.logger
    named = {"the recipe": Path(file), "the run directory": Path(logger.log_path) / str(logger.experiment_name)}
    return [
        f"# FILL IN: {what} {path} is outside of the working directory, which is the volume in a container ({VOLUME})"
        for what, path in named.items()
        if _on_volume(path) is None and not path.is_relative_to(VOLUME)
    ]


def _container_file(write: Callable[[Job], str], recipe: Recipe, hosts: Hosts, command: list[str]) -> str:
    train, file, *overrides = command
    command = [train, str(_on_volume(file) or file), *overrides]
    keys = [*_ray_keys(recipe, hosts), "runner.ray.address=auto", "runner.ray.wait_seconds=600"]
    shape = _shape(hosts)[1:] if hosts.nodes == 1 else _shape(hosts)
    port = recipe.runner.master_port or PORT
    return write(Job(recipe, command, keys, hosts.nodes, hosts.per_node, shape, hosts.restarts, port))


def _ray(recipe: Recipe, hosts: Hosts, command: list[str]) -> str:
    keys = _ray_keys(recipe, hosts)
    if hosts.nodes == 1:
        words = shlex.join(with_keys(command, keys))
        return f"# Ray: a cluster of this machine alone, started and ended with the run\nshardtune {words}"
    keys.append("runner.ray.address=auto")
    train, recipe_file, *overrides = command
    log_path = f"runner.logger.log_path={recipe.runner.logger.log_path}"
    job = ["shardtune", train, str(Path(recipe_file).absolute()), *with_keys(overrides, [*keys, log_path])]
    if any(str(recipe.where(key)).startswith(TYPED) for key in ALL_KEYS):  # typed paths start at the working directory
        job = ["env", "-C", str(Path.cwd()), *job]
    return "\n".join([
        "# Ray, on the first host. The token keeps others out; every host needs a copy of ~/.ray/auth_token.",
        "export RAY_AUTH_MODE=token",
        "ray get-auth-token --generate > /dev/null",
        f"export RAY_JOB_STOP_WAIT_TIME_S={STOP_SECONDS}   # seconds to save in after ray job stop; 3 otherwise",
        "ray start --head --port=6379",
        "# on every other host:",
        "export RAY_AUTH_MODE=token",
        "ray start --address=first-host:6379",
        "# then on the first host; ray stop on each host ends the cluster",
        f"shardtune {shlex.join(with_keys(command, keys))}",
        "# or as a job, on the first host too; paths are absolute, because a job has a directory of its own",
        f"ray job submit --address=http://127.0.0.1:8265 -- {shlex.join(job)}",
    ])  # fmt: skip


def _ray_keys(recipe: Recipe, hosts: Hosts) -> list[str]:
    return [
        "runner.launcher=ray",
        f"runner.num_ranks={hosts.ranks}",
        *(["runner.nproc_per_node=1"] if recipe.runner.nproc_per_node != 1 else []),
        *([f"runner.max_restarts={hosts.restarts}"] if hosts.restarts else []),
        *([f"runner.min_ranks={hosts.fewest * hosts.per_node}"] if hosts.fewest < hosts.nodes else []),
    ]
