"""The list of model types and of architectures that train, and a search in it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from shardtune.config import load_recipe
from shardtune.config.model_names import describe, known_names
from shardtune.config.stored_recipe import stored_recipe
from shardtune.config.user_code import import_plugins
from shardtune.errors import ConfigError
from shardtune.models.find_adapter import known_architectures
from shardtune.models.registered_functions import MODEL_TYPES

TASKS = {
    "seq2seq": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "sequence_classifier": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token_classifier": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}
"""The tasks on texts for which transformers has classes of single architectures."""
SPEECH = MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES


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

    def is_wanted(name: str) -> bool:
        return any(word in _plain(name) for word in wanted)

    found = [(name, line) for name, line in _lines() if is_wanted(name)]
    found += [(name, line) for name in _names_of_tasks() if is_wanted(name) for line in _tasks_of(name)]
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
                part = ", its decoder alone" * (name == "causal_lm" and _has_encoder(architecture))
                yield architecture, f"{architecture}: model.model_type={name}, seen to train, {how}{part}"
    for name in (*MODEL_TYPES, *known_names()):
        yield name, f"{name}: {MODEL_TYPES[name] if name in MODEL_TYPES else describe(name)}"


def _has_encoder(architecture: str) -> bool:
    """Whether a class of causal language models is one half of an encoder-decoder."""
    named = architecture in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    return architecture in SPEECH or (named and _config(architecture).get("is_encoder_decoder") is True)


def _names_of_tasks() -> list[str]:
    return sorted({*SPEECH, *(name for names in TASKS.values() for name in names)})


def _tasks_of(name: str) -> Iterator[str]:
    """A line where tasks by name can train an architecture of transformers, and one where it writes what it hears."""
    tasks = [task for task, names in TASKS.items() if name in names]
    if name in SPEECH:
        yield f"{name}: from sounds to text by an adapter of your own, as in examples/speech"
    elif tasks and "pad_token_id" in _config(name):  # others have several parts
        yield f"{name}: model.model_type={' or '.join(tasks)}, by the classes of transformers"


def _config(architecture: str) -> dict[str, object]:
    """The values of an architecture's configuration; empty where it has none without its parts."""
    try:
        return CONFIG_MAPPING[architecture]().to_dict()
    except (KeyError, ValueError, TypeError):
        return {}


def _none(words: Sequence[str], wanted: Sequence[str]) -> ConfigError:
    every = {name for types in known_architectures().values() for names in types.values() for name in names}
    by_plain = {_plain(name): name for name in (*every, *_names_of_tasks(), *MODEL_TYPES, *known_names())}
    near = [by_plain[one] for word in wanted for one in difflib.get_close_matches(word, by_plain, n=3, cutoff=0.5)]
    begins = [name for plain, name in by_plain.items() if any(word.startswith(plain) for word in wanted)]
    both = dict.fromkeys([*sorted(begins, key=len, reverse=True), *near])
    similar = [name for name in both if _plain(name) not in wanted][:5]
    return ConfigError(
        f"no architecture that has been seen to train is named like {', '.join(words)}",
        where="shardtune models",
        remedy=(f"similar ones: {', '.join(similar)}; " if similar else "")
        + "the name is model_type in the model's config.json; others may train too, which train --dry-run checks",
    )


def _plain(name: str) -> str:
    """A name without its signs, in small letters: Qwen3-MoE and qwen3_moe are one."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
