"""The list of model types and of architectures that train, and a search in it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

from shardtune.config import load_recipe
from shardtune.config.model_names import describe, known_names
from shardtune.config.stored_recipe import stored_recipe
from shardtune.config.user_code import import_plugins
from shardtune.errors import ConfigError
from shardtune.models.find_adapter import known_architectures
from shardtune.models.registered_functions import MODEL_TYPES


def is_recipe(word: str) -> bool:
    """Whether a word is a recipe, not one to search for."""
    return word.lower().endswith((".yaml", ".yml"))


def read_plugins(recipe: str | None, overrides: Sequence[str]) -> None:
    """Import the plugins of a recipe, or of overrides alone; they may register model types."""
    if recipe:
        import_plugins(load_recipe(recipe, overrides, files_must_exist=False).plugins)
    elif overrides:
        import_plugins(stored_recipe({}, overrides).plugins)


def listing() -> Iterator[str]:
    """All model types, each with the architectures that have been seen to train."""
    known = known_architectures()
    for name, meaning in MODEL_TYPES.items():
        yield f"{name}: {meaning}"
        for how, architectures in known.get(name, {}).items():
            yield f"  {how}: {len(architectures)} architectures seen to train: {', '.join(architectures)}"
    for name in known_names():
        yield f"{name}: {describe(name)}"


def search(words: Sequence[str]) -> Iterator[str]:
    """The model types and architectures whose names contain one of the words, each on its own line; then the words
    that none contains.

    Raises:
        ConfigError: there is none.
    """
    wanted = [_plain(word.rpartition("/")[2]) for word in words]
    found = [(name, line) for name, line in _lines() if any(word in _plain(name) for word in wanted)]
    if not found:
        raise _none(words, wanted)
    yield from (line for _, line in found)
    for typed, word in zip(words, wanted, strict=True):
        if not any(word in _plain(name) for name, _ in found):
            yield f"none is named like {typed}"


def _lines() -> Iterator[tuple[str, str]]:
    """The names that a search looks at, each with its line."""
    known = known_architectures()
    for name in MODEL_TYPES:
        for how, architectures in known.get(name, {}).items():
            for architecture in architectures:
                yield architecture, f"{architecture}: model.model_type={name}, seen to train, {how}"
    for name in (*MODEL_TYPES, *known_names()):
        yield name, f"{name}: {MODEL_TYPES[name] if name in MODEL_TYPES else describe(name)}"


def _none(words: Sequence[str], wanted: Sequence[str]) -> ConfigError:
    every = {name for types in known_architectures().values() for names in types.values() for name in names}
    by_plain = {_plain(name): name for name in (*every, *MODEL_TYPES, *known_names())}
    near = [by_plain[one] for word in wanted for one in difflib.get_close_matches(word, by_plain, n=3, cutoff=0.5)]
    begins = [name for plain, name in by_plain.items() if any(word.startswith(plain) for word in wanted)]
    similar = list(dict.fromkeys([*sorted(begins, key=len, reverse=True), *near]))[:5]
    return ConfigError(
        f"no architecture that has been seen to train is named like {', '.join(words)}",
        where="shardtune models",
        remedy=(f"similar ones: {', '.join(similar)}; " if similar else "")
        + "the name is model_type in the model's config.json; others may train too, which train --dry-run checks",
    )


def _plain(name: str) -> str:
    """A name without its signs, in small letters: Qwen3-MoE and qwen3_moe are one."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
