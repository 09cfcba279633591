"""What the numbers of an evaluation depend on beside the weights: those of other ones are not compared with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from shardtune.config import Recipe, flatten
from shardtune.run.diff.settings import effects_of
from shardtune.run.inputs import TRAIN_DATA, Inputs
from shardtune.run.resume_check import is_free

SECTIONS = ("data.", "eval.", "actor.tokenizer.")
SPLIT = "data.eval_split"


def measured_by(recipe: Recipe, inputs: Inputs) -> dict[str, str]:
    """A hash of each key that evaluations depend on, with the content of the files that it names; paths are left out.

    Args:
        recipe: of the run.
        inputs: the contents by key.
    """
    values = flatten(recipe.to_dict())
    return {
        key: _hash([_without_paths(value), _contents(key, inputs)])
        for key, value in values.items()
        if key.startswith(SECTIONS) and not is_free(key) and _counts(key, held_out=bool(values[SPLIT]))
    }


def _counts(key: str, *, held_out: bool) -> bool:
    effects = effects_of(key)
    return "evaluation" in effects or "tokens" in effects or (held_out and key == TRAIN_DATA)


def _contents(key: str, inputs: Inputs) -> list[str]:
    named = [found for name, found in inputs.items() if f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.")]
    return [content for found in named for _, content in found]


def _without_paths(value: object) -> object:
    """The value with the names of absolute paths alone, which move with a project."""
    if isinstance(value, dict):
        return {key: _without_paths(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(each) for each in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _hash(parts: Sequence[object]) -> str:
    return blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
