"""The keys given in one place (the recipe file, one override, one config group), and how these layers are merged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel

from shardtune.config.foreign.hints import hint
from shardtune.config.keys import is_free_mapping, nearest, section_type
from shardtune.config.schema import ACTOR_KEYS, Recipe
from shardtune.config.shown import as_written
from shardtune.config.tree import Tree, get_section, get_value, overlay
from shardtune.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layer:
    """Keys given in one place.

    Attributes:
        tree: nested mappings, as written.
        origin: the place, e.g. `recipe.yaml` or `override lr=3e-5`.
        lines: dotted key -> line number, for a file.
        named: the dotted key that an override sets; "" for a layer of several.
        places: dotted key -> place, for keys that were given elsewhere.
        written: dotted key -> the name under which it is given here.
    """

    tree: Mapping[str, object]
    origin: str
    lines: Mapping[str, int] = field(default_factory=dict)
    named: str = ""
    places: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)

    def where(self, dotted: str) -> str:
        """The place of a key, or of the innermost section around it that has a line."""
        if dotted in self.places:
            return self.places[dotted]
        while dotted:
            if dotted in self.lines:
                return f"{self.origin}:{self.lines[dotted]}"
            dotted = dotted.rpartition(".")[0]
        return self.origin


@dataclass(frozen=True, slots=True)
class Merged:
    """All layers in one.

    Attributes:
        tree: the values given, nested; keys that no layer gives are absent.
        origins: dotted key -> where its value was given, for keys and sections of the schema.
    """

    tree: Tree
    origins: dict[str, str]

    def given(self, dotted: str) -> object:
        """The value that a layer gives for a key; None where none does."""
        return get_value(self.tree, dotted)


def merge(layers: Iterable[Layer], prepare: Callable[[Layer], Layer]) -> tuple[Merged, list[ConfigError]]:
    """Merge layers, later ones winning; keys that the schema lacks are left out and reported.

    Sections and free mappings (`actor.optim.args`) merge key by key; every other value replaces the earlier one whole.

    Args:
        layers: earlier ones first.
        prepare: is applied to each layer, whose keys are in our places.
    """
    merged = Merged({}, {})
    problems: list[ConfigError] = []
    for layer in map(prepare, layers):
        problems += _lay(layer.tree, Recipe, "", merged.tree, layer, merged.origins)
    return merged, problems


def _lay(
    tree: Mapping[str, object],
    section: type[BaseModel],
    prefix: str,
    into: Tree,
    layer: Layer,
    origins: dict[str, str],
) -> Iterator[ConfigError]:
    for name, value in tree.items():
        dotted = f"{prefix}{name}"
        schema = section.model_fields.get(name)
        if schema is None:
            yield unknown_key(dotted, layer.where(dotted), section, prefix, value)
            continue
        origins[dotted] = layer.where(dotted)
        inner = section_type(schema)
        if inner is None:
            previous = into.get(name)
            if layer.named.startswith(f"{dotted}.") and previous is not None and not isinstance(previous, Mapping):
                yield _nothing_inside(dotted, previous, layer)
            inside = is_free_mapping(schema) or layer.named.startswith(f"{dotted}.")
            into[name] = overlay(previous, value) if inside else value
        elif isinstance(value, Mapping):
            given = get_section(into, name)
            if not value and given and _overrides(layer, dotted):
                yield _nothing_given(dotted, given, layer)
            yield from _lay(value, inner, f"{dotted}.", given, layer, origins)
        elif value is None:
            if _overrides(layer, dotted):  # in a file it is a section whose keys are all commented out
                _take_back(dotted, name, into, origins)
        else:
            yield ConfigError(
                f"{dotted} is a section, not {as_written(value)}",
                where=layer.where(dotted),
                remedy=hint(dotted, value) or f"its keys are: {', '.join(inner.model_fields)}",
            )


def _overrides(layer: Layer, dotted: str) -> bool:
    """Whether the layer is an override of this section, or of one around it."""
    return layer.named == dotted or (bool(layer.named) and dotted.startswith(f"{layer.named}."))


def _take_back(dotted: str, name: str, into: Tree, origins: dict[str, str]) -> None:
    """Remove what earlier layers give in a section, whose keys have their defaults then."""
    into.pop(name, None)
    for key in [key for key in origins if key.startswith(f"{dotted}.")]:
        del origins[key]


def _nothing_given(dotted: str, given: Mapping[str, object], layer: Layer) -> ConfigError:
    """The error for an override by an empty section, which would change nothing."""
    return ConfigError(
        f"{dotted} is overridden by an empty section, which leaves its keys as they are: {', '.join(given)}",
        where=layer.origin,
        remedy=f"'{dotted}=null' sets all keys of the section to their defaults; '{dotted}.KEY=…' sets one",
    )


def _nothing_inside(dotted: str, previous: object, layer: Layer) -> ConfigError:
    """The error for an override of something inside a value that is no mapping, and would be lost."""
    shown = ("the list " if isinstance(previous, list) else "") + as_written(previous)
    return ConfigError(
        f"{layer.named}: {dotted} is {shown if len(shown) <= 120 else shown[:100] + ' …'}, which has no "
        f"{layer.named.removeprefix(dotted + '.')}",
        where=layer.origin,
        remedy=f"give the whole value: {_whole(dotted, previous, layer)}",
    )


def _whole(dotted: str, previous: object, layer: Layer) -> str:
    """The override to type instead: with both, if the earlier value can be a named set beside the new one."""
    added = get_value(layer.tree, dotted)
    if dotted == "data.eval_data_paths" and isinstance(previous, str) and isinstance(added, Mapping):
        sets = {"eval": previous, **added}
        if all(isinstance(value, str) for value in sets.values()):
            return f"'{dotted}={{{', '.join(f'{name}: {value}' for name, value in sets.items())}}}'"
    return f"'{dotted}=…', e.g. a list [{{path: a.jsonl, weight: 2}}, b.jsonl]"


def unknown_key(dotted: str, where: str, section: type[BaseModel], prefix: str, value: object = None) -> ConfigError:
    """The error for a key that the schema does not have at this place, with the value that it is given."""
    meant, foreign = nearest(dotted), hint(dotted, value)
    parts = dotted.removeprefix(prefix).split(".")
    if len(parts) > 1 and meant is not None:
        remedy = f"in a file a dot is written as a section: {': {'.join(parts)}: …{'}' * (len(parts) - 1)}"
    elif foreign is not None:
        remedy = foreign
    elif meant is not None:
        remedy = f"did you mean {meant}?"
    else:
        names = section.model_fields if prefix else [*section.model_fields, *ACTOR_KEYS]
        remedy = f"the keys {f'of {prefix[:-1]}' if prefix else 'at the top'} are: {', '.join(names)}"
    return ConfigError(f"unknown key {dotted}", where=where, remedy=remedy)


def raise_all(problems: list[ConfigError]) -> None:
    """Raise what was found: one problem as itself, several as one message; nothing if there is none."""
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    entries = []
    for number, problem in enumerate(problems, start=1):
        first, *rest = str(problem).splitlines()
        entries.append("\n".join([f"{number:>3}. {first}", *(f"     {line}" for line in rest)]))
    raise ConfigError("\n".join([f"{len(problems)} mistakes in the configuration", *entries]))
