"""The Python interface of the commands: `train`, `evaluate`, and a `Run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from omegaconf import DictConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardtune.batch.seeds import generators_kept
from shardtune.checkpoint.checksums import directory_faults
from shardtune.config import Recipe, load_recipe
from shardtune.config.user_code import import_plugins
from shardtune.errors import ConfigError, disk_errors
from shardtune.launch.local import is_launched
from shardtune.launch.signals import listening
from shardtune.models.find_adapter import check_in_memory
from shardtune.parallel.ranks import check_launcher
from shardtune.run.caller_settings import recipe_settings
from shardtune.run.choose_worker import Objects
from shardtune.run.directory import check_unlocked, plan_run, without_final
from shardtune.run.display import Display
from shardtune.run.evaluation import evaluate
from shardtune.run.preflight import is_one_of_several, read_together, refuse_full, short_of_space
from shardtune.run.push import check_push
from shardtune.run.ranks import train_on_ray, train_on_this_machine
from shardtune.run.run import Run, load_run
from shardtune.run.train_rank import report_finished, train_rank
from shardtune.training.callbacks import load_callbacks
from shardtune.training.loggers import check_logger
from shardtune.training.recorder import Recording

__all__ = ["Run", "evaluate", "load_run", "train"]


def train(
    recipe: str | Path | Mapping[str, object] | DictConfig | None,
    *overrides: str,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    train_data: object = None,
    eval_data: object = None,
    recording: Recording | None = None,
) -> Run:
    """Fine-tune according to a recipe; continue from the last checkpoint of its run directory.

    Args:
        recipe: a YAML file, a dict or a `DictConfig`.
        overrides: `key=value`, as on the command line.
        model: a model in memory, trained in place of `actor.model.model_path` (one rank).
        tokenizer: a tokenizer in memory.
        train_data: a list of rows, a `datasets.Dataset` or a `pandas.DataFrame`.
        eval_data: likewise, or a dict of named ones.
        recording: what is recorded of each step, to be compared with other runs; None: nothing.

    Raises:
        ShardtuneError: an error that the user can fix; raised before anything is written where possible.
        Interrupted: stopped by a signal, after saving; calling again continues.
    """
    with recipe_settings(), generators_kept(), disk_errors():
        return _train_from(recipe, overrides, Objects(model, tokenizer, train_data, eval_data), recording)


def _train_from(
    recipe: str | Path | Mapping[str, object] | DictConfig | None,
    overrides: Sequence[str],
    objects: Objects,
    recording: Recording | None,
) -> Run:
    check_launcher()
    check_in_memory(objects.model, objects.tokenizer)

    def read() -> Recipe:
        loaded = load_recipe(recipe, overrides, in_memory=objects.keys())
        import_plugins(loaded.plugins)
        load_callbacks(loaded.runner.callbacks)
        return loaded

    if is_one_of_several():
        loaded, peers = read_together(read)
        with loaded.spelling.in_errors(), nullcontext() if peers is None else peers.announcing():
            return Run(train_rank(loaded, objects, peers, recording=recording), trained_here=True)
    loaded = read()
    with loaded.spelling.in_errors():
        return _train(loaded, objects, recording)


def _train(loaded: Recipe, objects: Objects, recording: Recording | None) -> Run:
    """Train in this process, or start the ranks."""
    if is_launched():
        return Run(train_rank(loaded, objects, recording=recording), trained_here=True)
    display = Display()
    plan = plan_run(loaded)
    check_unlocked(plan.run_dir)
    if plan.finished:
        plan = without_final(plan, partial(directory_faults, content=True))
    if plan.finished:
        report_finished(plan, loaded, objects, display.report)
        return Run(plan.run_dir, trained_here=True)
    by_ray = loaded.runner.launcher == "ray"
    if not by_ray:  # there another host may log
        check_logger(loaded.runner.logger)
    check_push(loaded.runner.push_to_hub)
    if by_ray or loaded.runner.nproc_per_node > 1:
        _refuse_objects(loaded, objects)
        if not by_ray:  # there another host may train
            refuse_full({"": short_of_space(loaded)})
        for note in loaded.notes:  # the ranks read a recipe without them
            display.report(note)
        with listening() as stop:
            stop.message = plan.message_of_stop
            (train_on_ray if by_ray else train_on_this_machine)(loaded, plan, display, stop, recording)
        return Run(plan.run_dir, trained_here=True)
    return Run(train_rank(loaded, objects, recording=recording), trained_here=True)


def _refuse_objects(recipe: Recipe, objects: Objects) -> None:
    if not objects.any:
        return
    by_ray = recipe.runner.launcher == "ray"
    raise ConfigError(
        "objects in memory train on one rank" + (" of this process" if by_ray else ""),
        where="runner.launcher = ray" if by_ray else f"runner.nproc_per_node = {recipe.runner.nproc_per_node}",
        remedy="save them and name them in the recipe, or set runner."
        + ("launcher: local" if by_ray else "nproc_per_node: 1"),
    )
