"""The commands and files that start a recipe on several hosts, as text to copy."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardtune.config import Recipe, load_recipe
from shardtune.config.rank_layout import Layout
from shardtune.errors import ConfigError
from shardtune.launch.container_files import Job, dockerfile, job_set, ray_job, sky_task
from shardtune.launch.rank_logs import LOGS

PORT = 29400
"""The rendezvous port unless runner.master_port sets one: torchrun's default."""
CONTAINER_FILES = {"docker": dockerfile, "kuberay": ray_job, "jobset": job_set, "skypilot": sky_task}
LAUNCHERS = ("torchrun", "slurm", "ray", *CONTAINER_FILES)


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

    Raises:
        ConfigError: the recipe cannot be used, or has no layout for this number of ranks.
    """
    loaded = load_recipe(recipe, overrides, files_must_exist=False)
    hosts = Hosts(nodes, per_node or _per_node(loaded, nodes), fewest or nodes, restarts)
    _check_fewest(hosts)
    layout = Layout.of(loaded.actor, hosts.ranks)
    command = ["train", recipe, *overrides]
    shown = {"torchrun": _torchrun, "slurm": _slurm, "ray": _ray}
    files = {name: partial(_container_file, write) for name, write in CONTAINER_FILES.items()}
    parts = [{**shown, **files}[name](loaded, hosts, command) for name in launchers]
    several = hosts.nodes > 1
    head = [
        f"# {hosts.ranks} ranks: {hosts.nodes} host{'s' if several else ''} x {hosts.per_node}; layout: {layout}",
        *(["# every host needs the same environment, recipe and data, and the run directory on a disk they share"]
          if several else []),
    ]  # fmt: skip
    if tuple(launchers) == ("slurm",):  # to be redirected into a file, whose first line has to be the script's
        return "\n".join([*parts, *head])
    return "\n\n".join(["\n".join(head), *parts])


def _per_node(recipe: Recipe, nodes: int) -> int:
    workers = recipe.runner.workers
    if recipe.runner.launcher == "ray" and workers % nodes:
        raise ConfigError(
            f"runner.num_workers ({workers}) cannot be divided among {nodes} hosts",
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
        words = ["torchrun", "--standalone", *_shape(hosts)[1:]]
        return (
            f"# torchrun\n{_environment(hosts)}{shlex.join(words)} \\\n  {_logs(recipe)} \\\n"
            f"  -m shardtune {shlex.join(command)}"
        )
    return (
        "# torchrun: the same on every host, HEAD being the first one's name or address\n"
        f"HEAD=first-host\n{_environment(hosts)}{shlex.join(['torchrun', *_shape(hosts)])} \\\n"
        f'  {_meeting(recipe)} \\\n  {_logs(recipe)} \\\n  -m shardtune {shlex.join(command)}'
    )  # fmt: skip


def _shape(hosts: Hosts) -> list[str]:
    """The options for the number of ranks and of restarts."""
    nodes = str(hosts.nodes) if hosts.fewest == hosts.nodes else f"{hosts.fewest}:{hosts.nodes}"
    again = [f"--max-restarts={hosts.restarts}"] if hosts.restarts else []
    return [f"--nnodes={nodes}", f"--nproc-per-node={hosts.per_node}", *again]


def _meeting(recipe: Recipe) -> str:
    name = shlex.quote(str(recipe.runner.logger.experiment_name))
    port = recipe.runner.master_port or PORT
    return f'--rdzv-backend=c10d --rdzv-endpoint="$HEAD:{port}" --rdzv-id={name}'


def _logs(recipe: Recipe) -> str:
    """Options by which torchrun keeps the output of each rank and passes it on."""
    logger = recipe.runner.logger
    folder = Path(logger.log_path) / str(logger.experiment_name) / LOGS
    return f"--log-dir={shlex.quote(os.path.relpath(folder))} --tee=3"


def _environment(hosts: Hosts) -> str:
    """The environment variables to set before the command, as text to copy."""
    lines = ["export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600   # seconds to save in after SIGTERM; 30 otherwise"]
    lines += [f"export OMP_NUM_THREADS=$(( $(nproc) / {hosts.per_node} ))"]
    if hosts.nodes > 1 and hosts.restarts:
        lines.append("export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # ranks that start again meet anew")
    if hosts.nodes > 1:
        lines.append("# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0   # if hosts have several networks")
    return "".join(f"{line}\n" for line in lines)


def _slurm(recipe: Recipe, hosts: Hosts, command: list[str]) -> str:
    name = shlex.quote(str(recipe.runner.logger.experiment_name))
    gpus = [] if recipe.runner.device == "cpu" else [f"#SBATCH --gpus-per-node={hosts.per_node}"]
    lines = [
        "#!/bin/bash",
        "# Slurm: save as job.sh (the line above is its first), then: sbatch job.sh",
        "# TERM comes two minutes before the time is up: the run saves, and the same job goes on from there.",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={hosts.nodes}",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        *gpus,
        "#SBATCH --signal=TERM@120",
        'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        _environment(hosts).rstrip(),
        f"srun {shlex.join(['torchrun', *_shape(hosts)])} \\",
        f"  {_meeting(recipe)} \\",
        f"  -m shardtune {shlex.join(command)}",
    ]
    return "\n".join(lines)


def _container_file(write: Callable[[Job], str], recipe: Recipe, hosts: Hosts, command: list[str]) -> str:
    keys = [*_ray_keys(recipe, hosts), "runner.ray.address=auto", "runner.ray.wait_seconds=600"]
    shape = _shape(hosts)[1:] if hosts.nodes == 1 else _shape(hosts)
    port = recipe.runner.master_port or PORT
    return write(Job(recipe, command, keys, hosts.nodes, hosts.per_node, shape, hosts.restarts, port))


def _ray(recipe: Recipe, hosts: Hosts, command: list[str]) -> str:
    keys = _ray_keys(recipe, hosts)
    if hosts.nodes == 1:
        words = shlex.join([*command, *keys])
        return f"# Ray: a cluster of this machine alone, started and ended with the run\nshardtune {words}"
    keys.append("runner.ray.address=auto")
    return "\n".join([
        "# Ray, on the first host:",
        "ray start --head --port=6379   # where Ray requires a token, give every host the same RAY_AUTH_TOKEN_PATH",
        "# on every other host:",
        "ray start --address=first-host:6379",
        "# then on the first host; ray stop on each host ends the cluster",
        f"shardtune {shlex.join([*command, *keys])}",
    ])  # fmt: skip


def _ray_keys(recipe: Recipe, hosts: Hosts) -> list[str]:
    return [
        "runner.launcher=ray",
        f"runner.num_workers={hosts.ranks}",
        *(["runner.nproc_per_node=1"] if recipe.runner.nproc_per_node != 1 else []),
        *([f"runner.max_restarts={hosts.restarts}"] if hosts.restarts else []),
        *([f"runner.min_workers={hosts.fewest * hosts.per_node}"] if hosts.fewest < hosts.nodes else []),
    ]
