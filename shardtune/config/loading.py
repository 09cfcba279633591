"""From a recipe and overrides to one validated `Recipe`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shardtune.config.checks import check, check_ranks
from shardtune.config.keys import HALOS_DEFAULTS, KEYS, allowed
from shardtune.config.layers import Layer, Merged, merge, raise_all
from shardtune.config.overrides import GROUPS, read_overrides
from shardtune.config.paths import make_absolute, named_files
from shardtune.config.recipe_file import read_file, read_mapping
from shardtune.config.saved_lora import adopt_adapter
from shardtune.config.schema import DataEntry, ParameterGroup, Recipe, escape_interpolation
from shardtune.errors import ConfigError

RecipeSource: TypeAlias = str | Path | Mapping[str, Any] | DictConfig

BACKENDS = "runner.logger.logger_backends"
ENTRY_TYPES: dict[str, type[BaseModel]] = {
    "actor.optim.groups": ParameterGroup,
    "data.train_data_paths": DataEntry,
    "data.eval_data_paths": DataEntry,
}


def load_recipe(
    recipe: RecipeSource | None,
    overrides: Sequence[str] = (),
    *,
    in_memory: Collection[str] = (),
    files_must_exist: bool = True,
) -> Recipe:
    """Compose, validate and resolve a recipe. Nothing is written, and neither torch nor the model is touched.

    Later places win: schema defaults, the recipe, config groups, `key=value` overrides.

    Args:
        recipe: a YAML file, a mapping, or None when config groups are among the overrides.
        overrides: `key=value` in Hydra's grammar, config groups (`model=llama`), HALOs' names.
        in_memory: keys whose value the caller holds as an object, so that they may be absent:
            `actor.model.model_path`, `data.train_data_paths`, `data.eval_data_paths`.
        files_must_exist: whether a named template, plugin, function file or local model must be there; false where
            a run's own recipe is read back for something that may not need them.

    Raises:
        ConfigError: everything that is wrong, in one message, with file and line or the override's text.
    """
    written = _read(recipe, overrides)
    given_backends = Merged(dict(written.tree), {}).given(BACKENDS)
    default_backends = Recipe().runner.logger.logger_backends
    command = read_overrides(overrides, given_backends if isinstance(given_backends, list) else default_backends)
    merged, problems = merge([written, *command.groups, *command.values])
    tree, unresolved = _resolve(merged)
    if merged.given("actor.global_batch_tokens") is not None and merged.given("actor.global_batch_size") is None:
        tree["actor"]["global_batch_size"] = None  # tokens replace the default number of rows
    problems += _adopt_second_places(tree, merged)
    problems += adopt_adapter(tree, merged, _base(recipe), must_exist=files_must_exist)
    mistyped = _type_problems(tree, merged, {problem.what.partition(":")[0] for problem in unresolved})
    problems += unresolved + mistyped
    if unresolved or mistyped:  # what contradicts what cannot be told yet
        raise_all(problems)
    if tree["runner"]["logger"]["experiment_name"] is None:
        tree["runner"]["logger"]["experiment_name"] = _name(recipe) or command.name or "run"
    result = _absolute(tree, _base(recipe), merged.origins)
    problems += check(result, merged, in_memory)
    if files_must_exist:
        problems += _missing_files(result) + check_ranks(result)
    raise_all(problems)
    return result


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one: dotted key -> value. Lists and empty mappings are values."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{dotted}."))
        else:
            flat[dotted] = value
    return flat


def _read(recipe: RecipeSource | None, overrides: Sequence[str]) -> Layer:
    if isinstance(recipe, str | Path):
        return read_file(Path(recipe).expanduser())
    if isinstance(recipe, Mapping | DictConfig):
        return read_mapping(recipe)
    if recipe is not None:
        kind = type(recipe).__name__
        raise ConfigError(f"a recipe is a path, a dict or a DictConfig, not a {kind}", remedy="give one of them")
    chosen = {override.lstrip("+").partition("=")[0] for override in overrides}
    if not chosen & set(GROUPS):
        groups = "loss=sft model=llama datasets=[ultrachat]"
        given = " ".join(overrides) or "nothing"
        raise ConfigError(
            "there is no recipe", where=f"given: {given}", remedy=f"name a YAML file, or config groups: {groups}"
        )
    return Layer(HALOS_DEFAULTS if "loss" in chosen else {}, "config groups")


def _name(recipe: RecipeSource | None) -> str | None:
    return Path(recipe).stem if isinstance(recipe, str | Path) else None


def _base(recipe: RecipeSource | None) -> Path:
    """What relative paths are relative to: the recipe's directory; without a file the working directory."""
    return Path(recipe).expanduser().resolve().parent if isinstance(recipe, str | Path) else Path.cwd()


def _resolve(merged: Merged) -> tuple[dict[str, Any], list[ConfigError]]:
    """The defaults under what was given, every `${…}` replaced by the value it points to.

    A value that cannot be resolved is reported and stands as null.
    """
    resolved = Recipe().to_dict()
    given = [dotted for dotted in merged.origins if KEYS[dotted].section is None]
    values = escape_interpolation(resolved)
    problems = []
    for dotted in given:
        value = merged.given(dotted)
        try:
            OmegaConf.create({"value": value})
        except OmegaConfBaseException as error:
            problems.append(_refused(dotted, value, merged, str(error).splitlines()[0]))
            value = None
        _put(values, dotted, value)
    config = DictConfig(values)
    for dotted in given:
        value = None
        try:
            value = OmegaConf.select(config, dotted, throw_on_missing=True)
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            problems.append(_unresolved(dotted, merged, str(error).splitlines()[0]))
        _put(resolved, dotted, value)
    return resolved, problems


SECOND_PLACES = {
    "actor.model.micro_batch_size": "actor.micro_batch_size",
    "actor.model.val_micro_batch_size": "actor.eval_micro_batch_size",
}
"""Keys that say what another says; the resolved recipe has the other alone."""


def _adopt_second_places(tree: dict[str, Any], merged: Merged) -> list[ConfigError]:
    """Move what stands in a second place to where it is read; both places may say the same."""
    problems = []
    for theirs, ours in SECOND_PLACES.items():
        value, own = (_value(tree, dotted) for dotted in (theirs, ours))
        if value is None:
            continue
        if merged.given(ours) is not None and own != value:
            problems.append(
                ConfigError(
                    f"{theirs} ({value}) and {ours} ({own}) are the same thing",
                    where=f"{merged.origins[theirs]}, {merged.origins[ours]}",
                    remedy="keep one of them",
                )
            )
            continue
        merged.origins[ours] = merged.origins[theirs]
        _put(tree, ours, value)
        _put(tree, theirs, None)
    return problems


def _short(value: Any) -> str:
    """A value as messages show it, its middle left out where it is long."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:80]} … {text[-30:]}"


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a dotted key in a tree that has all sections."""
    *sections, name = dotted.split(".")
    for part in sections:
        tree = tree[part]
    tree[name] = value


def _value(tree: dict[str, Any], dotted: str) -> Any:
    """The value of a dotted key in a tree that has all sections."""
    value: Any = tree
    for part in dotted.split("."):
        value = value[part]
    return value


def _unresolved(dotted: str, merged: Merged, reason: str) -> ConfigError:
    return ConfigError(
        f"{dotted}: {_short(merged.given(dotted))} cannot be resolved: {reason}",
        where=merged.origins.get(dotted),
        remedy="a reference is ${key.of.the.recipe}, written from the top; \\${ stands for the characters themselves",
    )


def _refused(dotted: str, value: Any, merged: Merged, reason: str) -> ConfigError:
    return ConfigError(
        f"{dotted}: {_short(value)} is not allowed: {reason}",
        where=merged.origins.get(dotted),
        remedy=f"allowed: {allowed(KEYS[dotted].field)}",
    )


def _type_problems(tree: dict[str, Any], merged: Merged, reported: Collection[str]) -> list[ConfigError]:
    """What the schema finds wrong, keys that were already reported left out."""
    try:
        Recipe.model_validate(tree)
    except ValidationError as error:
        found = [(_place(details["loc"])[0], details) for details in error.errors()]
        return [_type_problem(details, merged) for dotted, details in found if dotted not in reported]
    return []


def _type_problem(details: ErrorDetails, merged: Merged) -> ConfigError:
    """A value of the wrong type or size, in our words."""
    dotted, inside = _place(details["loc"])
    shown = dotted + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inside)
    where = merged.origins.get(dotted)
    field = _field_inside(dotted, inside)
    if details["type"] == "extra_forbidden":
        names = ", ".join(ENTRY_TYPES[dotted].model_fields)
        return ConfigError(f"unknown key {shown}", where=where, remedy=f"the keys of such an entry are: {names}")
    if details["type"] == "missing":
        return ConfigError(f"{shown} is required", where=where, remedy=f"add it: {allowed(field)}")
    reason = details["msg"].partition("Value error, ")[2] if details["type"] == "value_error" else ""
    words = allowed(field)
    unquoted = isinstance(details["input"], int | float) and words.startswith(("text", "the name"))
    return ConfigError(
        f"{shown}: {_short(details['input'])} is not allowed{f' ({reason})' if reason else ''}",
        where=where,
        remedy=f"allowed: {words}{'; put it in quotes' if unquoted else ''}",
    )


def _place(loc: tuple[int | str, ...]) -> tuple[str, tuple[int | str, ...]]:
    """A pydantic location as our dotted key and what lies inside its value: (data.train_data_paths, (1, weight))."""
    dotted = str(loc[0])
    for number, part in enumerate(loc[1:], start=1):
        if f"{dotted}.{part}" not in KEYS:
            return dotted, loc[number:]
        dotted = f"{dotted}.{part}"
    return dotted, ()


def _field_inside(dotted: str, inside: tuple[int | str, ...]) -> FieldInfo:
    """The field of an entry inside a list, else the key's own."""
    entry = ENTRY_TYPES.get(dotted)
    names = [part for part in inside if isinstance(part, str)]
    return entry.model_fields.get(names[-1], KEYS[dotted].field) if entry and names else KEYS[dotted].field


def _absolute(tree: dict[str, Any], base: Path, origins: Mapping[str, str]) -> Recipe:
    values = Recipe.model_validate(tree).to_dict()
    make_absolute(values, base)
    result = Recipe.model_validate(values)
    result._origins.update(origins)
    return result


def _missing_files(recipe: Recipe) -> list[ConfigError]:
    return [
        ConfigError(
            f"{dotted}: there is no {path}",
            where=recipe.where(dotted),
            remedy="check the name; a relative path starts at the recipe's own directory",
        )
        for dotted, path in named_files(recipe.to_dict())
        if not Path(path).exists()
    ]
