"""A command line of another trainer (`trl sft --learning_rate 2e-5 …`) as the mapping of its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from shardtune.config.foreign.trainers import TRAINERS
from shardtune.config.recipe_file import RecipeLoader
from shardtune.errors import ConfigError

LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "python", "python3")
PROGRAMS = ("trl", "sft", "llamafactory-cli", "train", "axolotl")
PROCESSES = ("num_processes", "nproc_per_node", "num_gpus")
OFF = "no_"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The words after `shardtune convert`.

    Attributes:
        file: a configuration, whose keys `values` change; None: there is none.
        values: of the flags, by name with underscores.
        processes: as the launcher was started with; None: not known.
    """

    file: Path | None
    values: dict[str, object]
    processes: int | None


def read_command_line(words: Sequence[str]) -> CommandLine:
    """Read the words of a command line of another trainer, or the name of its file.

    A flag without a value is true, `--no_NAME` is false, and one with several values is a list, as transformers'
    `HfArgumentParser` reads them.

    Raises:
        ConfigError: a flag is given twice, or there are two files.
    """
    given, processes = list(words), None
    if given and given[0] in LAUNCHERS:
        script = next((place for place, word in enumerate(given) if word.endswith(".py")), 0)
        processes = _processes(_flags(given[:script])[1])
        given = given[script + 1 :]
    files, values = _flags(given)
    files = [name for name in files if name not in PROGRAMS]
    if "config" in values:
        files.append(str(values.pop("config")))
    if len(files) > 1:
        raise ConfigError(f"one configuration is converted, not {' and '.join(files)}", where="shardtune convert")
    return CommandLine(Path(files[0]) if files else None, values, processes)


def _flags(words: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """The words before the first flag, and the values of the flags."""
    first = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    found: dict[str, list[str]] = {}
    name = ""
    for word in words[first:]:
        if not word.startswith("--"):
            found[name].append(word)
            continue
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if name in found:
            raise ConfigError(f"{flag} is given twice", where=flag, remedy="keep one of them")
        found[name] = [value] if equals else []
    return [*words[:first]], dict(_value(name, values) for name, values in found.items())


def _value(name: str, given: Sequence[str]) -> tuple[str, object]:
    if not given:
        plain = name.removeprefix(OFF)
        off = name.startswith(OFF) and any(plain in trainer.table for trainer in TRAINERS.values())
        return (plain, False) if off else (name, True)
    values = [_read(text) for text in given]
    return name, values[0] if len(values) == 1 else values


def _read(text: str) -> object:
    """A value as YAML would have it; text that is no YAML, or would be a mapping by a colon in it, stays text."""
    try:
        value = yaml.load(text, RecipeLoader)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict | list) and text[:1] not in ("{", "[") else value


def _processes(launcher: dict[str, object]) -> int | None:
    found = next((launcher[name] for name in PROCESSES if name in launcher), None)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None
