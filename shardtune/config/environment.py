"""Values of a recipe that come from environment variables: stored as the reference, `${oc.env:NAME}`, not resolved."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path

from shardtune.config.schema import present_key
from shardtune.config.tree import Tree, get_value
from shardtune.config.values import escape_interpolation

_FROM_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:")
_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*(\w+)")
_REFERENCE = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)")


def references(given: Mapping[str, object]) -> dict[str, object]:
    """The given values that hold a reference to the environment, or to a key whose value does.

    Args:
        given: dotted key -> value as written.
    """
    texts = {dotted: list(_texts(value)) for dotted, value in given.items()}
    found = {dotted for dotted in given if any(map(_FROM_ENVIRONMENT.search, texts[dotted]))}
    more = found
    while more:
        more = {dotted for dotted in given.keys() - found if _refers(texts[dotted], found)}
        found |= more
    return {dotted: given[dotted] for dotted in given if dotted in found}


def _texts(value: object) -> Collection[str]:
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts(part)]


def _refers(texts: Collection[str], keys: Collection[str]) -> bool:
    names = [present_key(name) for text in texts for name in _REFERENCE.findall(text)]
    return any(f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.") for name in names for key in keys)


def as_stored(written: object, resolved: object, final: object, base: Path) -> object:
    """The form of a value in a stored recipe, whose directory is another than the recipe's.

    Args:
        written: the value with its references.
        resolved: without them.
        final: with its paths made absolute.
        base: what its relative paths are relative to.
    """
    if isinstance(written, list) and isinstance(final, list) and isinstance(resolved, list):
        parts = zip(written, resolved, final, strict=True)  # validation keeps the number of entries
        return [as_stored(*part, base) for part in parts]
    if isinstance(written, dict) and isinstance(final, dict) and isinstance(resolved, dict):
        return {name: as_stored(written.get(name), resolved.get(name), final[name], base) for name in final}
    if not isinstance(written, str) or "${" not in written:
        return escape_interpolation(final)
    if not isinstance(final, str) or final == resolved:
        return written if not isinstance(final, list | dict) or final == resolved else escape_interpolation(final)
    absolute = isinstance(resolved, str) and resolved.startswith((os.sep, "~"))
    return written if absolute else f"{escape_interpolation(str(base))}/{written}"


def variables(references: Mapping[str, object]) -> set[str]:
    """The names of the environment variables that references name."""
    return {name for value in references.values() for text in _texts(value) for name in _VARIABLE.findall(text)}


def digests(tree: Tree, keys: Collection[str], salt: str | None = None) -> dict[str, str]:
    """A hash of the value of each key, by which another value can be compared without passing this one on.

    Args:
        tree: the recipe, resolved.
        keys: dotted.
        salt: 16 hexadecimal digits; None: other ones for each key.
    """
    return {dotted: _digest(get_value(tree, dotted), salt or secrets.token_hex(8)) for dotted in keys}


def is_value(digest: str, value: object) -> bool:
    """Whether a hash of `digests` is of a value."""
    return digest == _digest(value, digest.partition(":")[0])


def _digest(value: object, salt: str) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return f"{salt}:{hashlib.blake2b(text.encode(), digest_size=16, salt=bytes.fromhex(salt)).hexdigest()}"
