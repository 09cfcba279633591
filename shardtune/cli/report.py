"""`shardtune report`: writes a page about one or several runs."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from shardtune.errors import printable


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN …]", help="Run directories, finished or not.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The file to write; by default report.html in the directory of the run, of several runs in the "
            "working directory.",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one HTML file about a run, or about several laid over one another; it loads nothing and can be sent round.

    It has curves, answers before and after, the data, the recipe, the environment, the events, and what was verified.
    Every run writes its own at its end.

    **Examples**

    ```text
    shardtune report runs/recipe
    shardtune report runs/recipe --open
    shardtune report runs/first runs/second --out comparison.html
    ```
    """
    from shardtune.run.report.write import write_report

    file = write_report([run.expanduser() for run in runs], out)
    typer.echo(printable(str(file)))
    if show:
        webbrowser.open(file.absolute().as_uri())
