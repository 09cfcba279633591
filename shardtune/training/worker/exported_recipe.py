"""The recipe of a run, for the directory that it has exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardtune.checkpoint.atomic import read_json
from shardtune.checkpoint.records import CONFIG, intact_copy
from shardtune.config import ActorConfig, Recipe
from shardtune.config.model_names import BUILT_IN, POLICIES, TASKS
from shardtune.config.recipe_file import read_stored
from shardtune.config.stored_recipe import stored_recipe
from shardtune.config.tree import get_section
from shardtune.config.values import WORKERS
from shardtune.models.action.policy import SETTINGS_FILE
from shardtune.models.action.recipe_normalizer import NORMALIZER_FILE
from shardtune.models.action.tokens import STATISTICS_FILE
from shardtune.models.tasks.task import TASK_FILE
from shardtune.training.build.lora import is_adapter

_UNTIL = "_until_step_"
FOUND = (NORMALIZER_FILE, SETTINGS_FILE)
"""What is found in the training rows of a model that acts, and kept in the run's directory for its checkpoints."""
ACTS = "vision_language_action"
OPTIM = "actor.optim"
FEATURES = ("input_features", "output_features")
"""What the config.json of a ready policy has of its training rows."""


def over_directory(recipe: Recipe, directory: Path) -> Recipe:
    """The same recipe with the configuration and tokenizer of a directory that `export` wrote, if it has them.

    A user-defined module has neither; only its weights come from there (`RunContext.weights_directory`), and its
    statistics, if the directory has them. A user's own code that reads `actor.tokenizer.tokenizer_model` finds a
    directory there if it did in training: this one, or, with an adapter, which lacks the base's config.json, the base's
    as before.
    """
    values, users_code = recipe.to_dict(), _runs_users_code(recipe.actor)
    model, tokenizer = values["actor"]["model"], values["actor"]["tokenizer"]
    has_tokenizer = (directory / "tokenizer_config.json").is_file()
    values = _with_found(values, directory)
    values["actor"]["optim"] |= {"ema_decay": None, "ema_use": True}  # the directory has the weights that were chosen
    statistics = NORMALIZER_FILE
    if is_adapter(directory) and recipe.actor.model.model_type == ACTS:  # a whole model has them in its config.json
        statistics = SETTINGS_FILE if (directory / SETTINGS_FILE).is_file() else STATISTICS_FILE
    if (directory / statistics).is_file():
        model["action_statistics"] = str(directory / statistics)
    elif not is_adapter(directory) and not (directory / "config.json").is_file():
        return recipe
    if is_adapter(directory):
        # The adapter's own settings apply, so none are given here; the base model stays.
        model["lora"] = {"load_from": str(directory), "base_dtype": model["lora"]["base_dtype"]}
        if model["model_type"] in POLICIES:  # its training rows, which have the sizes, need not be there
            stored = read_json(directory / "config.json")
            model["options"] |= {name: stored[name] for name in FEATURES if name in stored}
        if has_tokenizer and not users_code:
            tokenizer["tokenizer_model"] = str(directory)
            values["data"]["chat_template"] = None
    elif (directory / "config.json").is_file():
        model |= {"model_path": str(directory), "from_scratch": False, "config_overrides": {}, "is_lora": False}
        model["lora"] = {}  # it is merged
        if has_tokenizer:
            tokenizer["tokenizer_model"] = tokenizer["tokenizer_model"] and str(directory)
            values["data"]["chat_template"] = values["data"]["chat_template"] if users_code else None
    return stored_recipe(values)


def kept_until(run_dir: Path, name: str, step: int) -> Path:
    """Where a file of `FOUND` of the steps up to `step` is kept, when training goes on with another one."""
    return run_dir / f"{Path(name).stem}{_UNTIL}{step}.json"


def found_at(run_dir: Path, name: str, step: int) -> Path:
    """The file of `FOUND` that a run had at a step."""
    begins = f"{Path(name).stem}{_UNTIL}"
    ends = (file.stem.removeprefix(begins) for file in run_dir.glob(f"{begins}*.json"))
    later = [int(end) for end in ends if end.isdecimal() and int(end) >= step]
    return kept_until(run_dir, name, min(later)) if later else run_dir / name


def with_found(recipe: Recipe, run_dir: Path, step: int) -> Recipe:
    """The same recipe with what a run has found in its training rows and keeps, so that those are not needed: the
    normalizer of a policy, the settings of actions, the labels of a task.

    Args:
        recipe: of the run.
        run_dir: its directory.
        step: of the checkpoint whose weights are used.
    """
    if not any((run_dir / name).is_file() for name in (*FOUND, TASK_FILE)):
        return recipe
    values = _with_found(recipe.to_dict(), run_dir)
    for file in (found_at(run_dir, name, step) for name in FOUND):
        if file.is_file():
            values["actor"]["model"]["action_statistics"] = str(file)
    return stored_recipe(values)


def with_average_of(recipe: Recipe, checkpoint: Path) -> Recipe:
    """The same recipe with the choice between weights and average that the checkpoint's own recipe made.

    A run may have been continued with another one since.
    """
    file = intact_copy(checkpoint, CONFIG)
    if file is None:
        return recipe
    stored, values = get_section(read_stored(file.read_text(encoding="utf-8")), OPTIM), recipe.to_dict()
    optim, decay = values["actor"]["optim"], stored.get("ema_decay")
    optim["ema_use"] = bool(stored.get("ema_use", True)) and (decay is not None or optim["ema_decay"] is None)
    optim["ema_decay"] = optim["ema_decay"] if decay is None else decay
    return recipe if values == recipe.to_dict() else stored_recipe(values)


def _with_found(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The values with the options of a task, those that were found in the training rows among them."""
    if values["actor"]["model"]["model_type"] in TASKS and (directory / TASK_FILE).is_file():
        values["actor"]["model"]["options"] |= read_json(directory / TASK_FILE)["options"]
    return values


def _runs_users_code(actor: ActorConfig) -> bool:
    """Whether a worker, an adapter or a registered function of the user's may read the recipe."""
    worker = actor.worker is not None and actor.worker not in WORKERS
    return worker or actor.model.adapter is not None or actor.model.model_type not in BUILT_IN
