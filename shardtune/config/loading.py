"""From a recipe and overrides to one validated `Recipe`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TypeAlias, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shardtune.config.checks import check
from shardtune.config.checks.run import check_ranks
from shardtune.config.environment import as_stored, references
from shardtune.config.foreign.hints import hint_of_value
from shardtune.config.foreign.trainers import TRAINERS, recognise
from shardtune.config.halos import NAMES, translate
from shardtune.config.key_forms import at_present_keys
from shardtune.config.keys import HALOS_DEFAULTS, KEYS, allowed, nearest
from shardtune.config.layers import Layer, Merged, merge, raise_all
from shardtune.config.overrides import DATA, GROUPS, MODEL, CommandLine, read_overrides
from shardtune.config.paths import make_absolute, named_files, user_path
from shardtune.config.recipe_config import RecipeConfig
from shardtune.config.recipe_file import read_file, read_mapping, read_value
from shardtune.config.saved_lora import adopt_adapter
from shardtune.config.schema import (
    ACTOR,
    ACTOR_KEYS,
    FORMER_KEYS,
    OTHER_KEYS,
    DataEntry,
    ParameterGroup,
    Recipe,
    Spelling,
    long_key,
    present_key,
    short_key,
)
from shardtune.config.shown import NAMES as NAMES_OF_VALUES
from shardtune.config.tree import Tree, get_section, get_value, set_value
from shardtune.config.typed_paths import TYPED, from_working_directory
from shardtune.config.values import escape_interpolation
from shardtune.errors import ConfigError, cut

RecipeSource: TypeAlias = str | Path | Mapping[str, object] | DictConfig

EXPERIMENT_NAME = "runner.logger.experiment_name"
LOG_PATH = "runner.logger.log_path"
ALLOWED = "runner.allow_changes"
NAMES_ENOUGH = ("model_path", "train_data_paths")
"""Endings of the keys that a run without a recipe begins with."""
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
    """Compose, validate and resolve a recipe. Writes nothing, imports no torch, and does not read the model.

    Later places win: schema defaults, the recipe, config groups, `key=value` overrides. In each, `actor.` may be left
    out. Errors name a key as it was given.

    Args:
        recipe: a YAML file, a mapping, or None when config groups are among the overrides.
        overrides: `key=value` in Hydra's grammar, config groups (`model=llama`), HALOs' names.
        in_memory: keys whose value the caller passes as an object, so that they may be absent:
            `actor.model.model_path`, `data.train_data_paths`, `data.eval_data_paths`.
        files_must_exist: whether a named template, plugin, function file or local model must exist; false when a
            run's own recipe is read again for something that may not need them.

    Raises:
        ConfigError: all mistakes in one message, each with file and line or the override's text.
    """
    if isinstance(recipe, RecipeConfig) and not overrides:
        unchanged = recipe.unchanged_recipe()
        if unchanged is not None:
            return unchanged
    command = read_overrides(overrides)
    written = _read(recipe, overrides, command)
    (first, *others), twice = _at_present_keys([written, *command.values])
    halos = translate([first, *command.groups, *others], in_memory)
    merged, unknown = merge(halos.layers, partial(from_working_directory, beside=_base(recipe)))
    earlier = recipe.spelling if isinstance(recipe, RecipeConfig) else None
    names = dict(earlier.written if earlier else first.written)
    names |= {key: name for layer in others for key, name in layer.written.items()}
    long = earlier.long if earlier else any(ACTOR in layer.tree for layer in (written, *command.values))
    spelling = Spelling(names, long)

    def report(found: Sequence[ConfigError]) -> None:
        for problem in found:
            spelling.respell(problem)
        raise_all([*twice, *found])

    problems = [*halos.problems, *unknown]
    tree, unresolved = _resolve(merged)
    if merged.given("actor.global_batch_tokens") is not None and merged.given("actor.global_batch_size") is None:
        set_value(tree, "actor.global_batch_size", None)  # tokens replace the default number of rows
    problems += adopt_adapter(tree, merged, _base(recipe), must_exist=files_must_exist)
    mistyped = _type_problems(tree, merged, {problem.what.partition(":")[0] for problem in unresolved})
    problems += unresolved + mistyped
    if unresolved or mistyped:  # contradictions can only be found between values of the right types
        report(problems)
    if get_value(tree, EXPERIMENT_NAME) is None:
        named = "run" if recipe is not None else _named_after(tree)
        set_value(tree, EXPERIMENT_NAME, _name(recipe) or command.name or named)
    changes = get_section(tree, "runner")
    changes["allow_changes"] = [present_key(str(name)) for name in _listed(changes["allow_changes"])]
    with spelling.in_errors():
        result = _absolute(tree, _base(recipe), merged.origins)
    result._spelling = spelling
    _keep_references(result, tree, merged, _base(recipe))
    result._notes.extend([*_former_names(names), *(spelling.in_text(note) for note in halos.notes)])
    problems += check(result, merged, in_memory)
    if files_must_exist:
        problems += _missing_files(result) + check_ranks(result) + _unknown_changes(result)
    report(problems)
    return result


def _at_present_keys(layers: Sequence[Layer]) -> tuple[list[Layer], list[ConfigError]]:
    pairs = [at_present_keys(layer, NAMES) for layer in layers]
    return [layer for layer, _ in pairs], [problem for _, problems in pairs for problem in problems]


def _former_names(names: Mapping[str, str]) -> list[str]:
    """A note on the former names among those given, if there are any; they go on working."""
    used = [f"{name} is now {short_key(key)}" for key, name in names.items() if long_key(name) in FORMER_KEYS]
    return [f"former names of keys, which go on working: {', '.join(used)}"] if used else []


def _read(recipe: RecipeSource | None, overrides: Sequence[str], command: CommandLine) -> Layer:
    if isinstance(recipe, str | Path):
        return _of_shardtune(read_file(user_path(recipe, "RECIPE")))
    if isinstance(recipe, Mapping | DictConfig):
        if isinstance(recipe, RecipeConfig):
            return replace(read_mapping(recipe.tree()), places=recipe.places())
        return read_mapping(recipe)
    if recipe is not None:
        kind = type(recipe).__name__
        raise ConfigError(f"a recipe is a path, a dict or a DictConfig, not a {kind}", remedy="give one of them")
    chosen = {override.lstrip("+").partition("=")[0] for override in overrides}
    if not command.groups and any(layer.named.endswith(NAMES_ENOUGH) for layer in command.values):
        return Layer({}, "command line")
    if not chosen & set(GROUPS):
        raise ConfigError(
            "there is no recipe",
            where=f"given: {' '.join(overrides) or 'nothing'}",
            remedy="name a YAML file, or a model and rows: --model Qwen/Qwen3-0.6B --data rows.jsonl",
        )
    return Layer(HALOS_DEFAULTS if "loss" in chosen else {}, "config groups")


def _of_shardtune(recipe: Layer) -> Layer:
    """A recipe's file as it is; the configuration of another trainer is refused, with the command to convert it."""
    word = recognise(recipe.tree)
    if word is None:
        return recipe
    raise ConfigError(
        f"this is a configuration of {TRAINERS[word].name}, not a recipe",
        where=recipe.origin,
        remedy=f"shardtune convert {recipe.origin} -o recipe.yaml",
    )


def _name(recipe: RecipeSource | None) -> str | None:
    return Path(recipe).stem if isinstance(recipe, str | Path) else None


def _named_after(tree: Tree) -> str:
    """The name of a run without a recipe: of its model and its first rows, as in `Qwen3-0.6B-rows`."""
    rows = get_value(tree, DATA)
    while isinstance(rows, list | dict) and rows:
        rows = rows.get("path") if isinstance(rows, dict) else rows[0]
    model = str(get_value(tree, MODEL) or "")
    paths = [Path(model).expanduser().resolve() if model in (".", "..") else Path(model)]
    paths += [Path(rows.partition("*")[0])] if isinstance(rows, str) else []
    names = [re.sub(r"[^\w.-]+", "-", path.name if path == paths[0] else path.name.partition(".")[0]) for path in paths]
    return "-".join(name.strip("-.")[:60] for name in names if name.strip("-.")) or "run"


def _base(recipe: RecipeSource | None) -> Path:
    """The directory of relative paths: the recipe's own; without a file the working directory."""
    return Path(recipe).expanduser().resolve().parent if isinstance(recipe, str | Path) else Path.cwd()


def _resolve(merged: Merged) -> tuple[Tree, list[ConfigError]]:
    """The defaults with the given values over them, every `${…}` replaced by the value it points to.

    A value that cannot be resolved is reported and becomes null. OmegaConf, which takes some 10 ms for a whole recipe,
    reads it only if some value is more than a literal.
    """
    resolved = Recipe().to_dict()
    given = [dotted for dotted in merged.origins if KEYS[dotted].section is None]
    if all(_is_literal(merged.given(dotted)) for dotted in given):
        for dotted in given:
            set_value(resolved, dotted, deepcopy(merged.given(dotted)))
        return resolved, []
    values: Tree = {name: escape_interpolation(value) for name, value in resolved.items()}
    problems = []
    for dotted in given:
        value = merged.given(dotted)
        try:
            OmegaConf.create({"value": value})
        except OmegaConfBaseException as error:
            problems.append(_refused(dotted, value, merged, str(error).splitlines()[0]))
            value = None
        set_value(values, dotted, value)
    for name, own in _other_names().items():
        set_value(values, name, f"${{{own}}}")
    config = DictConfig(values)
    for dotted in given:
        value = None
        try:
            value = OmegaConf.select(config, dotted, throw_on_missing=True)
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            problems.append(_unresolved(dotted, merged, str(error).splitlines()[0]))
        set_value(resolved, dotted, value)
    _read_texts(resolved, merged)
    return resolved, problems


def _read_texts(resolved: Tree, merged: Merged) -> None:
    """Read what a reference gave for a key of another type than text, as an environment variable does, like YAML."""
    try:
        Recipe.model_validate(resolved)
    except ValidationError as error:
        for details in error.errors():
            _read_text(resolved, merged.tree, list(details["loc"]))


def _read_text(resolved: object, written: object, loc: Sequence[int | str]) -> None:
    """`_read_texts` for the value at a place inside sections and lists, or for all values below that place."""
    if isinstance(resolved, dict) and isinstance(written, dict):
        keys = [key for key in written if key in resolved and loc[:1] in ([], [key])]
    elif isinstance(resolved, list) and isinstance(written, list):
        keys = [key for key in range(len(written)) if loc[:1] in ([], [key])]
    else:
        return
    for key in keys:
        value, as_written = resolved[key], written[key]
        if isinstance(value, str) and isinstance(as_written, str) and "${" in as_written:
            resolved[key] = read_value(value)
        _read_text(value, as_written, loc[1:])


def _other_names() -> dict[str, str]:
    """All other names by which a reference may name a key, and the key's own."""
    return {name: f"{ACTOR}.{name}" for name in ACTOR_KEYS} | OTHER_KEYS


def _is_literal(value: object) -> bool:
    """Whether OmegaConf leaves a value as it is: plain, with no reference and no `???` (missing) in it."""
    if type(value) is str:
        return "${" not in value and value != "???"
    if type(value) is list:
        return all(map(_is_literal, value))
    if type(value) is dict:
        return all(type(name) is str and _is_literal(item) for name, item in value.items())
    return value is None or type(value) in (bool, int, float)


def _short(value: object) -> str:
    """A value for a message, without the middle of a long one."""
    if value is None or isinstance(value, bool):
        return NAMES_OF_VALUES[value]
    try:
        return cut(f"'{value}'" if isinstance(value, str) else repr(value))  # a pattern without escapes
    except ValueError:  # a number of thousands of digits
        return "a number that is too large"


def _unresolved(dotted: str, merged: Merged, reason: str) -> ConfigError:
    return ConfigError(
        f"{dotted}: {_short(merged.given(dotted))} cannot be resolved: {reason}",
        where=merged.origins.get(dotted),
        remedy="a reference is ${key.of.the.recipe}, written from the top; \\${ stands for the characters themselves",
    )


def _refused(dotted: str, value: object, merged: Merged, reason: str) -> ConfigError:
    return ConfigError(
        f"{dotted}: {_short(value)} is not allowed: {reason}",
        where=merged.origins.get(dotted),
        remedy=f"allowed: {allowed(KEYS[dotted].field)}",
    )


def _type_problems(tree: Tree, merged: Merged, reported: Collection[str]) -> list[ConfigError]:
    """What the schema refuses, without the keys that were already reported."""
    try:
        Recipe.model_validate(tree)
    except ValidationError as error:
        found = [(_place(details["loc"])[0], details) for details in error.errors()]
        return [_type_problem(details, merged) for dotted, details in found if dotted not in reported]
    return []


def _type_problem(details: ErrorDetails, merged: Merged) -> ConfigError:
    """The error for a value of the wrong type or size."""
    dotted, inside = _place(details["loc"])
    shown = dotted + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inside)
    where = merged.origins.get(dotted)
    field = _field_inside(dotted, inside)
    if details["type"] == "extra_forbidden":
        names = [*ENTRY_TYPES[dotted].model_fields]
        near = get_close_matches(str(inside[-1]), names, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        remedy = f"{meant}the keys of such an entry are: {', '.join(names)}"
        return ConfigError(f"unknown key {shown}", where=where, remedy=remedy)
    if details["type"] == "missing":
        return ConfigError(f"{shown} is required", where=where, remedy=f"add it: {allowed(field)}")
    reason = details["msg"].partition("Value error, ")[2] if details["type"] == "value_error" else ""
    words, foreign = allowed(field), hint_of_value(dotted, details["input"]) if not inside else None
    unquoted = isinstance(details["input"], int | float) and words.startswith(("text", "the name"))
    if details["input"] is None and not inside and not field.is_required():
        foreign = f"leave it out for its default, {_short(field.default)}"
    return ConfigError(
        f"{shown}: {_short(details['input'])} is not allowed{f' ({reason})' if reason else ''}",
        where=where,
        remedy=f"{f'{foreign}; ' if foreign else ''}allowed: {words}{'; put it in quotes' if unquoted else ''}",
    )


def _place(loc: tuple[int | str, ...]) -> tuple[str, tuple[int | str, ...]]:
    """A pydantic location as a dotted key and the place inside its value: (data.train_data_paths, (1, weight))."""
    dotted = str(loc[0])
    for number, part in enumerate(loc[1:], start=1):
        if f"{dotted}.{part}" not in KEYS:
            return dotted, loc[number:]
        dotted = f"{dotted}.{part}"
    return dotted, ()


def _field_inside(dotted: str, inside: tuple[int | str, ...]) -> FieldInfo:
    """The field of an entry inside a list, of a value inside a mapping, otherwise the key's own."""
    entry = ENTRY_TYPES.get(dotted)
    names = [part for part in inside if isinstance(part, str)]
    annotation = KEYS[dotted].field.annotation
    if names and get_origin(annotation) is dict:
        return FieldInfo.from_annotation(get_args(annotation)[names[-1] != "[key]"])
    return entry.model_fields.get(names[-1], KEYS[dotted].field) if entry and names else KEYS[dotted].field


def _absolute(tree: Tree, base: Path, origins: Mapping[str, str]) -> Recipe:
    values = Recipe.model_validate(tree).to_dict()
    make_absolute(values, base, origins)
    result = Recipe.model_validate(values)
    result._origins.update(origins)
    return result


def _keep_references(recipe: Recipe, resolved: Tree, merged: Merged, base: Path) -> None:
    """Note for a recipe which of its values come from the environment, in the form in which they are stored."""
    final = recipe.to_dict()
    given = {dotted: merged.given(dotted) for dotted in merged.origins if KEYS[dotted].section is None}
    for dotted, written in references(given).items():
        place = Path.cwd() if dotted == LOG_PATH else base
        recipe._references[dotted] = as_stored(written, get_value(resolved, dotted), get_value(final, dotted), place)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _unknown_changes(recipe: Recipe) -> list[ConfigError]:
    """Names in `runner.allow_changes` that are no keys, nor below a key that holds a mapping."""
    return [
        ConfigError(
            f"{ALLOWED} names {name}, which is no key",
            where=recipe.where(ALLOWED),
            remedy=f"did you mean {meant}?" if meant else "docs/configuration.md lists all keys",
        )
        for name in recipe.runner.allow_changes
        if not any(f"{name}.".startswith(f"{key}.") for key, entry in KEYS.items() if entry.section is None)
        and name not in KEYS
        for meant in [nearest(name)]
    ]


def _missing_files(recipe: Recipe) -> list[ConfigError]:
    return [
        ConfigError(
            f"{dotted}: there is no {path}",
            where=recipe.where(dotted),
            remedy="check the name; a relative path starts at the "
            + ("working directory" if str(recipe.where(dotted)).startswith(TYPED) else "recipe's own directory"),
        )
        for dotted, path in named_files(recipe.to_dict())
        if not Path(path).exists()
    ]
