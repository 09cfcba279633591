"""What the conformance kit tries: an adapter, a few rows, and recipes that differ in one thing each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtune.config import Recipe, load_recipe
from shardtune.config.loading import RecipeSource
from shardtune.config.model_names import registered, registered_adapter
from shardtune.config.user_code import import_plugins
from shardtune.config.values import FUNCTION_IN_FILE
from shardtune.data.encoder import Row
from shardtune.errors import ConfigError
from shardtune.models.find_adapter import MODEL_TYPES, find_adapter
from shardtune.verify.rows import keep_rows, rows_for

ROWS_OF_A_STEP = 5
STEPS = 4
"""Optimizer steps of a run of the kit: more than an epoch of a dozen rows, the last step of which is not full."""
IN_MEMORY = ("actor.model.model_path", "data.train_data_paths")


@dataclass(frozen=True, slots=True)
class Case:
    """An adapter on trial.

    Attributes:
        name: of the adapter, as it was given.
        recipe: of a short run of it in fp64 on one rank, over `rows`.
        lora: the recipe's own section `actor.model.lora`.
        rows: as the encoder takes them.
        folder: for what the checks write; the caller's to remove.
    """

    name: str
    recipe: Recipe
    lora: Mapping[str, Any]
    rows: Sequence[Row]
    folder: Path

    def variant(self, changes: Mapping[str, Any]) -> Recipe:
        """The recipe with other values, by dotted key."""
        return changed(self.recipe, changes)


def find_case(adapter: str | Path, recipe: RecipeSource | None, overrides: Sequence[str], folder: Path) -> Case:
    """The case of an adapter.

    Args:
        adapter: `file.py:Class`, a name as `actor.model.model_type` takes it, or a recipe (a YAML file) that says so
            itself.
        recipe: whose model, options and rows are taken; without one, or where it names no rows, those of `examples`.
        overrides: `key=value`, over the recipe.
        folder: for what the checks write.

    Raises:
        ShardtuneError: no such adapter, a recipe that is wrong, or no rows.
    """
    named = str(adapter)
    from_recipe = recipe is None and named.endswith((".yaml", ".yml"))
    source = named if from_recipe else {} if recipe is None else recipe
    loaded = load_recipe(source, overrides, in_memory=IN_MEMORY)
    import_plugins(loaded.plugins)
    asked = changed(loaded, {} if from_recipe else _named(named))
    found = find_adapter(asked)
    rows = rows_for(found, asked)
    values = _short_run(asked, folder)
    values["data"]["train_data_paths"] = str(keep_rows(rows, folder))
    return Case(named, _loaded(values), asked.actor.model.lora.model_dump(), rows, folder)


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with other values, by dotted key."""
    values = recipe.to_dict()
    for dotted, value in changes.items():
        *sections, key = dotted.split(".")
        holder = values
        for section in sections:
            holder = holder[section]
        holder[key] = value
    return _loaded(values)


def _loaded(values: dict[str, Any]) -> Recipe:
    return load_recipe(values, in_memory=IN_MEMORY[1:], files_must_exist=False)


def _named(adapter: str) -> dict[str, Any]:
    """The recipe's keys that say which adapter it is."""
    if FUNCTION_IN_FILE.fullmatch(adapter):
        file, _, name = adapter.rpartition(":")
        return {"actor.model.adapter": f"{Path(file).expanduser().absolute()}:{name}"}
    known = registered(adapter)
    if known and registered_adapter(adapter) is None and all(isinstance(kind, type) for kind in known):
        raise ConfigError(
            f"{adapter} is registered as {known[0].__name__}, which is no adapter",
            where=adapter,
            remedy="the kit checks adapters: classes that derive from shardtune.Adapter",
        )
    if not known and adapter not in MODEL_TYPES and ":" not in adapter and adapter.endswith(".py"):
        raise ConfigError(f"{adapter} names no class", where=adapter, remedy=f"write {adapter}:MyModel")
    return {"actor.model.adapter": None, "actor.model.model_type": adapter}


def _short_run(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The values of a short run in fp64 on this process's CPU, which does all that an adapter is asked for.

    What belongs to the model and its rows stays; optimizer, schedule, evaluation and the run itself are the kit's own.
    """
    values, own = recipe.to_dict(), Recipe().to_dict()
    logger = {**own["runner"]["logger"], "log_path": str(folder / "runs"), "experiment_name": "verify"}
    values["runner"] = {
        **own["runner"],
        "seed": recipe.runner.seed,
        "device": "cpu",
        "max_epochs": -1,
        "max_steps": STEPS,
        "resume_dir": None,
        "logger": logger,
    }
    kept = ("model", "tokenizer", "fsdp_config")
    values["actor"] = {
        **own["actor"],
        **{key: values["actor"][key] for key in kept},
        "optim": {**own["actor"]["optim"], "lr": 1e-3, "lr_scheduler": "constant"},
        "global_batch_size": ROWS_OF_A_STEP,
        "micro_batch_size": 2,
    }
    values["actor"]["model"] |= {
        "precision": "fp64",
        "compile": False,
        "gradient_checkpointing": False,
        "is_lora": False,
        "lora": own["actor"]["model"]["lora"],
    }
    kept = ("chat_template", "system_prompt", "train_on", "max_length", "on_too_long")
    values["data"] = {
        **own["data"],
        **{key: values["data"][key] for key in kept},
        "num_workers": 0,
        "cache_dir": str(folder / "cache"),
    }
    values["eval"] = {**own["eval"], "environment": None}  # the kit looks at rows
    return values
