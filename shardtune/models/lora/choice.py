"""Which of the targeted modules get LoRA, and with what rank and scale: further keys of PEFT's LoraConfig.

The rules are PEFT's. What would have no effect there, without a word, is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from torch import nn

from shardtune.config import LoraConfig
from shardtune.errors import ConfigError
from shardtune.parallel import peft_names as peft

T = TypeVar("T", int, str)
SECTION = "actor.model.lora"
SHOWN = 8
"""How many names a message has where none is similar."""


def chosen(model: nn.Module, config: LoraConfig, named: Mapping[str, bool]) -> list[str]:
    """The modules that remain of the targeted ones: not excluded, and in the chosen layers.

    Args:
        model: that is adapted.
        config: the recipe's LoRA section.
        named: the targeted modules, and whether each is targeted by its full name; such a module may lie in no layer.

    Raises:
        ConfigError: a name, pattern or layer that changes nothing, or no module remains.
    """
    excluded = _excluded(model, config, named)
    kept = {name: in_full for name, in_full in named.items() if name not in excluded}
    if config.layers_to_transform is not None:
        inside = set(in_layers(config, kept))
        _check_layers(config, kept, inside)
        kept = {name: in_full for name, in_full in kept.items() if in_full or name in inside}
    if named and not kept:
        raise ConfigError(
            f"{SECTION}.exclude_modules leaves no module to adapt",
            where=f"{SECTION}.exclude_modules",
            remedy="exclude fewer, or set actor.model.is_lora: false",
        )
    return list(kept)


def in_layers(config: LoraConfig, names: Iterable[str]) -> list[str]:
    """The modules in the layers of `layers_to_transform`, as PEFT finds them by `layers_pattern`; without it, all."""
    if config.layers_to_transform is None:
        return list(names)
    return [name for name in names if _lies_in(name, _listed(config.layers_to_transform), config.layers_pattern)]


def own_values(key: str, patterns: Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    """PEFT's `rank_pattern` or `alpha_pattern`, the first pattern that matches a name deciding.

    PEFT sorts the patterns when it saves them. Where that would change what they mean, each module is named instead.

    Args:
        key: `rank_pattern` or `alpha_pattern`.
        patterns: regular expressions for the ends of names, and values, as in the recipe.
        names: of the adapted modules and parameters.

    Raises:
        ConfigError: a pattern that decides about no name.
    """
    decided = {name: peft.get_pattern_key(list(patterns), name) for name in names}
    for pattern in patterns:
        if pattern in decided.values():
            continue
        matched = [name for name in names if peft.get_pattern_key([pattern], name) == pattern]
        if matched:
            what = f"decides about no module: an earlier pattern matches {matched[0]}" + ", …" * (len(matched) > 1)
            remedy = "write the narrower pattern first"
        else:
            what, remedy = "matches no adapted module", _near(pattern, names)
        raise ConfigError(f"{SECTION}.{key}: {pattern} {what}", where=f"{SECTION}.{key}", remedy=remedy)
    if all(peft.get_pattern_key(sorted(patterns), name) == pattern for name, pattern in decided.items()):
        return dict(patterns)
    return {f"^{re.escape(name)}": patterns[pattern] for name, pattern in decided.items() if pattern in patterns}


def _excluded(model: nn.Module, config: LoraConfig, named: Collection[str]) -> set[str]:
    """All modules that `exclude_modules` matches: text is a pattern for whole names, a list has their ends."""
    given, key = config.exclude_modules, f"{SECTION}.exclude_modules"
    everything = [name for name, _ in model.named_modules() if name]
    excluded: set[str] = set()
    for entry in _listed(given):
        found = {
            name
            for name in everything
            if (re.fullmatch(entry, name) if isinstance(given, str) else name == entry or name.endswith(f".{entry}"))
        }
        if not found:
            how = "matches no whole name of a module" if isinstance(given, str) else "is the name of no module"
            remedy = _near(entry, everything)
            raise ConfigError(
                f"{key}: {entry} {how} of {type(model).__name__}",
                where=key,
                remedy=f"{remedy}; in a list: [{entry}]" if isinstance(given, str) else remedy,
            )
        inside = [name for name in named for owner in found if name.startswith(f"{owner}.")]
        if inside and found.isdisjoint(named):
            raise ConfigError(
                f"{key}: {entry} is a module with adapted ones inside ({inside[0]}, …), which PEFT adapts all the same",
                where=key,
                remedy=rf"name those, or give a pattern: '.*{re.escape(entry)}\..*'",
            )
        excluded |= found
    for name, _ in model.named_parameters() if excluded else ():
        owner = name.rpartition(".")[0]
        if owner in excluded and any(name == end or name.endswith(f".{end}") for end in config.target_parameters):
            raise ConfigError(
                f"{key} has {owner}, of which target_parameters names {name}; PEFT excludes modules alone",
                where=key,
                remedy=f"write more of the names in {SECTION}.target_parameters, with their layers",
            )
    return excluded


def _check_layers(config: LoraConfig, names: Collection[str], inside: Collection[str]) -> None:
    """Refuse layers and patterns for layers in which no targeted module lies."""
    layers, patterns = _listed(config.layers_to_transform), _listed(config.layers_pattern)
    for pattern in patterns:
        if not any(_lies_in(name, layers, [pattern]) for name in inside):
            lists = {part for name in names for part in re.findall(r"([^.]+)\.\d+\.", name)}
            raise ConfigError(
                f"{SECTION}.layers_pattern: {pattern} is no list with targeted modules in layers {layers}",
                where=f"{SECTION}.layers_pattern",
                remedy=_near(pattern, lists),
            )
    for layer in layers:
        if not any(f".{layer}." in f".{name}" and _lies_in(name, [layer], patterns) for name in inside):
            numbers = sorted({int(part) for name in names for part in name.split(".") if part.isdigit()})
            known = [each for each in numbers if any(_lies_in(name, [each], patterns) for name in names)]
            raise ConfigError(
                f"{SECTION}.layers_to_transform: no targeted module is in layer {layer}",
                where=f"{SECTION}.layers_to_transform",
                remedy=f"layers here are {', '.join(map(str, known))}"
                if known
                else f"name the list of layers in {SECTION}.layers_pattern",
            )


def _lies_in(name: str, layers: list[int], patterns: str | list[str]) -> bool:
    """Whether PEFT counts a module as one of these layers."""
    trial = peft.LoraConfig(
        target_modules=[name.rpartition(".")[2]], layers_to_transform=layers, layers_pattern=patterns or None
    )
    return "." in name and bool(peft.check_target_module_exists(trial, name))


def _near(wrong: str, names: Iterable[str]) -> str:
    """A remedy: the most similar of the last parts of names, or some of them."""
    word = (re.findall(r"[^\W\d]\w*", wrong) or [wrong])[-1]
    known = sorted({name.rpartition(".")[2] for name in names})
    near = difflib.get_close_matches(word, known, n=3)
    if near:
        return f"the nearest names are {', '.join(near)}"
    return f"names here are {', '.join(known[:SHOWN])}{', …' if len(known) > SHOWN else ''}"


def _listed(value: T | list[T] | None) -> list[T]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
