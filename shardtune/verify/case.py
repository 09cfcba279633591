"""The test case of the conformance kit: an adapter, a few rows, and recipes that differ in one key each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtune.config import Recipe, load_recipe
from shardtune.config.loading import RecipeSource
from shardtune.config.model_names import registered, registered_adapter
from shardtune.config.tree import Tree, set_value
from shardtune.config.user_code import import_plugins
from shardtune.config.values import FUNCTION_IN_FILE
from shardtune.data.encoder import Row
from shardtune.errors import ConfigError
from shardtune.models.find_adapter import find_adapter
from shardtune.models.registered_functions import MODEL_TYPES
from shardtune.verify.rows import keep_rows, rows_for

ROWS_OF_A_STEP = 5
STEPS = 4
"""Optimizer steps of a run of the kit: more than an epoch of a dozen rows, whose last step is not full."""
KEPT = {
    "runner": ("seed",),
    "actor": ("tokenizer", "fsdp_config"),
    "data": (
        "chat_template",
        "system_prompt",
        "train_on",
        "thinking",
        "ignored_keys",
        "max_length",
        "on_too_long",
    ),
}
"""The keys of a recipe that hold for the kit's run, besides `plugins` and `actor.model`."""
SHORT_RUN: Mapping[str, object] = {
    "runner.device": "cpu",
    "runner.max_epochs": -1,
    "runner.max_steps": STEPS,
    "runner.resume_dir": None,
    "runner.logger.experiment_name": "verify",
    "actor.optim.lr": 1e-3,
    "actor.optim.lr_scheduler": "constant",
    "actor.global_batch_size": ROWS_OF_A_STEP,
    "actor.micro_batch_size": 2,
    "actor.model.precision": "fp64",
    "actor.model.compile": False,
    "actor.model.gradient_checkpointing": False,
    "actor.model.is_lora": False,
    "data.num_workers": 0,
}
"""What the kit's run sets."""
IN_MEMORY = ("actor.model.model_path", "data.train_data_paths")


@dataclass(frozen=True, slots=True)
class Case:
    """An adapter to check.

    Attributes:
        name: of the adapter, as given.
        recipe: of a short run in fp64 on one rank, over `rows`.
        lora: the section `actor.model.lora` of the user's recipe.
        rows: in the form that the encoder takes.
        folder: for the files of the checks; removed by the caller.
    """

    name: str
    recipe: Recipe
    lora: Mapping[str, object]
    rows: Sequence[Row]
    folder: Path

    def variant(self, changes: Mapping[str, object]) -> Recipe:
        """The recipe with other values, by dotted key."""
        return changed(self.recipe, changes)


def find_case(adapter: str | Path, recipe: RecipeSource | None, overrides: Sequence[str], folder: Path) -> Case:
    """The case of an adapter.

    Args:
        adapter: `file.py:Class`, a value of `actor.model.model_type`, or a recipe (a YAML file) that names its
            adapter.
        recipe: whose model, options and rows are taken; without one, or where it names no rows, those of `examples`.
        overrides: `key=value`, over the recipe.
        folder: for the files of the checks.

    Raises:
        ShardtuneError: no such adapter, a recipe that is wrong, or no rows.
    """
    named = str(adapter)
    from_recipe = recipe is None and named.endswith((".yaml", ".yml"))
    source = named if from_recipe else {} if recipe is None else recipe
    loaded = load_recipe(source, overrides, in_memory=IN_MEMORY)
    import_plugins(loaded.plugins)
    configured = changed(loaded, {} if from_recipe else _named(named))
    found = find_adapter(configured)
    rows = rows_for(found, configured)
    values = _short_run(configured, folder)
    set_value(values, "data.train_data_paths", str(keep_rows(rows, folder)))
    return Case(named, _loaded(values), configured.actor.model.lora.model_dump(), rows, folder)


def changed(recipe: Recipe, changes: Mapping[str, object]) -> Recipe:
    """The recipe with other values, by dotted key."""
    values = recipe.to_dict()
    for dotted, value in changes.items():
        set_value(values, dotted, value)
    return _loaded(values)


def _loaded(values: Tree) -> Recipe:
    return load_recipe(values, in_memory=IN_MEMORY[1:], files_must_exist=False)


def _named(adapter: str) -> dict[str, object]:
    """The recipe keys that name the adapter."""
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


def _short_run(recipe: Recipe, folder: Path) -> Tree:
    """The values of a short run in fp64 on this process's CPU, which calls every method of an adapter.

    The model and its rows are the recipe's; optimizer, schedule, evaluation and the run itself are the kit's own.
    """
    values, own = Recipe().to_dict(), recipe.to_dict()
    for section, keys in KEPT.items():
        values[section] |= {key: own[section][key] for key in keys}
    values["plugins"] = own["plugins"]
    values["actor"]["model"] = {**own["actor"]["model"], "lora": values["actor"]["model"]["lora"]}
    for dotted, value in SHORT_RUN.items():
        set_value(values, dotted, value)
    set_value(values, "runner.logger.log_path", str(folder / "runs"))
    set_value(values, "data.cache_dir", str(folder / "cache"))
    return values
