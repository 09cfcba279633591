"""`shardtune launch`: starts a recipe on this machine or as a job of Slurm, or prints how to start it elsewhere."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from shardtune.cli.arguments import RecipeArgument
from shardtune.cli.train import run_here
from shardtune.cli.words import split_words
from shardtune.errors import ConfigError, ShardtuneError


def launch(
    recipe: RecipeArgument = None,
    show: Annotated[bool, typer.Option("--print", help="Print the commands; nothing is run.")] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts.")] = 1,
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks on each host; by default the recipe's number.")
    ] = None,
    min_nodes: Annotated[
        int | None, typer.Option(min=1, help="The fewest hosts to continue with after a loss; by default all.")
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often to restart after a loss.")] = 0,
    by: Annotated[
        str | None,
        typer.Option(
            help="torchrun | slurm | ray | docker | kuberay | jobset | skypilot | all; by default, to start: Slurm "
            "where a cluster answers, otherwise this machine; to print: the commands of torchrun and Ray."
        ),
    ] = None,
    array: Annotated[
        str | None,
        typer.Option(help="Slurm: numbers of a job array, one run each; overrides may use $SLURM_ARRAY_TASK_ID."),
    ] = None,
) -> None:
    """Start a recipe on this machine or as a job of Slurm, or print how to start it on several hosts.

    With --print nothing is started: it prints the commands for torchrun and Ray, or with --by a job script of Slurm
    or a file for containers.

    **Examples**

    ```text
    shardtune launch recipe.yaml --nproc-per-node 8
    shardtune launch recipe.yaml --nodes 4 --nproc-per-node 8 --by slurm
    shardtune launch recipe.yaml --print --nodes 4 --nproc-per-node 8
    shardtune launch recipe.yaml --print --nodes 2 --nproc-per-node 8 --by slurm > job.sh
    shardtune launch recipe.yaml --print --by slurm --array 0-3 'runner.seed=$SLURM_ARRAY_TASK_ID' > job.sh
    shardtune launch recipe.yaml --print --nodes 2 --nproc-per-node 8 --by jobset > jobset.yaml
    ```
    """
    from shardtune.launch.jobs.commands import COMMANDS, LAUNCHERS, launch_commands

    path, overrides = split_words(recipe)
    _refuse_two_numbers(overrides, nodes, nproc_per_node, max_restarts)
    if by is not None and by not in (*LAUNCHERS, "all"):
        raise ConfigError(f"{by} is not a known launcher", where="--by", remedy=f"{', '.join(LAUNCHERS)} or all")
    if not show:
        request = Request(path, overrides, by, nodes, nproc_per_node, min_nodes, max_restarts, array)
        start(request, run_here, lambda line: typer.echo(line, err=True))
        return
    if path is None:
        raise ConfigError(
            "there is no recipe to launch", where="shardtune launch", remedy="shardtune launch recipe.yaml --print"
        )
    launchers = COMMANDS if by is None else LAUNCHERS if by == "all" else (by,)
    again = {"fewest": min_nodes, "restarts": max_restarts}
    typer.echo(launch_commands(path, overrides, nodes, nproc_per_node, launchers, **again, array=array))


def _refuse_two_numbers(overrides: Sequence[str], nodes: int, per_node: int | None, restarts: int) -> None:
    """Refuse an option and an override that give one number as two.

    Args:
        overrides: `key=value`.
        nodes: hosts.
        per_node: ranks on each; None: not given.
        restarts: how often to restart after a loss; 0: not given.
    """
    from shardtune.config.overrides import written_value

    options: list[tuple[str, int, str, int]] = []
    if per_node is not None:
        options.append(("--nproc-per-node", per_node, "runner.nproc_per_node", per_node))
        options.append(("--nproc-per-node", per_node, "runner.num_ranks", nodes * per_node))
    if restarts:
        options.append(("--max-restarts", restarts, "runner.max_restarts", restarts))
    for option, number, key, meant in options:
        written = written_value(overrides, key)
        if written not in (None, str(meant)):
            raise ConfigError(
                f"{option} {number} and {key}={written} contradict each other",
                where="shardtune launch",
                remedy=f"leave one of them out: {option} sets {key}",
            )


@dataclass(frozen=True, slots=True)
class Request:
    """What a user wants to be started.

    Attributes:
        recipe: the file; None: the overrides name a model and rows.
        overrides: `key=value` on top of it.
        by: the launcher; None: the one that is found.
        nodes: hosts.
        per_node: ranks on each; None: as in the recipe.
        fewest: hosts needed to continue after a loss; None: all.
        restarts: how often to restart after a loss.
        array: numbers of a job array of Slurm.
    """

    recipe: str | None
    overrides: Sequence[str]
    by: str | None
    nodes: int
    per_node: int | None
    fewest: int | None
    restarts: int
    array: str | None


def start(request: Request, train: Callable[..., None], report: Callable[[str], None]) -> None:
    """Start a recipe and wait for its end, or submit it as a job.

    Args:
        request: what to start.
        train: runs `shardtune train` with a recipe and overrides.
        report: receives one line of text for the user.

    Raises:
        ConfigError: it cannot be started from here.
    """
    by = request.by or ("slurm" if _submits(request) else "local")
    if by == "slurm":
        report(_submit(request))
        return
    words = shlex.join([request.recipe or "recipe.yaml", *request.overrides])
    remote = request.nodes > 1 or by not in ("local", "torchrun", "ray")
    if remote or request.array is not None:
        what = f"{request.nodes} hosts need a command on each" if request.nodes > 1 else f"{by} needs files of its own"
        raise ConfigError(
            "an array of jobs is for Slurm" if request.array is not None else f"{what}, and no Slurm answers here",
            where="shardtune launch",
            remedy=f"shardtune launch {words} --nodes {request.nodes} --print"
            + (f" --by {by}" if by != "local" else "")
            + " shows how to start it",
        )
    from shardtune.config.overrides import with_keys

    launcher, ranks = _of_recipe(request)
    if launcher == "ray" and by == "torchrun":
        raise ConfigError(
            f"{request.recipe or 'the command'} has runner.launcher: ray, by which its ranks are started",
            where="--by torchrun",
            remedy=f"--by ray, or shardtune launch {words} --print --by torchrun shows the command of torchrun",
        )
    overrides = with_keys(request.overrides, _keys(request, launcher if by == "local" else by, ranks))
    report(f"here, by: shardtune train {shlex.join([*filter(None, [request.recipe]), *overrides])}")
    train(request.recipe, *overrides)


def _submits(request: Request) -> bool:
    """Whether a job is submitted: Slurm is here, and this is no job of it, in which the ranks can be started."""
    return (request.nodes > 1 or "SLURM_JOB_ID" not in os.environ) and _has_slurm()


def _has_slurm() -> bool:
    """Whether a cluster answers: the programs alone may be installed without one."""
    if shutil.which("sbatch") is None:
        return False
    from shardtune.launch.jobs.slurm_script import SINFO_SECONDS

    try:
        return subprocess.run(["sinfo", "--noheader"], capture_output=True, timeout=SINFO_SECONDS).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def _of_recipe(request: Request) -> tuple[str, int | None]:
    """The launcher and the number of ranks of the recipe; those of no recipe where training will refuse it."""
    from shardtune.config import load_recipe

    try:
        runner = load_recipe(request.recipe, request.overrides, files_must_exist=False).runner
    except ShardtuneError:  # or it is right with the keys of the launcher alone
        return "local", None
    return runner.launcher, runner.workers


def _keys(request: Request, by: str, ranks: int | None) -> list[str]:
    """The overrides for ranks on this machine.

    Args:
        request: what to start.
        by: local, torchrun or ray.
        ranks: their number in the recipe, if that is known.
    """
    if request.fewest is not None and request.fewest > 1:
        raise ConfigError(
            f"--min-nodes {request.fewest}: the ranks are started on this machine alone, which is one host",
            where="shardtune launch",
            remedy="leave it out; or --print --by torchrun | slurm | ray prints the commands for several hosts",
        )
    count = request.per_node
    keys = [f"runner.max_restarts={request.restarts}"] if request.restarts else []
    if by == "ray":
        number = count or ranks
        keys += ["runner.launcher=ray", "runner.nproc_per_node=1"]  # the recipe's number has no effect on Ray
        return keys if number is None else [*keys, f"runner.num_ranks={number}"]
    return keys if count is None else [*keys, f"runner.nproc_per_node={count}"]


def _submit(request: Request) -> str:
    """Submit the job script that `--print --by slurm` shows; returns what sbatch prints."""
    from shardtune.config import load_recipe
    from shardtune.launch.jobs.commands import launch_commands

    if request.recipe is None:
        raise ConfigError(
            "a job needs a recipe", where="shardtune launch", remedy="write the overrides into a YAML file, and name it"
        )
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "sbatch is not found here, so no job of Slurm can be submitted",
            where="--by slurm",
            remedy=f"shardtune launch {request.recipe} --print --by slurm > job.sh, and sbatch job.sh on the cluster",
        )
    if request.array is None:
        # A mistake shows here, not when the job has waited.
        loaded = load_recipe(request.recipe, request.overrides, files_must_exist=False)
        ranks = request.nodes * (request.per_node or loaded.runner.workers)
        load_recipe(request.recipe, [*request.overrides, f"runner.nproc_per_node={ranks}"])
    again = {"fewest": request.fewest, "restarts": request.restarts, "array": request.array}
    shape = (request.nodes, request.per_node, ("slurm",))
    script = launch_commands(request.recipe, request.overrides, *shape, **again)
    done = subprocess.run(["sbatch"], input=script, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(
            f"sbatch refuses the job: {done.stderr.strip() or done.stdout.strip()}",
            where="sbatch",
            remedy=f"shardtune launch {request.recipe} --print --by slurm > job.sh; change its options; sbatch job.sh",
        )
    return done.stdout.strip()
