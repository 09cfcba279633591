"""JSON of rows, in which no value is lost: Python's own decoder keeps the last of the values of a key."""

from __future__ import annotations

import json
from typing import Any


class RepeatedKeyError(ValueError):
    """An object has different values under one key."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if found[key] != value:
                raise RepeatedKeyError(f"the key {key!r} is there twice, with different values")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)
"""As `json.JSONDecoder()`, and raises `RepeatedKeyError`."""
