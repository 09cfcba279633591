"""Keys given without `actor.`, or under a former name, moved to the one place where each is read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from shardtune.config.keys import KEYS
from shardtune.config.layers import Layer
from shardtune.config.schema import (
    ACTOR,
    ACTOR_KEYS,
    ALTERNATIVE_KEYS,
    MODEL,
    OTHER_KEYS,
    ModelConfig,
    is_actors,
    long_key,
    present_key,
)
from shardtune.config.shown import as_written
from shardtune.config.tree import Tree, copied, get_section, get_value, take_value
from shardtune.errors import ConfigError


def at_present_keys(layer: Layer, others: Collection[str]) -> tuple[Layer, list[ConfigError]]:
    """A layer with the present keys in their long form; a key that it gives twice, with two values, is an error.

    Args:
        layer: as written.
        others: HALOs' names, which stay.
    """
    tree, problems = copied(layer.tree), list[ConfigError]()
    moved: Tree = {name: tree.pop(name) for name in ACTOR_KEYS if name in tree and is_actors(name, tree[name])}
    model = moved.get(MODEL)
    if isinstance(model, dict):
        tree[MODEL] = _take_halos(model, others)
    kept = {name: value for name, value in moved.items() if name != MODEL or value != {} or not tree.get(MODEL)}
    if tree.get(MODEL) == {}:
        del tree[MODEL]
    if kept and tree.get(ACTOR) is None:
        tree[ACTOR] = kept
    elif kept and isinstance(tree[ACTOR], dict):  # anything else is reported as no section
        problems += _join(get_section(tree, ACTOR), kept, "", layer)
    at_long_keys = replace(layer, lines={long_key(name): line for name, line in layer.lines.items()})
    for theirs, ours in OTHER_KEYS.items():
        problems += _move(tree, theirs, ours, at_long_keys)
    idle = {name for name in _names(layer.tree) if _is_given_elsewhere(layer.tree, name)}
    names = [name for name in _names(layer.tree) if _is_no_section(present_key(name)) and name not in idle]
    lines = {present_key(name): line for name, line in layer.lines.items() if name not in idle} | dict(layer.lines)
    named = layer.named if layer.named in others else present_key(layer.named)
    written = {present_key(name): name for name in names if name not in others}
    return replace(layer, tree=tree, lines=lines, named=named, written=written), problems


def _is_given_elsewhere(tree: Mapping[str, object], name: str) -> bool:
    """Whether a key in the place that other systems have for it is null: then it is no name of the key's value."""
    return long_key(name) in ALTERNATIVE_KEYS and get_value(tree, name) is None


def _take_halos(model: Tree, others: Collection[str]) -> Tree:
    """Remove HALOs' keys from a section `model`, and with them those that are nobody's; returns them."""
    names = {name.split(".")[1] for name in others if name.startswith(f"{MODEL}.")} - ModelConfig.model_fields.keys()
    if names.isdisjoint(model):
        return {}
    return {name: model.pop(name) for name in [*model] if name not in ModelConfig.model_fields}


def _join(into: Tree, given: Mapping[str, object], prefix: str, layer: Layer) -> Iterator[ConfigError]:
    """Add the keys of a section in the short form to those in the long one."""
    for name, value in given.items():
        own, short = into.get(name), f"{prefix}{name}"
        if isinstance(own, dict) and isinstance(value, Mapping):
            yield from _join(own, value, f"{short}.", layer)
        elif name not in into or (own is None and isinstance(value, Mapping)):
            into[name] = value
        elif own != value and not (value is None and isinstance(own, dict)):  # None: a section without keys
            yield _twice(short, value, f"{ACTOR}.{short}", own, layer)


def _move(tree: Tree, theirs: str, ours: str, layer: Layer) -> Iterator[ConfigError]:
    """Move the value of a former or alternative key to the present one."""
    found, value = take_value(tree, theirs)
    if not found or (value is None and theirs in ALTERNATIVE_KEYS):  # null: it is given at the other place
        return
    section, _, name = ours.rpartition(".")
    own = get_section(tree, section).setdefault(name, value)
    if own is None:
        get_section(tree, section)[name] = value
    elif own != value:
        yield _twice(theirs, value, ours, own, layer)


def _twice(one: str, value: object, other: str, its: object, layer: Layer) -> ConfigError:
    places = list(dict.fromkeys([layer.where(one), layer.where(other)]))
    return ConfigError(
        f"{one} and {other} are the same key, with two values: {as_written(value)} and {as_written(its)}",
        where=", ".join(places),
        remedy="keep one of them",
    )


def _names(tree: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{name}.")


def _is_no_section(key: str) -> bool:
    return key not in KEYS or KEYS[key].section is None
