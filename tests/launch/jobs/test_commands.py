"""`shardtune launch --print`: commands that can be copied, for the recipe at hand."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from shardtune.errors import ConfigError, ParallelError
from shardtune.launch.jobs.commands import launch_commands
from shardtune.launch.torchrun import TORCHRUN
from shardtune.run.preflight import OWN_STORE
from tests.support.workspace import run_cli

RECIPE = {
    "actor": {"model": {"model_path": "model"}, "parallel": {"tensor": 4}},
    "data": {"train_data_paths": "train.jsonl"},
}


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    file = tmp_path / "my recipe.yaml"
    file.write_text(yaml.safe_dump(RECIPE))
    return str(file)


def words(text: str, program: str) -> list[str]:
    """A command of the text, its continued lines joined, variables left as they are."""
    joined = text.replace("\\\n", " ").replace(shlex.join(TORCHRUN), "torchrun")
    found = (re.match(rf"(?:srun +(?:[-$]\S+ +)*)?({program} .*?)(?: &)?$", line) for line in joined.splitlines())
    return shlex.split(next(line for line in found if line)[1])


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_torchrun_takes_what_is_printed(recipe: str, launcher: str) -> None:
    text = launch_commands(recipe, ["actor.optim.lr=1e-4"], 3, 8, [launcher])
    taken: argparse.Namespace = get_args_parser().parse_args(words(text, "torchrun")[1:])
    assert (taken.nnodes, taken.nproc_per_node, taken.rdzv_backend) == ("3", "8", "c10d")
    assert "join_timeout=300" in taken.rdzv_conf
    assert taken.training_script == "shardtune"
    assert taken.training_script_args == ["train", recipe, "actor.optim.lr=1e-4"]
    if launcher == "torchrun":
        assert (taken.log_dir, taken.tee) == ("runs/my recipe/logs", "3")
    assert "24 ranks: 3 hosts x 8; layout: shard 6 x tensor 4" in text


def test_restarts_become_torchruns(recipe: str) -> None:
    text = launch_commands(recipe, ["runner.nproc_per_node=8"], 4, None, fewest=2, restarts=2)
    taken = get_args_parser().parse_args(words(text, "torchrun")[1:])
    assert (taken.nnodes, taken.nproc_per_node, taken.max_restarts) == ("2:4", "8", 2)
    assert {"runner.max_restarts=2", "runner.min_ranks=16"} <= set(words(text, "shardtune"))
    own_store = f"export {OWN_STORE}=1"
    assert text.count(own_store) == 2  # for torchrun, and for Slurm, which starts it
    assert own_store not in launch_commands(recipe, ["runner.nproc_per_node=8"], 4, None)
    for fewest, restarts in ((5, 1), (2, 0)):
        with pytest.raises(ConfigError, match="--min-nodes"):
            launch_commands(recipe, [], 4, 8, fewest=fewest, restarts=restarts)


def test_one_host_needs_no_meeting_place(recipe: str) -> None:
    taken = get_args_parser().parse_args(words(launch_commands(recipe, [], 1, 4, ["torchrun"]), "torchrun")[1:])
    assert taken.standalone


def test_what_ray_is_given_is_a_recipe(recipe: str) -> None:
    text = launch_commands(recipe, ["runner.nproc_per_node=8"], 2, None, ["ray"])
    given = words(text, "shardtune")
    assert given[1:3] == ["train", recipe]
    assert {"runner.launcher=ray", "runner.num_ranks=16", "runner.ray.address=auto"} <= set(given)
    from shardtune.config import load_recipe

    assert load_recipe(recipe, given[3:], files_must_exist=False).runner.workers == 16
    job = words(text, "ray job submit")
    job = job[job.index("--") + 1 :]
    assert job[:3] == ["shardtune", "train", str(Path(recipe).absolute())]
    of_job = load_recipe(recipe, job[3:], files_must_exist=False)
    assert of_job.runner.workers == 16
    assert f"runner.logger.log_path={of_job.runner.logger.log_path}" in job
    assert Path(of_job.runner.logger.log_path).is_absolute()  # a job's directory is Ray's, and is deleted
    typed = launch_commands(recipe, ["runner.nproc_per_node=8", "data.chat_template=mine.jinja"], 2, None, ["ray"])
    assert f"-- env -C {Path.cwd()} shardtune train" in typed  # a path that is typed starts there
    before_start, _, _ = text.partition("ray start --head")
    assert "ray get-auth-token --generate" in before_start
    assert text.count("export RAY_AUTH_MODE=token") == 2  # on the first host, and on every other


def test_sizes_that_do_not_fit_are_refused(recipe: str) -> None:
    with pytest.raises(ParallelError, match="tensor 4"):
        launch_commands(recipe, [], 3, 2)
    with pytest.raises(ConfigError, match="cannot be divided among 3 hosts"):
        launch_commands(recipe, ["runner.launcher=ray", "runner.num_workers=8"], 3, None)


def test_the_command(recipe: str) -> None:
    shape = ("--nodes", "2", "--nproc-per-node", "8")
    shown = run_cli("launch", recipe, "--print", *shape, "--by", "all")
    assert shown.code == 0
    brief = run_cli("launch", recipe, "--print", *shape)
    assert "torchrun " in brief.out
    assert "ray start --head" in brief.out
    assert "#SBATCH" not in brief.out
    assert brief.out.endswith("# --by slurm | docker | kuberay | jobset | skypilot prints a file for that system; "
                              "--by all prints everything\n")  # fmt: skip
    for program in (
        "torchrun ",
        "#SBATCH",
        "ray start --head",
        "FROM ",
        "kind: RayJob",
        "kind: JobSet",
        "num_nodes: 2",
    ):
        assert program in shown.out
    refused = run_cli("launch", recipe, "--by", "kuberay")
    assert refused.code == 2
    assert "--print" in refused.err
    assert run_cli("launch", recipe, "--print", "--by", "mpi").code == 2
