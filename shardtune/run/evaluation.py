"""The evaluation of a run, or of the model that a recipe names."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path

from shardtune.config import Recipe, load_recipe
from shardtune.config.own_code import named_code, refuse_unnamed
from shardtune.config.user_code import import_plugins
from shardtune.errors import ConfigError
from shardtune.launch.local import run_ranks
from shardtune.launch.signals import NOT_REPORTED, end_with_parent, listening
from shardtune.parallel.ranks import leave_ranks
from shardtune.run.caller_settings import recipe_settings
from shardtune.run.choose_worker import make_worker
from shardtune.run.display import Display
from shardtune.run.evaluation_notes import notes_on_overrides
from shardtune.run.identity import FINAL
from shardtune.run.overridden import overridden
from shardtune.run.preflight import check_same_rows, is_one_of_several, read_together
from shardtune.run.run import load_run, nothing_to_evaluate, require_same_worker
from shardtune.training.loggers import SAMPLES
from shardtune.training.worker.base import FSDPSftWorker
from shardtune.training.worker.reported import evaluation_method
from shardtune.training.worker.run_context import RunContext, silent

RECIPES = (".yaml", ".yml", ".json", ".toml")
"""Endings of recipes, whose reader has its own message for one that is not there."""


@recipe_settings()
def evaluate(
    target: str | Path | None, *overrides: str, checkpoint: str = "final", trust: Sequence[str] = ()
) -> dict[str, float]:
    """Evaluate a run directory, or the model that a recipe names, on as many ranks as the recipe sets.

    Args:
        target: a run directory or a recipe; None: `overrides` name a model and rows.
        overrides: `key=value` on top of the recipe.
        checkpoint: of a run: final, latest, best, a step, or a path.
        trust: of a run: code that its recipe names and that may be executed, as for `load_run`.
    """
    run_dir = None if target is None or not Path(target).is_dir() else Path(target)
    if target is not None and not Path(target).exists() and Path(target).suffix.lower() not in RECIPES:
        raise _no_target(Path(target))
    if run_dir is None:
        if checkpoint != FINAL:
            raise ConfigError(
                f"{target or 'the model'} is no run, so it has no checkpoints",
                where=f"--checkpoint {checkpoint}",
                remedy="leave it out, or give the directory of a run",
            )
        recipe = load_recipe(target, overrides, in_memory=["data.train_data_paths"])
        refuse_unnamed(trust, named_code(recipe), "the recipe" if target is None else target)
    else:
        require_same_worker(load_run(run_dir, trust=trust))
        recipe = overridden(load_run(run_dir).recipe, overrides)
    if (recipe.runner.nproc_per_node > 1 or recipe.runner.launcher == "ray") and "RANK" not in os.environ:
        _evaluate_on_ranks(target, overrides, checkpoint, recipe)
        return {}
    if "RANK" in os.environ:
        end_with_parent()
    with recipe.spelling.in_errors():
        peers = read_together(lambda: recipe)[1] if is_one_of_several() else None
        with nullcontext() if peers is None else peers.announcing():
            metrics = _evaluate(recipe, run_dir, overrides, checkpoint=checkpoint, trust=trust)
    if peers is not None:
        peers.end()
    return metrics


def _no_target(path: Path) -> ConfigError:
    beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    return ConfigError(
        f"there is no run, recipe or model {path}",
        where=str(path),
        remedy=f"did you mean {path.parent / near[0]}?"
        if near
        else "name a run or a recipe.yaml, or a model by --model",
    )


def _evaluate(
    recipe: Recipe,
    run_dir: Path | None,
    overrides: Sequence[str],
    *,
    checkpoint: str,
    trust: Sequence[str],
) -> dict[str, float]:
    """`evaluate` on this rank."""
    logger = recipe.runner.logger
    if run_dir is not None:
        episodes = _unused(run_dir / SAMPLES / Path(checkpoint).name)
        worker = load_run(run_dir, trust=trust).worker(checkpoint, *overrides, episodes_dir=episodes)
    else:
        episodes = _unused(Path(logger.log_path) / f"{logger.experiment_name}-episodes")
        import_plugins(recipe.plugins)
        worker = make_worker(recipe, training=False, report=Display().report)
        worker.setup_evaluation(context=RunContext(episodes_dir=episodes))
    check_same_rows(worker)
    if not worker.evaluates:
        raise nothing_to_evaluate()
    if worker.ranks.is_main:
        run = None if run_dir is None else load_run(run_dir).recipe
        for note in notes_on_overrides(recipe, overrides, run, run_dir):
            Display().report(note)
        model = _named(recipe) if run_dir is None else f"{run_dir}, checkpoint {checkpoint}"
        Display().report(f"evaluating {model} on {_evaluated_on(worker, episodes)}")
    with Display().during("evaluating") if worker.ranks.is_main else nullcontext():
        metrics = evaluation_method(worker)()
    leave_ranks(worker.ranks)  # only on success: otherwise the other ranks may be blocked in another collective
    return metrics


def _named(recipe: Recipe) -> str:
    """The model of a recipe, with the adapter that it loads."""
    model = recipe.actor.model
    adapter = model.lora.load_from if model.is_lora else None
    return str(model.model_path) + (f" with the adapter {adapter}" if adapter else "")


def _unused(folder: Path) -> Path:
    """The folder, or with a number behind its name the first one that does not exist: earlier results are kept."""
    found = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return folder if not folder.exists() else next(place for place in found if not place.exists())


def _evaluated_on(worker: FSDPSftWorker, episodes: Path) -> str:
    """A description of what is evaluated on."""
    announced = [info.get("num_samples") for _, info in worker.eval_loaders.values()]
    sizes = [size for size in announced if isinstance(size, int)]
    rows = f"{sum(sizes):,} rows" if len(sizes) == len(announced) else f"{len(announced)} sets"
    config = worker.recipe.eval
    found = [rows] if announced else []
    if config.environment is not None:
        found.append(f"{config.episodes:,} episodes of {config.environment}, kept in {episodes}")
    if config.harness:
        found.append(f"{', '.join(config.harness)} of lm-evaluation-harness, kept in {episodes}")
    return " and ".join(found)


def _evaluate_on_ranks(target: str | Path | None, overrides: Sequence[str], checkpoint: str, recipe: Recipe) -> None:
    runner, is_run = recipe.runner, target is not None and Path(target).is_dir()
    # A rank on another host has no record of the code that is executed here.
    known = named_code(load_run(target).recipe) if is_run and target is not None else ()
    consent = [word for name in known for word in ("--trust", name)]
    rest = ["--checkpoint", checkpoint, *consent]
    if runner.launcher == "local":
        named = [] if target is None else [str(target)]
        run_ranks(["eval", *named, *overrides, *rest], runner.nproc_per_node, master_port=runner.master_port)
        return
    from shardtune.launch.ray.ranks import connected, run_ranks_on_ray

    # The recipe that is sent has the overrides in it.
    words = [str(Path(target).absolute()), *overrides] if target is not None and is_run else ["RECIPE"]
    with listening() as stop:
        stop.message = NOT_REPORTED  # nothing is trained here
        with connected(runner) as cluster:
            arguments = ["eval", *words, *rest]
            run_ranks_on_ray(cluster, arguments, recipe, runner.workers, {}, stop=stop, report=silent, bare=True)
