"""The user's own keys under `actor.model.options`, as types."""

from __future__ import annotations

import difflib

from pydantic import BaseModel, ConfigDict, ValidationError

from shardtune.config import Recipe
from shardtune.errors import ConfigError

KEY = "actor.model.options"


class NoOptions(BaseModel):
    """No key at all."""

    model_config = ConfigDict(extra="forbid")


def read_options(kind: type[BaseModel], recipe: Recipe) -> BaseModel:
    """`actor.model.options` as an instance of `kind`.

    Raises:
        ConfigError: an unknown key, with the nearest known one, or a value of another type.
    """
    given = recipe.actor.model.options
    for name in given:
        if name not in kind.model_fields:
            near = difflib.get_close_matches(name, kind.model_fields, n=1)
            known = ", ".join(kind.model_fields) or "none"
            raise ConfigError(
                f"{KEY}.{name} is not an option of this model",
                where=recipe.where(f"{KEY}.{name}"),
                remedy=f"did you mean {near[0]}?" if near else f"its options are: {known}",
            )
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join([KEY, *(str(part) for part in first["loc"])])
        raise ConfigError(
            f"{place} = {first['input']!r}: {first['msg']}" if first["type"] != "missing" else f"{place} is required",
            where=recipe.where(place),
            remedy=_describe(kind),
        ) from error


def _describe(kind: type[BaseModel]) -> str:
    """The options with their types."""
    parts = [f"{name}: {_type_name(field.annotation)}" for name, field in kind.model_fields.items()]
    return f"the options are {', '.join(parts)}"


def _type_name(annotation: object) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
