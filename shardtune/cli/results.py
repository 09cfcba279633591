"""Standard output for the results of a command alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

import typer


@contextmanager
def results_alone(apart: bool = True) -> Iterator[Callable[[str], None]]:
    """Inside, what code prints goes to stderr: the constructor of a model, a loss, a transform of rows.

    Yields a function that prints a result to standard output, for programs that read it line by line or as JSON.

    Args:
        apart: False leaves standard output to all.
    """
    output = sys.stdout

    def show(text: str) -> None:
        typer.echo(text, file=output)

    with redirect_stdout(sys.stderr if apart else output):
        yield show
