"""One mistake: how it is made, the command that meets it, and what the message has to say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.workspace import write_rows

Prepare = Callable[[Path], object]
TRAIN = "train recipe.yaml"
CONTINUE = f"{TRAIN} runner.logger.experiment_name=done runner.max_steps=4"


def nothing(work: Path) -> None:
    """The command line alone is the mistake."""


@dataclass(frozen=True)
class Case:
    """One mistake.

    Attributes:
        name: of the test.
        command: run inside the user's directory; words are split as a shell does.
        keys: further words of it, as they are.
        says: what stands in the message, divided by ` | `.
        prepare: makes the mistake.
    """

    name: str
    command: str
    keys: tuple[str, ...] = ()
    says: str = ""
    prepare: Prepare = nothing


def with_keys(name: str, *keys: str, says: str, prepare: Prepare = nothing) -> Case:
    """A mistake in the overrides of a training run, or in what its recipe names."""
    return Case(name, TRAIN, keys, says, prepare)


def going_on(name: str, *keys: str, says: str, prepare: Prepare = nothing) -> Case:
    """A mistake that shows when a finished run is to go on for longer."""
    return Case(name, CONTINUE, keys, says, prepare)


def in_recipe(name: str, old: str, new: str, *, says: str) -> Case:
    """A mistake in the recipe file: `new` in place of `old`."""

    def spoil(work: Path) -> None:
        text = (work / "recipe.yaml").read_text()
        assert old in text
        (work / "recipe.yaml").write_text(text.replace(old, new))

    return with_keys(name, says=says, prepare=spoil)


def train_rows(name: str, content: Sequence[Mapping[str, Any]], *keys: str, says: str) -> Case:
    """A mistake in the training rows."""
    return with_keys(name, *keys, says=says, prepare=lambda work: write_rows(work / "train.jsonl", content))


def write(file: str, content: str) -> Prepare:
    """Puts a file into the user's directory."""

    def prepare(work: Path) -> None:
        (work / file).parent.mkdir(parents=True, exist_ok=True)
        (work / file).write_text(content)

    return prepare


def remove(*files: str) -> Prepare:
    """Takes files out of the user's directory."""
    return lambda work: [(work / file).unlink() for file in files]


def cut(file: str, count: int) -> Prepare:
    """Takes the last bytes off a file."""
    return lambda work: (work / file).write_bytes((work / file).read_bytes()[:-count])


def change_json(file: str, **values: object) -> Prepare:
    """Sets keys of a JSON file."""
    return lambda work: (work / file).write_text(json.dumps({**json.loads((work / file).read_text()), **values}))


def chat(*turns: tuple[str, object]) -> dict[str, Any]:
    """A row of messages."""
    return {"messages": [{"role": role, "content": content} for role, content in turns]}
