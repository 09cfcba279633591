"""verl's commands: `torchrun … -m verl.trainer.sft_trainer`, with keys as Hydra has them (`optim.lr=1e-5`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from shardtune.errors import ConfigError

PROGRAM = re.compile(r"(?:^|/)verl[./]trainer[./](\w+?)(?:\.py)?$")
"""A module or a script of verl's, and its name."""
FINE_TUNING = ("fsdp_sft_trainer", "sft_trainer", "sft_trainer_ray")
CONFIG_PATH, CONFIG_NAME = "config-path", "config-name"
FLAGS = {"--config-path": CONFIG_PATH, "-cp": CONFIG_PATH, "--config-name": CONFIG_NAME, "-cn": CONFIG_NAME}
"""Hydra's options for a file."""
REMOVED, ADDED = "~", "+"


def place_of(words: Sequence[str]) -> int | None:
    """The place of verl's module or script in a command; None: it is none of its commands."""
    return next((place for place, word in enumerate(words) if PROGRAM.search(word)), None)


def read(
    program: str, words: Sequence[str], value_of: Callable[[str], object]
) -> tuple[Path | None, dict[str, object], list[object]]:
    """Read the words behind the module.

    Args:
        program: the module or script.
        words: those behind it.
        value_of: a value of a key's text.

    Returns:
        the file that replaces verl's own; the keys by their dotted names, null where one is removed; and the files that
        are chosen for sections (`engine=fsdp`), as Hydra's `defaults` has them (`- engine: fsdp`).

    Raises:
        ConfigError: the program does not fine-tune, or a word is no key with a value.
    """
    found = PROGRAM.search(program)
    name = "" if found is None else found[1]
    if name not in FINE_TUNING:
        raise ConfigError(
            f"verl's {name} is no supervised fine-tuning",
            where=program,
            remedy="shardtune trains one model by the tokens of its rows, as sft_trainer does; keep verl for others, "
            "or write the method on the engine (docs/your-method.md)",
        )
    options, rest = _options([*words], program)
    keys: dict[str, object] = {}
    chosen: list[object] = []
    for word in rest:
        key, equals, text = word.lstrip(ADDED).partition("=")
        if word.startswith(REMOVED) and "." in word:
            keys[key.removeprefix(REMOVED)] = None
        elif not equals or not key or key.startswith((REMOVED, "-")):
            raise ConfigError(f"{word} is no key=value", where=program, remedy="leave it out, or put it into the file")
        elif _is_section(key) and text.isidentifier():
            chosen.append({key: text})
        else:
            keys[key] = value_of(text)
    return _file(options), keys, chosen


def _is_section(key: str) -> bool:
    """Whether a key without a dot names a section, whose value is then a file: `engine=fsdp`."""
    return key.partition("@")[0] in ("engine", "optim", "model", "profiler")


def _options(words: list[str], program: str) -> tuple[dict[str, str], list[str]]:
    """Hydra's options, and the other words."""
    options: dict[str, str] = {}
    rest: list[str] = []
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if flag not in FLAGS:
            rest.append(f"{flag}{equals}{value}")
            continue
        if not equals and not words:
            raise ConfigError(f"{flag} has no value", where=program, remedy=f"give {flag} NAME, or leave it out")
        options[FLAGS[flag]] = value if equals else words.pop(0)
    return options, rest


def _file(options: dict[str, str]) -> Path | None:
    """The file of Hydra's options; None: verl's own, whose values are the defaults."""
    folder, name = options.get(CONFIG_PATH), options.get(CONFIG_NAME)
    if folder is None and (name is None or name.removesuffix(".yaml").startswith("sft_trainer")):
        return None
    file = Path(folder or ".") / (name or "sft_trainer")
    return file if file.suffix else file.with_suffix(".yaml")
