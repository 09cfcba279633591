"""The user's own keys under `actor.model.options`, read into a pydantic model."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from shardtune.config import Recipe
from shardtune.errors import ConfigError

KEY = "actor.model.options"


class NoOptions(BaseModel):
    """Options of an adapter that has none."""

    model_config = ConfigDict(extra="forbid")


def read_options(kind: type[BaseModel], recipe: Recipe) -> BaseModel:
    """`actor.model.options` as an instance of `kind`, as strictly as the rest of a recipe: "16" is no int.

    Raises:
        ConfigError: an unknown key, at any depth, with the nearest known one, or a value of another type.
    """
    given = recipe.actor.model.options
    _check_keys(kind, given, KEY, recipe)
    try:
        # From JSON even strict validation takes a list as a tuple, and a string as a path or a member of an Enum.
        read = kind.model_validate_json(json.dumps(given), strict=kind.model_config.get("strict", True))
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # options that do not go together
            raise ConfigError(
                f"{KEY}: {first['msg'].removeprefix('Value error, ')}",
                where=recipe.where(KEY) or KEY,
                remedy="change one of them",
            ) from error
        place = ".".join([KEY, *(str(part) for part in first["loc"])])
        raise ConfigError(
            f"{place} = {first['input']!r}: {first['msg']}" if first["type"] != "missing" else f"{place} is required",
            where=recipe.where(place) or recipe.where(KEY),
            remedy=_describe(kind),
        ) from error
    _check_inner(read, given, KEY, recipe)
    return read


def _check_keys(kind: type[BaseModel], given: Mapping[str, object], place: str, recipe: Recipe) -> None:
    """Refuse keys that are no fields of `kind`, unless it declares extra="allow"."""
    if kind.model_config.get("extra") == "allow":
        return
    known = {name for name, field in kind.model_fields.items() for name in (name, field.alias) if name}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            listed = ", ".join(kind.model_fields) or "none"
            raise ConfigError(
                f"{place}.{name} is not an option of this model",
                where=recipe.where(f"{place}.{name}") or recipe.where(KEY),
                remedy=f"did you mean {near[0]}?" if near else f"its options are: {listed}",
            )


def _check_inner(read: object, given: object, place: str, recipe: Recipe) -> None:
    """`_check_keys` for nested models: in fields, lists and dicts."""
    if isinstance(read, BaseModel) and isinstance(given, Mapping):
        _check_keys(type(read), given, place, recipe)
        values = dict(vars(read))
        values |= {field.alias: values[name] for name, field in type(read).model_fields.items() if field.alias}
        pairs = [(str(key), values.get(key), value) for key, value in given.items()]
    elif isinstance(read, Mapping) and isinstance(given, Mapping):
        pairs = [(str(key), read.get(key), value) for key, value in given.items()]
    elif isinstance(read, Sequence) and isinstance(given, list) and not isinstance(read, str):
        pairs = [(str(number), *both) for number, both in enumerate(zip(read, given, strict=False))]
    else:
        return
    for key, inner, value in pairs:
        _check_inner(inner, value, f"{place}.{key}", recipe)


def _describe(kind: type[BaseModel]) -> str:
    """The options with their types."""
    parts = [f"{name}: {_type_name(field.annotation)}" for name, field in kind.model_fields.items()]
    return f"the options are {', '.join(parts)}"


def _type_name(annotation: object) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
