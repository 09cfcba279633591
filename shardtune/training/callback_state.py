"""What callbacks keep in a checkpoint: the text that stands in `state.json`, and finding each callback's own again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from shardtune.errors import ConfigError


def as_text(state: object, method: str, where: str) -> str:
    """The JSON of a state, in which numbers may be infinite or NaN; tuples come back as lists, numpy's numbers as
    Python's.

    Args:
        state: what the callback returned.
        method: the callback's, as errors name it.
        where: what names the callback in the recipe.

    Raises:
        ConfigError: it is no dict, or holds what JSON would lose.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"{method} returned {state!r}", where=where, remedy="return a dict, such as {'best': self.best}"
        )
    return json.dumps(_plain(state, method, where))


def _plain(value: object, place: str, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return _plain(value.item(), place, where)
    if isinstance(value, (list, tuple)):
        return [_plain(entry, f"{place}[{index}]", where) for index, entry in enumerate(value)]
    if isinstance(value, Mapping):
        odd = next((key for key in value if not isinstance(key, str)), None)
        if odd is None:
            return {key: _plain(entry, f"{place}[{key!r}]", where) for key, entry in value.items()}
        raise ConfigError(
            f"the key {odd!r} of {place} is no text", where=where, remedy="JSON has texts as keys: use str(key)"
        )
    raise ConfigError(
        f"{place} is a {type(value).__name__}, which JSON does not have",
        where=where,
        remedy="return numbers, texts, booleans, None, and lists and dicts of them (tensor.tolist(), list(a_set), "
        "str(path)); larger things belong in files of event.run_dir",
    )


def own_states(names: Iterable[str], stored: Iterable[Mapping[str, str]]) -> list[dict[str, Any] | None]:
    """The stored state of each callback, found by the names of its file and class; None where there is none.

    Of several callbacks of one class each has its own, in the order of the recipe.

    Args:
        names: of the callbacks, as `file.py:Class`.
        stored: what a checkpoint has: `{"class": name, "state": text}`.
    """
    left = list(stored)
    found: list[dict[str, Any] | None] = []
    for name in names:
        own = next((entry for entry in left if entry["class"] == name), None)
        found.append(None if own is None else json.loads(own["state"]))
        left = [entry for entry in left if entry is not own]
    return found
