"""Writes the recipe that `shardtune convert` makes, or prints it, and the report beside it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import typer

from shardtune.checkpoint.atomic import write_text
from shardtune.cli.words import nearest_option
from shardtune.config.foreign.command_line import read_command_line
from shardtune.config.foreign.convert import convert
from shardtune.config.foreign.launch_keys import TABLES
from shardtune.config.foreign.trainers import TRAINERS
from shardtune.errors import ConfigError, printable


def write_recipe(
    words: Sequence[str], options: Collection[str], trainer: str | None, to: Path | None, world_size: int | None
) -> None:
    """Convert a file, or a command line of another trainer.

    The recipe goes to `to` and the report to standard output; without `to`, the recipe goes to standard output and the
    report to standard error.

    Args:
        words: a file, or a command of another trainer with its flags.
        options: of this command, for a misspelt one.
        trainer: a word of `--from`; None: recognised.
        to: the file of the recipe.
        world_size: the number of processes that it was run with.

    Raises:
        ConfigError: the file cannot be converted, an option is misspelt, or `to` exists or cannot be written, as
            where its folder is missing; then nothing is written.
    """
    _refuse_misspelt(words, options)
    if to is not None and to.exists():
        raise ConfigError(f"{to} exists already", where="--output", remedy="name a new file, or remove this one")
    if to is not None and not to.absolute().parent.is_dir():
        raise ConfigError(
            f"{to} cannot be written: there is no folder {to.parent}", where="--output", remedy="make the folder"
        )
    found = convert(read_command_line(words), trainer, to=to, world_size=world_size)
    if to is None:
        typer.echo(printable(found.recipe), nl=False)
        typer.echo(printable(found.report), err=True)
        return
    try:
        write_text(to, found.recipe, durably=False)
    except OSError as error:
        raise ConfigError(f"{to} cannot be written: {error.strerror}", where="--output") from error
    typer.echo(printable(found.report))
    typer.echo(f"\nwritten: {to}; next: shardtune train {to} --dry-run")


def _refuse_misspelt(words: Sequence[str], options: Collection[str]) -> None:
    """Refuse a flag that is of no trainer and no launcher, and nearly one of this command's own."""
    tables = [*(known.table for known in TRAINERS.values()), *TABLES.values()]
    for word in words:
        flag = word.partition("=")[0]
        theirs = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or any(theirs in table for table in tables):
            continue
        if near := nearest_option(flag, options):
            raise ConfigError(f"there is no option {flag}", where=word, remedy=f"did you mean {near}?")
