"""`shardtune data audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardtune.cli.arguments import RecipeArgument
from shardtune.cli.results import results_alone
from shardtune.cli.words import split_words
from shardtune.errors import ConfigError, printable


def audit(
    recipe: RecipeArgument = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page: one file.")] = None,
    near: Annotated[
        str, typer.Option(help="on | off: compare rows by n-grams, for near duplicates and near copies.")
    ] = "on",
    sample: Annotated[
        int | None, typer.Option(min=1, help="Compare at most so many rows of each set by n-grams; by default all.")
    ] = None,
    examples: Annotated[int, typer.Option(min=0, help="Rows to name of each kind.")] = 5,
) -> None:
    """Count what is in the rows: targets, rows cut or dropped, duplicates, evaluation rows that training has.

    Exit code 1 if a limit of the recipe is exceeded (data.audit.max_duplicates: 0.01); training is refused then, too.

    **Examples**

    ```text
    shardtune data audit recipe.yaml
    shardtune data audit recipe.yaml --json > audit.json
    shardtune data audit recipe.yaml --html audit.html --examples 20
    shardtune data audit recipe.yaml --near off data.max_length=512
    ```
    """
    if near not in ("on", "off"):
        raise ConfigError(f"--near is {near}", where="--near", remedy="on or off")
    if html is not None:
        _check_place(html.absolute())
    if near == "off" and sample is not None:
        raise ConfigError(
            "--sample is how many rows are compared by n-grams, and --near off compares none",
            where="shardtune data audit",
            remedy="leave one of them out",
        )
    from shardtune.checkpoint.atomic import write_output
    from shardtune.data.audit.audit import Options
    from shardtune.data.cache_directory import print_line
    from shardtune.run.audit import as_text, audit_recipe
    from shardtune.run.audit_page import as_page

    path, overrides = split_words(recipe)
    options = Options(near == "on", sample, examples)
    with results_alone(json):
        found = audit_recipe(path, *overrides, options=options, report=print_line)
    if html is not None:
        try:
            html.parent.mkdir(parents=True, exist_ok=True)
            write_output(html, as_page(found, Path(path or "recipe").name))
        except OSError as error:
            raise ConfigError(f"{html} cannot be written: {error.strerror}", where="--html") from error
    typer.echo(found.model_dump_json(indent=2) if json else printable(as_text(found)))
    raise typer.Exit(1 if found.failed else 0)


def _check_place(file: Path) -> None:
    """Refuse, before anything is read, a file that has no place: its folders are made when it is written."""
    folder = next(parent for parent in file.parents if parent.exists())
    if not folder.is_dir() or file.is_dir():
        what = file if file.is_dir() else folder
        raise ConfigError(
            f"{file} cannot be written: {what} is {'' if what.is_dir() else 'not '}a directory",
            where="--html",
            remedy="name another file: --html FILE",
        )
