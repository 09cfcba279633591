"""Writes the files of a new model: an adapter with comments, its recipe, a few rows, and a test that passes."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from shardtune.checkpoint.atomic import write_text
from shardtune.errors import ConfigError

TEMPLATES = files("shardtune.cli") / "templates"
NAME, CLASS = "my_model", "MyModel"
"""The model's names in the templates."""
FILES = {
    "{name}.py": "my_model.py.txt",
    "recipe.yaml": "recipe.yaml",
    "rows.jsonl": "rows.jsonl",
    "test_{name}.py": "test_my_model.py.txt",
}


def write_starter(name: str, directory: Path | None = None) -> list[Path]:
    """Write the files of a new model; returns their paths.

    Args:
        name: of the model and its file, a Python identifier.
        directory: to write into; by default one with the model's name. It may contain other files.

    Raises:
        ConfigError: the name cannot be used, one of the files exists, or the directory cannot be written.
    """
    _check_name(name)
    folder = Path(name) if directory is None else directory.expanduser()
    contents = {folder / file.format(name=name): _fill(template, name) for file, template in FILES.items()}
    _check_free(contents)
    _check_hides_nothing(name)
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in contents.items():
            write_text(file, content, durably=False)
            written.append(file)
    except OSError as error:
        for file in written:  # with a part of them the same command would be refused
            file.unlink()
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}",
            where=f"shardtune init {name}",
            remedy="give another directory: --dir",
        ) from error
    return written


def next_steps(written: list[Path]) -> str:
    """The files that `write_starter` wrote, and the commands to continue with."""
    folder = written[0].parent
    commands = {
        "pytest": "train twenty steps, resume, run every check of the adapter",
        "shardtune train recipe.yaml --dry-run": "check everything, save nothing",
        "shardtune train recipe.yaml": "train",
        "shardtune verify adapter recipe.yaml": "only the checks, as a table",
    }
    width = max(map(len, commands))
    lines = [f"wrote {file}" for file in written]
    lines += ["", *([f"  cd {folder}"] if folder != Path() else [])]
    return "\n".join([*lines, *(f"  {command:{width}}   # {what}" for command, what in commands.items())])


def class_name(name: str) -> str:
    """my_model -> MyModel."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _fill(template: str, name: str) -> str:
    text = (TEMPLATES / template).read_text(encoding="utf-8")
    return re.sub(f"{NAME}|{CLASS}", lambda found: name if found[0] == NAME else class_name(name), text)


def _check_name(name: str) -> None:
    """Refuse a name that cannot be a Python module and, in CamelCase, a class."""
    if not name.isidentifier() or keyword.iskeyword(name) or not class_name(name).isidentifier():
        better = re.sub(r"\W+", "_", name).strip("_").lower()
        fits = better.isidentifier() and not keyword.iskeyword(better)
        raise ConfigError(
            f"{name!r} cannot be the name of a Python file and a class",
            where="shardtune init",
            remedy=f"use letters, digits and underscores, as in {better if fits else NAME}",
        )


def _check_hides_nothing(name: str) -> None:
    """Refuse the name of an installed package: from its directory, the file would be imported instead."""
    found = find_spec(name)
    if name in sys.stdlib_module_names or (found is not None and found.origin is not None):
        raise ConfigError(
            f"{name} is the name of an installed package, which {name}.py would hide",
            where="shardtune init",
            remedy=f"choose another name, such as my_{name}",
        )


def _check_free(contents: Mapping[Path, str]) -> None:
    taken = [file for file in contents if file.exists()]
    if taken:
        raise ConfigError(
            f"{', '.join(str(file) for file in taken)} already {'exists' if len(taken) == 1 else 'exist'}",
            where="shardtune init",
            remedy="choose another name, or another directory: --dir",
        )
