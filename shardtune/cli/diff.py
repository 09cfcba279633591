"""`shardtune diff`: prints how two runs differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def diff(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run directory, finished or not.")],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code",
            help="Exit with 1 unless rows, logged numbers and weights of final/ are compared and bitwise the same.",
        ),
    ] = False,
) -> None:
    """Show how two runs differ, the first step at which rows or losses part, by how much, and what can explain it.

    Recipe, versions, code, data, template, dtypes and layout are those that the runs recorded; rows are computed from
    recipe and data without a model, in as far as the cache still has them; the weights of final/ are compared tensor by
    tensor. Nothing of the runs is executed.

    **Examples**

    ```text
    shardtune diff runs/first runs/second
    shardtune diff runs/first runs/second --json
    shardtune diff runs/before runs/after --exit-code && echo "bitwise the same"
    ```
    """
    from shardtune.run.diff.compare import compare
    from shardtune.run.diff.show import text

    found = compare(first.expanduser(), second.expanduser())
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else text(found))
    if exit_code and not found.same_numbers:
        raise typer.Exit(1)
